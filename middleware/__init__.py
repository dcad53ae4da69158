"""Dramatiq middleware of Madeira: one file, one class, only the hooks it uses.

The classes import neither each other nor settings nor store; what they need is handed to them where the list is built,
in ``madeira/broker/__init__.py``, which also says why they stand in that order.
"""
