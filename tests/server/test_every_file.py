"""Each file of a data directory, lost or damaged in each way: the rest is served."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.server import StartError

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "journal.segment_bytes": 1 << 20,
    "journal.ring_bytes": 8 << 20,
    "limits.batch_bytes_max": 256 << 10,
    "limits.record_bytes_max": 128 << 10,
}
COUNT = 20


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2 if len(data) < 1 << 20 else 5000] ^= 16
    path.write_bytes(data)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    elsewhere = path.parents[len(path.parts) - path.parts.index("data") - 1] / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FATES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "cut": cut,
    "a bit flipped": flip,
    "a FIFO": fifo,
    "a link": link,
    "a directory": directory,
}


@pytest.fixture(scope="module", params=["closed", "killed"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("whole") / "data"
    with EmbeddedBroker(place, **SMALL) as broker, broker.connect_sync() as client:
        client.create_stream("own", ring_bytes=4 << 20)
        for number in range(COUNT):
            client.publish("shared", b"shared %d" % number)
            client.publish("own", b"own %d" % number)
        client.send("crew", b"mail")
        if request.param == "killed":
            # As after a kill: the files as they are, synced as they were confirmed.
            shutil.copytree(place, place.with_name("killed") / "data")
    return place if request.param == "closed" else place.with_name("killed") / "data"


@pytest.mark.parametrize("fate", list(FATES))
def test_what_was_not_in_the_file_is_served(whole: Path, tmp_path: Path, fate: str) -> None:
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert len(names) > 12
    for at, name in enumerate(names):
        place = tmp_path / str(at) / "data"
        shutil.copytree(whole, place)
        FATES[fate](place / name)
        running = contextlib.ExitStack()
        try:
            broker = running.enter_context(EmbeddedBroker(place, **SMALL))
        except StartError as error:
            # No other file says the same as these; the error says what to do.
            said = str(error)
            assert any(word in said for word in ("restore", "move", "verify")), said
            main = name.parts[:2] == ("rings", "main")
            assert main or name.name == "lock" or fate == "a directory", (name, said)
            continue
        with running, broker.connect_sync() as client:
            for stream in ("shared", "own"):
                records = client.subscribe(stream, start="earliest", until="tail", create=True)
                bodies = [bytes(record.body) for record in records]
                every = [b"%s %d" % (stream.encode(), number) for number in range(COUNT)]
                # The names of streams are in ring main's segments, and nowhere else.
                if name.suffix != ".seg":
                    assert bodies == every, (name, stream)
                assert set(bodies) <= set(every), (name, stream)
                offset = client.publish(stream, b"goes on").offset
                if name.parts[:2] != ("rings", "main"):
                    assert offset >= COUNT, (name, stream, "an offset comes again")
                    if stream == "shared":
                        assert bodies == every, (name, stream)
