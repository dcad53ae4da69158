"""What `pip install .` installs."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel, built from a copy: a build leaves traces in its folder."""
    source = tmp_path_factory.mktemp("source") / "madeira"
    copytree(ROOT, source, ignore=ignore_patterns(".*", "*.egg-info", "build", "__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_package_holds_every_file_that_it_needs(names: set[str]) -> None:
    """Python, SQL, Lua and the marker of types: what the checkout has is installed too."""
    wanted = {
        str(file.relative_to(ROOT))
        for package in ("madeira", "actors", "middleware")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert any(name.endswith(".lua") for name in wanted)
    assert any(name.endswith(".sql") for name in wanted)
    assert not wanted - names


def test_the_package_holds_nothing_else(names: set[str]) -> None:
    """No tests and no benchmarks land among other people's packages; gunicorn's configuration comes with it."""
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name}
    assert tops == {"madeira", "actors", "middleware"}
    assert any(name.endswith("share/madeira/gunicorn.conf.py") for name in names)
