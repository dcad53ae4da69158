"""Madeira: asynchronous event delivery on Dramatiq.

The way of one event has four stops: ``madeira/api/events.py``, ``actors/route.py``, ``actors/deliver.py`` and
``madeira/store/deliveries.py``. ``docs/architecture.md`` walks them.
"""

#: The version told in ``User-Agent`` and by ``madeira --version``; ``setup.cfg`` reads it from here.
__version__ = "0.1.0"
