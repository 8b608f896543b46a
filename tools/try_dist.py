"""The wheel in dist/, installed clean on each Python that is here: `make try-dist`.

Owns what is tried. The rules: each Python gets virtual environments of its own, in which nothing
but the wheel and what it asks for is installed; the programs run outside of the checkout. A Python
below the least one has to be refused by pip.

    python -m tools.try_dist python3.12 /opt/python3.13/bin/python    instead of those on the path
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST = (3, 11)
MINORS = range(10, 16)
CLIENT = """\
import importlib.metadata, sys
import malamute_py as malamute
for name in malamute.__all__:
    if name != "EmbeddedBroker":
        getattr(malamute, name)
extras = {"structlog", "typer", "starlette", "pyarrow", "re2"}
assert not extras & {name.partition(".")[0] for name in sys.modules}, "a client needs no extra"
try:
    malamute.EmbeddedBroker
except ModuleNotFoundError as error:
    assert "malamute-py[server]" in str(error), error
else:
    sys.exit("there is a broker without the extra")
print(" ".join(sorted(
    each.name for each in importlib.metadata.distributions()
    if each.name not in ("pip", "setuptools")
)))
"""
BROKER = """\
import sys
import malamute_py as malamute
with malamute.EmbeddedBroker(sys.argv[1], **{"http.bind": "127.0.0.1:0"}, tcp=True) as broker:
    with broker.connect_sync() as client:
        client.publish_many("trades", [b"1", b"2"], codec="gzip")
        records = client.subscribe("trades", start="earliest", until="tail")
        assert [record.body for record in records] == [b"1", b"2"]
"""


def pythons() -> list[str]:
    """Return the Pythons on the path, one of each minor version, that start."""
    found = (shutil.which(f"python3.{minor}") for minor in MINORS)
    return [path for path in found if path is not None and version(path) is not None]


def version(python: str) -> tuple[int, int] | None:
    """Return its version; None for one that does not start, as pyenv's for what is not chosen."""
    asked = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if asked.returncode:
        return None
    major, minor = map(int, asked.stdout.split())
    return major, minor


def tried(python: str, wheel: Path, place: Path) -> str:
    """Install and run; returns what happened, in a line. Raises CalledProcessError."""
    venv = place / "client"
    run([python, "-m", "venv", str(venv)], place)
    if (version(python) or LEAST) < LEAST:
        refused = subprocess.run(
            [venv / "bin" / "pip", "install", "-q", "--no-deps", str(wheel)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if refused.returncode == 0 or "requires a different Python" not in refused.stderr:
            raise SystemExit(f"{python}: pip took the wheel: {refused.stderr}")
        return "refused by pip: it requires a later Python"
    inside = str(venv / "bin" / "python")
    run([inside, "-m", "pip", "install", "-q", str(wheel)], place)
    alone = run([inside, "-c", CLIENT], place).strip()
    server = str(place / "server" / "bin" / "python")
    run([python, "-m", "venv", str(place / "server")], place)
    run([server, "-m", "pip", "install", "-q", f"{wheel}[server,http]"], place)
    run([server, "-c", BROKER, str(place / "data")], place)
    run([server, "-m", "malamute_py", "deploy", "compose", "--to", str(place / "compose")], place)
    shown = run([str(place / "server" / "bin" / "malamute"), "--version"], place).strip()
    return f"{shown}; a client alone has {alone}"


def run(command: list[str], place: Path) -> str:
    """Run a command outside of the checkout, and return what it printed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=place)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ...: {done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> None:
    """Try each; ends in failure at the first that does not hold."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise SystemExit("there is no wheel in dist/: make dist")
    for python in arguments or pythons():
        with tempfile.TemporaryDirectory() as folder:
            told = tried(python, wheels[-1], Path(folder))
        print(f"{python}: {told}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
