"""The API with its console."""

from tests.api.conftest import serve, shared_api  # noqa: F401  # fixtures
