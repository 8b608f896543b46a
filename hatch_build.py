"""Compiles the hot typed modules as they are, for wheels and for `make compile`.

Owns how the modules that pyproject.toml lists (wheel.hooks.custom, the one list) become C by mypyc.
The rules: what is compiled never lies beside the sources of a checkout, so that an edit always
counts; whatever is missing for it (mypy, setuptools, a C compiler) is said in a word, and the
plain modules are what is built.

    python hatch_build.py             # build/compiled: the packages, compiled where listed
    python hatch_build.py --required  # the same; an end in failure where they stay plain

A group is compiled together: within it calls are C calls. It is compiled anew when a source in the
folders that it reads has changed since. A wheel has compiled modules when MALAMUTE_COMPILE=1 asks
for them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
BUILT = ROOT / "build" / "mypyc"
"""Results of each group: C sources, libraries, the log, and the digest of what they were made
from."""
TREE = ROOT / "build" / "compiled"
"""Folder for PYTHONPATH: a copy of the packages with the compiled modules."""
ASKED = "MALAMUTE_COMPILE"
SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")


class Impossible(Exception):
    """The modules stay plain; the reason, in a word."""


class Group:
    """Modules that are compiled together."""

    def __init__(self, name: str, reads: list[str], modules: list[str]) -> None:
        self.name = name
        self.reads = reads
        self.modules = modules
        self.folder = BUILT / name
        self.libraries = self.folder / "lib"
        self.log = self.folder / "log"
        self._made_from = self.folder / "digest"

    def digest(self) -> str:
        """Return a digest of all that its C depends on."""
        from mypy.version import __version__ as mypy_version

        told = hashlib.sha256(f"{sys.version} {mypy_version} {self.modules}".encode())
        sources = [path for folder in self.reads for path in sorted((ROOT / folder).rglob("*.py"))]
        for path in [Path(__file__), *sources]:
            told.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
        return told.hexdigest()

    def made(self) -> bool:
        """Whether its libraries are those of the present sources."""
        return self._made_from.exists() and self._made_from.read_text() == self.digest()

    def begin(self) -> subprocess.Popen[bytes]:
        """Compile in a process of its own: mypyc exits on a failure, and prints."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, __file__, "--group", self.name],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def end(self, compiling: subprocess.Popen[bytes], digest: str) -> None:
        """Wait for the process. Raises Impossible; the log stays."""
        if compiling.wait():
            lines = self.log.read_text(errors="replace").splitlines()
            said = [line for line in lines if "error" in line.lower()] or lines or ["no word"]
            raise Impossible(f"{self.name}: {said[-1].strip()} (all of it: {self.log})")
        self._made_from.write_text(digest)

    def compile(self) -> None:
        """Compile in this process, into its folder."""
        from mypyc.build import mypycify
        from setuptools import Distribution

        settings = ["--config-file", "pyproject.toml", "--follow-imports=silent"]
        extensions = mypycify(
            [*settings, *self.modules], opt_level="2", debug_level="0",
            group_name=self.name, target_dir=str(self.folder / "c"),
        )  # fmt: skip
        command = Distribution({"name": self.name, "ext_modules": extensions}).get_command_obj(
            "build_ext"
        )
        command.build_lib = str(self.libraries)
        command.build_temp = str(self.folder / "o")
        command.ensure_finalized()
        command.run()


def groups() -> list[Group]:
    """Return the groups that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [Group(**group) for group in wheel["hooks"]["custom"]["groups"]]


def packages() -> dict[str, Path]:
    """Return name -> folder of the packages that a wheel holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {Path(folder).name: ROOT / folder for folder in folders}


def libraries() -> dict[str, Path]:
    """Return path in a wheel -> module, compiled now where a source has changed.

    Raises Impossible with the reason why there is none.
    """
    for module, source in (("mypyc", "mypy"), ("setuptools", "setuptools")):
        if importlib.util.find_spec(module) is None:
            raise Impossible(f"{source} is not installed")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise Impossible(f"no C compiler ({compiler})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise Impossible("no headers of Python (on Debian: python3-dev)")
    stale = [(group, group.digest()) for group in groups() if not group.made()]
    if stale:
        names = ", ".join(group.name for group, _ in stale)
        print(f"compiling {names}: about a minute and a half", flush=True)
    begun = [(group, digest, group.begin()) for group, digest in stale]
    failures = []
    for group, digest, compiling in begun:
        try:
            group.end(compiling, digest)
        except Impossible as reason:
            failures.append(str(reason))
    if failures:
        raise Impossible("; ".join(failures))
    return {
        str(path.relative_to(group.libraries)): path
        for group in groups()
        for path in sorted(group.libraries.rglob(f"*{SUFFIX}"))
    }


def assemble(found: dict[str, Path]) -> None:
    """Make TREE anew: the packages as they are, with these beside them."""
    fresh = TREE.with_name("compiled.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, folder in packages().items():
        shutil.copytree(folder, fresh / name, ignore=shutil.ignore_patterns("__pycache__"))
    for place, path in found.items():
        shutil.copy2(path, fresh / place)
    shutil.rmtree(TREE, ignore_errors=True)
    fresh.rename(TREE)


def main(arguments: list[str]) -> int:
    """Run `make compile`; or, in a process of its own, compile one group."""
    if arguments[:1] == ["--group"]:
        (group,) = (group for group in groups() if group.name == arguments[1])
        group.compile()
        return 0
    try:
        found = libraries()
    except Impossible as reason:
        print(f"the modules stay plain: {reason}")
        assemble({})
        return int("--required" in arguments)
    assemble(found)
    print(f"{sum(len(group.modules) for group in groups())} modules compiled: {TREE}")
    return 0


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `make compile` needs no hatchling
    pass
else:

    class CompiledModules(BuildHookInterface[Any]):
        """A build hook of hatchling, which puts compiled modules beside the plain ones."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Add the compiled modules; see hatchling's build hooks."""
            if version == "editable" or not os.environ.get(ASKED):
                return
            try:
                found = libraries()
            except Impossible as reason:
                self.app.display_info(f"the modules stay plain: {reason}")
                return
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["force_include"].update({str(path): place for place, path in found.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
