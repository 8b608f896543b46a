"""`malamute send`, `inbox` and `mailbox`, as scripts use them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.cli import inbox, mailboxes
from malamute_py.cli.letters import MailWriter
from tests.cli.running import Run, Torn
from tests.waiting import WAIT_MS


@pytest.fixture
def box(stream: str) -> str:
    """A mailbox name that no other test uses."""
    return stream


def messages(m: Run, box: str) -> int:
    (entry,) = [each for each in m("mailbox", "ls", box, "--json").ok().json if each["name"] == box]
    count: int = entry["messages"]
    return count


def test_one_message_is_confirmed_with_its_number(m: Run, box: str) -> None:
    (row,) = m("send", box, "one").ok().rows
    assert (row[0], row[2]) == (box, "synced")
    told = m("send", box, "two", "--confirm", "stored", "--json").ok().json
    assert (told["mailbox"], told["level"]) == (box, "stored")
    assert told["number"] > int(row[1])


def test_each_line_of_the_input_is_a_message(m: Run, box: str) -> None:
    (row,) = m("send", box, stdin="one\ntwo\n\nfour").ok().rows
    assert row[:3] == [box, "4", "synced"]
    assert int(row[4]) - int(row[3]) == 3
    assert m("inbox", box, "--until-empty").ok().bytes == b"one\ntwo\n\nfour\n"
    assert messages(m, box) == 0


def test_the_whole_input_and_files_are_messages(m: Run, box: str, tmp_path: Path) -> None:
    m("send", box, "--whole", stdin="a\nb\n").ok()
    (tmp_path / "x.txt").write_bytes(b"file\n")
    m("send", box, "--file", str(tmp_path / "x.txt"), "--subject-from-name", "-s", "f").ok()
    found = m("inbox", box, "--until-empty", "--json").ok().json_lines
    assert [(each["subject"], each["body"]) for each in found] == [
        ("", "a\nb\n"),
        ("f.x", "file\n"),
    ]


@pytest.mark.moderate
def test_options_reach_the_reader(m: Run, box: str) -> None:
    m("send", box, "x", "-s", "a.b", "-s", "k2", "-f", "region=eu", "-p", "trace=7",
      "--expires", "1d").ok()  # fmt: skip
    (mail,) = m("inbox", box, "--until-empty", "--json").ok().json_lines
    assert mail["keys"] == ["a.b", "k2"]
    assert (mail["fields"], mail["properties"]) == ({"region": "eu"}, {"trace": "7"})
    assert mail["expires"] > mail["time"]
    assert mail["sender"].startswith("~")


@pytest.mark.moderate
def test_priority_goes_first_and_delayed_mail_later(m: Run, box: str) -> None:
    m("send", box, "later", "--in", "1h").ok()
    m("send", box, "plain").ok()
    m("send", box, "urgent", "--priority", "5").ok()
    assert m("inbox", box, "--until-empty").ok().lines == ["urgent", "plain"]
    (left,) = m("mailbox", "peek", box, "--json").ok().json_lines
    assert (left["body"], left["held"]) == ("later", False)
    assert left["not_before"] > left["time"]


@pytest.mark.moderate
def test_json_lines_read_back_what_inbox_prints(m: Run, box: str) -> None:
    lines = [
        {"body": "a", "subject": "x.y", "fields": {"k": "v"}, "properties": {"n": 1}},
        {"body_base64": base64.b64encode(b"\xff\n").decode(), "keys": ["p", "q"]},
    ]
    m("send", box, "--json-lines", stdin="\n".join(map(json.dumps, lines))).ok()
    first = m("inbox", box, "--until-empty", "--json").ok()
    m("send", f"{box}-copy", "--json-lines", stdin=first.bytes).ok()
    second = m("inbox", f"{box}-copy", "--until-empty", "--json").ok().json_lines
    for before, after in zip(first.json_lines, second, strict=True):
        assert {"number", "sender"} <= before.keys()
        kept = ("subject", "keys", "fields", "properties", "body", "body_base64")
        assert [before.get(key) for key in kept] == [after.get(key) for key in kept]


def test_a_client_time_is_left_out_aloud(m: Run, box: str) -> None:
    told = m("send", box, "--json-lines", stdin='{"body": "x", "client_time": 5}').ok()
    assert "client_time is left out" in told.err
    assert messages(m, box) == 1


def test_a_bad_line_is_named_and_what_came_before_is_sent(m: Run, box: str) -> None:
    told = m("send", box, "--json-lines", stdin='{"body": "good"}\nnonsense\n{"body": "no"}')
    assert told.code == 1
    assert "line 2" in told.err
    assert m("inbox", box, "--until-empty").ok().lines == ["good"]
    told = m("send", box, "--json-lines", stdin="nonsense")
    assert (told.code, told.out) == (1, "")


def test_count_takes_no_more_than_it_prints(m: Run, box: str) -> None:
    m("send", box, stdin="1\n2\n3\n").ok()
    assert m("inbox", box, "-n", "2").ok().lines == ["1", "2"]
    assert m("inbox", box, "-n", "1").ok().lines == ["3"]


def test_without_an_acknowledgement_they_stay_and_count(m: Run, box: str) -> None:
    m("send", box, stdin="1\n2\n").ok()
    assert m("inbox", box, "--no-ack", "--until-empty").ok().lines == ["1", "2"]
    found = m("inbox", box, "--until-empty", "--json").ok().json_lines
    assert [(each["body"], each["attempts"]) for each in found] == [("1", 2), ("2", 2)]


def test_what_a_closed_pipe_did_not_take_stays_in_the_mailbox(
    m: Run, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in ("1", "2", "3"):
        m("send", box, body).ok()

    class Writer(MailWriter):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, out=Torn(2))

    with monkeypatch.context() as patch:
        patch.setattr(inbox, "MailWriter", Writer)
        # With a count they are written one at a time.
        assert m("inbox", box, "-n", "3").code == 0
    assert m("inbox", box, "--until-empty").ok().lines == ["3"]


@pytest.mark.moderate
def test_nothing_within_the_timeout_is_code_4(m: Run, box: str) -> None:
    told = m("inbox", box, "--create", "--timeout", "50ms")
    assert told.code == 4
    assert "no message came within 50ms" in told.err


@pytest.mark.moderate
def test_a_misspelt_mailbox_is_not_made_but_named(m: Run, box: str) -> None:
    m("send", box, "x").ok()
    for args in (("inbox",), ("mailbox", "info"), ("mailbox", "peek"), ("mailbox", "rm", "--yes")):
        told = m(*args, f"{box}x")
        assert told.code == 1
        assert f"did you mean {box}?" in told.err
    assert m("mailbox", "ls", f"{box}x").ok().lines == []


def test_an_own_mailbox_needs_an_identity(m: Run) -> None:
    told = m("inbox")
    assert told.code == 2
    assert "no identity" in told.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["one", "two"], "in quotes"),
        (["--file"], "name the files"),
        (["x", "--whole"], "leave out the body"),
        (["--whole", "--json-lines"], "exclude each other"),
        (["--key", "k"], "names one message"),
        (["x", "--at", "now", "--in", "1s"], "exclude each other"),
        (["x", "--in", "soon"], "is not a duration"),
        (["x", "--priority", "1000"], "--priority"),
        (["x", "--subject-from-name"], "--file"),
    ],
)
def test_wrong_usage_of_send_is_one_line_and_code_2(
    m: Run, box: str, args: list[str], says: str
) -> None:
    told = m("send", box, *args)
    assert told.code == 2
    assert says in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.moderate
def test_a_full_mailbox_is_waited_for_and_named(m: Run, box: str) -> None:
    m("mailbox", "edit", box, "--create", "--max-messages", "1").ok()
    m("send", box, "1").ok()
    told = m("send", box, "2", "--timeout", "100ms")
    assert told.code == 4
    assert f"malamute mailbox info {box}" in told.err
    told = m("send", box, "--timeout", "100ms", stdin="2\n")
    assert told.code == 4
    assert "may be in the mailbox" not in told.err
    told = m("send", box, "--timeout", "100ms", stdin="2\n3\n")
    assert told.code == 4
    assert f"some may be in the mailbox; `malamute mailbox peek {box}` shows" in told.err


def test_a_setting_that_is_typed_wrong_is_answered_with_what_to_type(m: Run, box: str) -> None:
    assert "--set NAME=VALUE" in m("mailbox", "edit", box, "max_messages=1").err
    assert "--create makes it" in m("mailbox", "edit", box, "--max-messages", "1").err
    m("mailbox", "edit", box, "--create").ok()
    told = m("mailbox", "edit", box, "--set", "max_mesages=1")
    assert told.code == 2
    assert "`info` of a mailbox" in told.err


def test_a_key_without_an_identity_is_said_to_be_of_little_use(m: Run, box: str) -> None:
    assert "no identity" in m("send", box, "x", "--key", "k").ok().err


# --- mailbox -------------------------------------------------------------------------------


@pytest.mark.moderate
def test_a_mailbox_is_made_shown_edited_and_removed(m: Run, box: str) -> None:
    m("mailbox", "edit", box, "--create", "--ttl", "7d", "--max-bytes", "1MiB",
      "--description", "all of it").ok()  # fmt: skip
    settings = m("mailbox", "info", box, "--json").ok().json["settings"]
    assert settings["ttl_ms"] == 7 * 86_400_000
    assert (settings["max_bytes"], settings["description"]) == (1 << 20, "all of it")
    shown = m("mailbox", "edit", box, "--max-messages", "3", "--json").ok().json
    assert shown["settings"]["max_messages"] == 3
    m("send", box, stdin="a\nb\n").ok()
    assert m("mailbox", "rm", box, "--yes").ok().lines == [f"removed {box} and 2 messages"]
    assert m("mailbox", "info", box).code == 1


def test_the_list_of_mailboxes_is_lines_of_columns(m: Run, box: str) -> None:
    m("send", box, stdin="a\nb\n").ok()
    (row,) = m("mailbox", "ls", box).ok().rows
    assert (row[0], row[1], row[2], row[3], row[6], row[7]) == (box, "2", "0", "0", "0", "no")
    (entry,) = m("mailbox", "ls", box, "--json").ok().json
    assert (entry["name"], entry["messages"]) == (box, 2)


@pytest.mark.moderate
def test_peeking_takes_nothing_and_goes_on_behind_a_number(m: Run, box: str) -> None:
    m("send", box, stdin="".join(f"{number}\n" for number in range(12))).ok()
    assert m("mailbox", "peek", box).ok().lines == [str(number) for number in range(10)]
    found = m("mailbox", "peek", box, "-n", "2", "--json").ok().json_lines
    behind = m("mailbox", "peek", box, "--after", str(found[1]["number"]), "-n", "2").ok()
    assert behind.lines == ["2", "3"]
    assert messages(m, box) == 12


@pytest.mark.moderate
def test_a_list_of_blobs_is_peeked_at_as_inbox_shows_it(
    m: Run, broker: EmbeddedBroker, box: str
) -> None:
    long = [b"x" * 200_000] * 2
    with broker.connect_sync() as client:
        for body in ([b"a", b"\xff\n"], [], long, b"\x91\xc4\x01a"):
            client.send(box, body)
    peeked = m("mailbox", "peek", box, "--json").ok()
    found = [(each.get("parts_base64"), each.get("body_bytes")) for each in peeked.json_lines]
    assert found == [(["YQ==", "/wo="], None), ([], None), (None, 400_000), (None, None)]
    assert "1 message not shown whole" in peeked.err
    read = m("inbox", box, "--until-empty", "--json").ok().json_lines
    assert [each["parts_base64"] for each in read[:2]] == [["YQ==", "/wo="], []]


def test_purging_leaves_what_a_reader_holds(m: Run, broker: EmbeddedBroker, box: str) -> None:
    m("send", box, stdin="a\nb\nc\n").ok()
    with broker.connect_sync() as client:
        reader = client.inbox(box, ack="manual", credit_records=1)
        held = reader.next(WAIT_MS)
        assert held is not None
        told = m("mailbox", "purge", box, "--yes", "--json").ok().json
        # Messages that wait in the client count as held, too.
        assert told["messages"] + told["held"] == 3
        assert told["held"] >= 1
        refused = m("mailbox", "rm", box, "--yes")
        assert refused.code == 1
        assert "in_use" in refused.err
        held.ack()
        reader.close()


@pytest.mark.parametrize("verb", ["purge", "rm"])
def test_what_cannot_be_undone_is_agreed_to_in_words(m: Run, box: str, verb: str) -> None:
    m("send", box, "x").ok()
    told = m("mailbox", verb, box, stdin=f"{box}\n")
    assert told.code == 2
    assert "--yes" in told.err
    assert messages(m, box) == 1


def test_editing_without_a_setting_says_what_to_name(m: Run, box: str) -> None:
    assert "nothing to change" in m("mailbox", "edit", box).err
    told = m("mailbox", "edit", box, "--create", "--set", "max_massages=1")
    assert told.code == 2
    assert "max_massages" in told.err


def test_settings_that_go_back_to_their_defaults_are_told_of(m: Run, box: str) -> None:
    assert m("mailbox", "edit", box, "--create").ok().out == f"made {box}\n"
    assert m("mailbox", "edit", box, "--create").ok().out == f"edited {box}: as it was\n"
    assert m("mailbox", "edit", box, "--replace").ok().out == f"edited {box}: all settings\n"


def test_the_progress_of_a_purge_leaves_out_what_a_reader_holds(
    m: Run, broker: EmbeddedBroker, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def watched(title: str, total: int, ask: Callable[[], Any], asked: Callable[[], int]) -> Any:
        left.append(total)
        answer = ask()
        left.append(asked())
        return answer

    monkeypatch.setattr(mailboxes, "watched", watched)
    m("send", box, stdin="a\nb\nc\n").ok()
    with broker.connect_sync() as client, client.inbox(box, ack="manual", credit_records=1) as read:
        assert read.next(WAIT_MS) is not None
        told = m("mailbox", "purge", box, "--yes", "--json").ok().json
    assert left == [told["messages"], 0]
    assert told["held"]


@pytest.mark.moderate
def test_what_is_refused_without_a_confirm_ends_with_1(m: Run, box: str) -> None:
    m("send", box, "one", "--confirm", "none").ok()
    m("mailbox", "edit", box, "--max-messages", "1").ok()
    refused = f"{box}: the broker refused some of it (1 batches)"
    told = m("send", box, "two", "--confirm", "none")
    assert (told.code, told.out) == (1, "")
    assert refused in told.err
    # Of many it also tells how many it sent, and what of the input could not be read.
    told = m("send", box, "--confirm", "none", "--json-lines", stdin='{"body":"two"}\nno json\n')
    assert (told.code, told.rows[0][0]) == (1, box)
    assert refused in told.err
    assert "line 2" in told.err
    assert messages(m, box) == 1
