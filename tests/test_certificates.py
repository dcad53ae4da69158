"""Client certificates: which texts make one, and that a key lies in no folder."""

import os
import ssl
import tempfile
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key

from madeira import certificates
from madeira.certificates import check_certificate, load


def texts(issued: trustme.LeafCert) -> tuple[str, str]:
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return chain.decode(), issued.private_key_pem.bytes().decode()


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def pair(authority):
    return texts(authority.issue_cert("madeira.test"))


def encrypted(key: str, form: PrivateFormat) -> str:
    private = load_pem_private_key(key.encode(), None)
    return private.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"passphrase")).decode()


def test_a_certificate_and_its_key_are_accepted(pair, authority):
    """Also with Windows' line ends, with text around them, with the chain's further certificates, and with an RSA key."""
    chain, key = pair
    assert check_certificate(chain, key) is None
    assert check_certificate(chain.replace("\n", "\r\n"), key.replace("\n", "\r\n")) is None
    assert check_certificate("subject=x\n" + chain.strip(), key.strip()) is None
    below = authority.create_child_ca()
    assert check_certificate(*texts(below.issue_cert("madeira.test"))) is None
    assert check_certificate(*texts(authority.issue_cert("madeira.test", key_type=trustme.KeyType.RSA))) is None


def test_an_expired_certificate_is_for_the_receiver_to_refuse(authority):
    """A file that was good when it was saved must not stop the next save of something else."""
    from datetime import UTC, datetime

    old = authority.issue_cert("madeira.test", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    assert check_certificate(*texts(old)) is None


def test_each_mistake_has_its_own_reason(pair, authority):
    """OpenSSL's own would be "PEM lib" for all; and none of them asks for a passphrase on the terminal."""
    chain, key = pair
    _, other = texts(authority.issue_cert("other.test"))
    assert "does not belong" in (check_certificate(chain, other) or "")
    assert "no certificate in PEM" in (check_certificate("", key) or "")
    assert "no certificate in PEM" in (check_certificate(key, chain) or "")
    assert "no certificate in PEM" in (check_certificate(chain[:200], key) or "")
    assert "no private key in PEM" in (check_certificate(chain, "") or "")
    assert "no private key in PEM" in (check_certificate(chain, key[:100]) or "")
    assert "no private key in PEM" in (check_certificate(chain, "\u00e9\ud800") or "")
    for form in (PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL):
        assert "passphrase" in (check_certificate(chain, encrypted(key, form)) or "")


def test_a_reason_tells_nothing_of_the_key(pair, authority):
    """It goes into logs and answers."""
    chain, key = pair
    _, other = texts(authority.issue_cert("other.test"))
    for wrong in (other, key[:100], key.replace("E", "F"), encrypted(key, PrivateFormat.PKCS8)):
        reason = check_certificate(chain, wrong) or ""
        assert reason
        assert not any(line in reason for line in wrong.splitlines() if line)


def test_a_key_is_written_into_no_folder(pair, monkeypatch):
    """Where files can be in memory, none is made elsewhere: there is no place for one here."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    before = os.listdir("/proc/self/fd")
    load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), *pair)
    with pytest.raises(certificates.CertificateUnusable):
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair[0], "")
    assert os.listdir("/proc/self/fd") == before


def test_where_files_cannot_be_in_memory_one_is_removed_at_once(pair, monkeypatch, tmp_path):
    """Only its owner may read it meanwhile."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with certificates._file(b"content") as path:
        assert Path(path).read_bytes() == b"content"
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), *pair)
    assert list(tmp_path.iterdir()) == []
