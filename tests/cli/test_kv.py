"""`malamute kv ...`: the keys of a stream on the command line."""

from __future__ import annotations

import json

import pytest

from tests.cli.running import Run


@pytest.fixture
def keys(m: Run, stream: str) -> str:
    """A stream with keys."""
    m(
        "stream", "create", stream, "--keys", "--ring-bytes", "4MiB"
    ).ok()  # fmt: skip
    return stream


def test_a_key_is_put_got_updated_and_deleted(m: Run, keys: str) -> None:
    put = m("kv", "put", keys, "colour", "red", "--json").ok().json
    assert put == {"key": "colour", "revision": 1}
    assert m("kv", "get", keys, "colour").ok().out == "red"
    m("kv", "update", keys, "colour", "green", "--revision", "1").ok()
    refused = m("kv", "update", keys, "colour", "blue", "--revision", "1")
    assert refused.code == 1
    assert "revision 2" in refused.err
    found = m("kv", "get", keys, "colour", "--json").ok().json
    assert (found["value"], found["revision"]) == ("green", 2)
    m("kv", "delete", keys, "colour").ok()
    again = m("kv", "delete", keys, "colour")
    assert again.code == 1
    assert "there is no key 'colour'" in again.err
    gone = m("kv", "get", keys, "colour")
    assert gone.code == 1
    assert "colour" in gone.err


def test_a_value_may_come_from_standard_input(m: Run, keys: str) -> None:
    m("kv", "put", keys, "text", stdin="a\nb\n").ok()
    assert m("kv", "get", keys, "text").ok().out == "a\nb\n"


def test_keys_watch_and_history(m: Run, keys: str) -> None:
    for number in range(2):
        m("kv", "put", keys, "a", str(number)).ok()
    m("kv", "put", keys, "b", "x").ok()
    assert m("kv", "keys", keys).ok().lines == ["a\t2", "b\t3"]
    watched = m("kv", "watch", keys, "--present", "--json").ok().lines
    assert [json.loads(line)["key"] for line in watched] == ["a", "b"]
    history = m("kv", "history", keys, "a", "--json").ok().lines
    assert [json.loads(line)["value"] for line in history] == ["0", "1"]


def test_a_stream_without_keys_is_named_with_how_to_make_one(m: Run, stream: str) -> None:
    m("stream", "create", stream).ok()
    refused = m("kv", "get", stream, "a")
    assert refused.code == 1
    assert "--keys --ring-bytes" in refused.err
