"""The wheel and the sdist: built here, installed into a clean virtual environment, and used from there, far from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from ipn_gateway import __version__
from tests.architecture.source import PACKAGE, ROOT
from tests.cli import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Server

pytestmark = pytest.mark.timeout(180)

COPIED = (
    "pyproject.toml",
    "README.md",
    "requirements.lock",
    "Makefile",
    "Dockerfile",
    ".dockerignore",
    "ipn_gateway",
    "alembic",
    "docs",
    "tests",
)


def _run(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _build(source: Path, kind: str, into: Path) -> Path:
    _run(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", into, cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, from a copy of the checkout: nothing is built into the tree."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        original = ROOT / name
        copy = shutil.copytree if original.is_dir() else shutil.copy2
        copy(original, checkout / name)
    return _build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, from what the source distribution holds and from nothing else."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return _build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of commands of a clean environment with the wheel; what it depends on is lent by this one: no network is needed."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    if uv := shutil.which("uv"):
        _run(uv, "venv", "--quiet", "--python", sys.executable, home, cwd=home.parent)
        _run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", home / "bin/python", wheel, cwd=home.parent)
    else:
        _run(sys.executable, "-m", "venv", home, cwd=home.parent)
        _run(home / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=home.parent)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield home / "bin"
    shutil.rmtree(home)


def test_the_wheel_holds_the_package_and_its_migrations(wheel: Path):
    """Every module, and the migrations inside the package, where they do not shadow the library of that name; no tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    migrations = {f"ipn_gateway/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "alembic").rglob("*.py")}

    assert modules | migrations <= names
    assert {name.partition("/")[0] for name in names} == {"ipn_gateway"}
    assert "Requires-Python: >=3.11" in metadata


def test_the_sdist_holds_what_building_and_testing_need(sdist: Path):
    """The lock, the migrations, the tests and the docs are there; caches and environments are not."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "pyproject.toml",
        "requirements.lock",
        "Makefile",
        "Dockerfile",
        "alembic/env.py",
        "tests/conftest.py",
        "docs/README.md",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


def test_the_installed_command_is_the_wheels(installed: Path, tmp_path: Path):
    """It runs from any folder, and what it imports is what was installed."""
    where = "import ipn_gateway, ipn_gateway.migrations as m; print(ipn_gateway.__file__); print(m.scripts())"

    version = _run(installed / "ipn-gateway", "--version", cwd=tmp_path)
    module, scripts = _run(installed / "python", "-c", where, cwd=tmp_path).splitlines()

    assert version == f"{__version__}\n"
    assert Path(module).is_relative_to(installed.parent)
    assert Path(scripts).is_relative_to(installed.parent)


async def test_the_installed_gateway_migrates_and_serves(installed: Path, server: Server):
    """On an empty database, with the migrations of the wheel: alive, ready, and ended in order."""
    with server.database() as url:
        settings = command.given_database(url)
        command_line = (str(installed / "ipn-gateway"), "serve", "--port", "0", "--migrate")
        async with command.serving_by_path(*command_line, **settings) as gateway, httpx.AsyncClient() as client:
            answers = [(await client.get(f"{gateway.url}/{path}")).status_code for path in ("healthz", "readyz")]
            stopped = await gateway.stopped()

    assert answers == [200, 200]
    assert stopped.code == 0
