"""`malamute kv ...`: the keys of a stream on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.running import Run, as_user, broker_of


@pytest.fixture
def keys(m: Run, stream: str) -> str:
    """A stream with keys."""
    m(
        "stream", "create", stream, "--keys", "--ring-bytes", "4MiB"
    ).ok()  # fmt: skip
    return stream


@pytest.mark.moderate
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


@pytest.mark.moderate
@pytest.mark.parametrize("grant", [{"write": ["s"]}, {"write_subjects": {"s": ["eu.*"]}}], ids=str)
def test_who_may_write_and_not_read_sets_and_deletes_keys(grant: dict[str, Any]) -> None:
    with broker_of({"ann": grant, "root": {"admin": True, "read": ["*"]}}) as running:
        run, root = as_user(running, "ann"), as_user(running, "root")
        root("stream", "create", "s", "--keys", "--ring-bytes", "4MiB").ok()
        run("kv", "put", "s", "eu.a", "1").ok()
        run("kv", "update", "s", "eu.b", "2", "--revision", "0").ok()
        run("kv", "delete", "s", "eu.a").ok()
        assert run("kv", "get", "s", "eu.b").code == 1
        assert root("kv", "keys", "s").ok().rows == [["eu.b", "2"]]
        for confirm in ("stored", "none"):
            told = run("kv", "put", "s", "us.a", "1", "--confirm", confirm)
            assert told.code == ("write" not in grant)
        # What the broker refused is asked for behind it, where the user may read nothing, too.
        run("pub", "s", "3", "--subject", "eu.c", "--confirm", "none").ok()
        assert root("kv", "get", "s", "eu.c").ok().out == "3"


@pytest.mark.moderate
def test_an_update_without_a_confirm_that_met_another_revision_ends_with_1(
    m: Run, keys: str
) -> None:
    m("kv", "put", keys, "k", "1").ok()
    told = m("kv", "update", keys, "k", "2", "--revision", "99", "--confirm", "none")
    assert told.code == 1
    assert "the broker refused some of it" in told.err
    assert m("kv", "get", keys, "k").ok().out == "1"


def test_a_value_may_come_from_standard_input(m: Run, keys: str) -> None:
    m("kv", "put", keys, "text", stdin="a\nb\n").ok()
    assert m("kv", "get", keys, "text").ok().out == "a\nb\n"


@pytest.mark.moderate
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
