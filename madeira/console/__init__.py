"""The browser door: pages for whoever watches, and for whoever was woken.

Every page is made on the server, and every filter stands in its address. It is an application of its own under ``/console``,
beside the API in the same processes: its errors are words for people, and its cookies mean nothing to the API. It has no other
way to read or to change anything than the API has.
"""

from madeira.console.app import create

__all__ = ["create"]
