"""The API with its console, and a connection to the database that it shows."""

from tests.api.conftest import conn, serve, shared_api  # noqa: F401  # fixtures
