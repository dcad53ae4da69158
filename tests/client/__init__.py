"""The Python client and the programs of the examples, against the real API."""
