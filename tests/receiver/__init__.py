"""A downstream HTTP server of our own, which the tests script and then ask what arrived.

It speaks just enough HTTP/1.1 over one asyncio loop in a thread of its own: a real server on a real socket that costs little
CPU (the machine is shared with what is being tested), can misbehave in every way that a receiver can, and knows exactly how
many calls overlapped, in all and for one ``webhook-id``. Tests wait for what they expect with `Receiver.wait_for` and
`Receiver.wait_until`, which are woken by each arrival and each answer; nothing here polls or sleeps.
"""

from tests.receiver.answers import Answer, Call, Gate, json_answer
from tests.receiver.ports import black_hole_port, closed_port, silent_port
from tests.receiver.server import Receiver

__all__ = ["Answer", "Call", "Gate", "Receiver", "black_hole_port", "closed_port", "json_answer", "silent_port"]
