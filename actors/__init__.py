"""The actors: what Madeira does, one file per kind of work. ``madeira/actors.py`` imports them after it built the broker."""
