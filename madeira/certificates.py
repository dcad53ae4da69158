"""Client certificates: whether two PEM texts make one, and how they get into an `ssl.SSLContext`.

Below both the configuration, which checks a certificate before it is kept, and the calls, which show it: so both refuse the
same ones. Python's ``ssl`` reads a key from a file only; the file used here exists in memory and has no name in any folder
(where the system cannot do that: a file that only its owner may read, removed at once).
"""

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from madeira.errors import MadeiraError


class CertificateUnusable(MadeiraError):
    """Raised when a client certificate and its key cannot be used; the message says why and tells nothing of the key."""


def check_certificate(chain: str, key: str) -> str | None:
    """Why `chain` (the certificate, then those that lead to its authority) and `key` cannot be used; both are PEM.

    Whether it has expired is for the receiver to say.
    """
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), chain, key)
    except CertificateUnusable as e:
        return str(e)
    return None


def load(context: ssl.SSLContext, chain: str, key: str) -> None:
    """Let connections made with `context` show this certificate.

    Raises:
        CertificateUnusable: the texts are none, do not belong together, or the key has a passphrase.
    """
    _check_pair(chain, key)
    try:
        with _file(f"{chain.strip()}\n{key.strip()}\n".encode()) as path:
            # Without a password given OpenSSL would ask for one on the terminal.
            context.load_cert_chain(path, password="")
    except (ssl.SSLError, OSError, ValueError) as e:
        raise CertificateUnusable(f"the client certificate is not accepted by OpenSSL: {_reason(e)}") from None


def _check_pair(chain: str, key: str) -> None:
    """Find the usual mistakes, which OpenSSL does not tell apart."""
    try:
        certificate = x509.load_pem_x509_certificates(chain.encode())[0]
        public = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateUnusable("the chain of the client certificate holds no certificate in PEM") from None
    try:
        private = load_pem_private_key(key.encode(), password=None)
    except TypeError:
        raise CertificateUnusable("the key of the client certificate has a passphrase; give it without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateUnusable("the key of the client certificate is no private key in PEM") from None
    encoding = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if private.public_key().public_bytes(*encoding) != public.public_bytes(*encoding):
        raise CertificateUnusable("the key does not belong to the first certificate of the client certificate's chain")


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[str]:
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:  # made with mode 0600
            file.write(content)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or type(error).__name__
