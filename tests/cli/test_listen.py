"""`madeira listen` judges calls by the secrets that it was given, whatever they look like and however they are named."""

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from madeira.delivery.signing import standard_signature

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

IN_BASE64 = "whsec_" + base64.b64encode(b"the key of this test").decode()


@contextmanager
def listening(*arguments: str, **variables: str) -> Iterator[str]:
    """A receiver with these arguments and these variables beside its environment; its URL."""
    command = [sys.executable, "-m", "madeira.cli", "listen", "--port", "0", *arguments]
    environ = os.environ | variables | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            told = process.stdout.readline()
            assert told.startswith("listening on http://"), told
            yield told.split()[-1]
        finally:
            process.terminate()


def call(url: str, secret: str, body: bytes = b'{"n": 1}', signature: str | None = None) -> int:
    """The status of a call that was signed with `secret`."""
    now = str(int(time.time()))
    signed = standard_signature([secret], "m1", now, body) if signature is None else signature
    headers = {"webhook-id": "m1", "webhook-timestamp": now, "webhook-signature": signed}
    return httpx.post(url, content=body, headers=headers, trust_env=False).status_code


@pytest.mark.parametrize("secret", [IN_BASE64, "any text: @@, d\xe9j\xe0 vu", "abcd"])
def test_a_genuine_call_is_good_whatever_the_secret_looks_like(secret: str) -> None:
    """An endpoint takes any text; the receiver uses the same key for it, given as it is or by the name of a variable."""
    for arguments in (["--secret", secret], ["--secret", "env:SECRET_OF_THIS_TEST"]):
        with listening(*arguments, SECRET_OF_THIS_TEST=secret) as url:
            assert call(url, secret) == 200
            assert call(url, secret, b"no JSON") == 200
            assert call(url, "another") == 401


@pytest.mark.parametrize(("body", "signature"), [(b"{}", "v1"), (b"{}", "v1,%"), (b"\xff", None)])
def test_a_malformed_call_is_wrong_and_answered(body: bytes, signature: str | None) -> None:
    """It gets 401 like any other that is not genuine."""
    with listening("--secret", "abcd") as url:
        assert call(url, "another", body, signature) == 401
        assert call(url, "abcd") == 200
