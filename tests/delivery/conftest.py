"""A receiver and a caller for it, an authority that they trust; and properties without a limit of time per example.

They are judged by what they find, not by how long one example took on a busy machine.
"""

import pytest
import trustme
from hypothesis import settings

from madeira.delivery.client import Caller
from tests.delivery.samples import LOOPBACK
from tests.receiver import Receiver

settings.register_profile("delivery", deadline=None)
settings.load_profile("delivery")


@pytest.fixture
def receiver():
    with Receiver() as running:
        yield running


@pytest.fixture
def caller():
    with Caller(egress=LOOPBACK, max_connections=8) as made:
        yield made


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture(scope="session")
def ca_file(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path
