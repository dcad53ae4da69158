"""Small file systems that a test fills."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    """A tmpfs with these options of mount; the test is skipped where this user may not mount one."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    folder = Path(tempfile.mkdtemp(prefix="madeira-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "madeira-test", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def fill(folder: Path) -> Path:
    """The file that takes every byte that the disk of `folder` had left."""
    file = folder / "filling"
    with suppress(OSError), file.open("wb", buffering=0) as f:
        while f.write(bytes(1024)):
            pass
    return file
