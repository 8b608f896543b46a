"""`malamute cursor`, `group`, and `sub` with them."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_protocol.errors import Timeout
from malamute_py import EmbeddedBroker
from malamute_py.cli import groups, subscribe
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.records import RecordWriter
from malamute_py.client.facts import GroupFacts
from tests.cli.running import Run, Torn, as_user, broker_of
from tests.waiting import WAIT_MS


@pytest.fixture
def five(m: Run, stream: str) -> str:
    """A stream of five records."""
    m("pub", stream, stdin="".join(f"{number}\n" for number in range(5))).ok()
    return stream


def stands(m: Run, stream: str, cursor: str) -> int:
    at: int = m("cursor", "info", stream, cursor, "--json").ok().json["next"]
    return at


@pytest.mark.moderate
def test_a_reader_goes_on_where_its_cursor_stands(m: Run, five: str) -> None:
    assert m("sub", five, "--cursor", "c", "-n", "2").ok().lines == ["0", "1"]
    assert stands(m, five, "c") == 2
    assert m("sub", five, "--cursor", "c", "--until-tail").ok().lines == ["2", "3", "4"]
    assert stands(m, five, "c") == 5
    assert m("sub", five, "--cursor", "c", "--until-tail").ok().lines == []


@pytest.mark.moderate
def test_what_a_pattern_leaves_out_is_behind_the_cursor(m: Run, five: str) -> None:
    assert m("sub", five, "nothing", "--cursor", "c", "--until-tail").ok().lines == []
    assert stands(m, five, "c") == 5


def test_a_new_cursor_begins_where_start_says(m: Run, five: str) -> None:
    told = m("sub", five, "--cursor", "c", "--start", "3", "-n", "1").ok()
    assert (told.lines, stands(m, five, "c")) == (["3"], 4)
    assert m("sub", five, "--cursor", "c2", "--start", "last").code == 2


def test_a_cursor_that_waits_for_records_is_moved_meanwhile(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client:
        records = client.subscribe(five, start=0)
        reader = subscribe._WithCursor(client, five, "c", None, records)
        reader.accepted()
        batch = reader.next(WAIT_MS)
        assert batch is not None
        reader.printed(batch, 2)
        with pytest.raises(Timeout):
            reader.next(1)
        assert stands(m, five, "c") == 2
        records.close()


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["cursor", "group"])
def test_what_a_closed_pipe_did_not_take_is_not_passed_over(
    m: Run, stream: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in ("0", "1", "2"):
        m("pub", stream, body).ok()

    class Writer(RecordWriter):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, out=Torn(1))

    with monkeypatch.context() as patch:
        patch.setattr(subscribe, "RecordWriter", Writer)
        assert m("sub", stream, f"--{how}", "c", "--start", "0", "-n", "3").code == 0
    at: int = m(how, "info", stream, "c", "--json").ok().json["next"]
    # Records that were published apart may come in one batch, and then in one write.
    assert at in (1, 2, 3)
    if at < 3:
        rest = m("sub", stream, f"--{how}", "c", "-n", str(3 - at)).ok().lines
        assert rest == ["0", "1", "2"][at:]


def test_a_cursor_that_another_client_moved_ends_the_reader(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client:
        client.cursor(five, "c").edit(start=1)
        records = client.subscribe(five, start=1)
        reader = subscribe._WithCursor(client, five, "c", 1, records)
        reader.accepted()
        batch = reader.next(WAIT_MS)
        assert batch is not None
        client.cursor(five, "c").move(3)
        reader.printed(batch, len(batch))
        with pytest.raises(CommandFailed, match="moved by another client"):
            reader.printed_all(False)
        records.close()


@pytest.mark.moderate
def test_cursors_are_moved_forward_and_reset_anywhere(m: Run, five: str) -> None:
    m("cursor", "move", five, "c", "3").ok()
    told = m("cursor", "move", five, "c", "1")
    assert told.code == 1
    assert "cursor reset" in told.err
    told = m("cursor", "move", five, "c", "4", "--since", "1")
    assert told.code == 1
    told = m("cursor", "move", five, "c", "99")
    assert "the stream ends at 5" in told.err
    assert "part 1" not in told.err
    for point, expected in (("earliest", 0), ("latest", 5), ("2", 2), ("now-1h", 0)):
        told = m("cursor", "reset", five, "c", point, "--json").ok()
        assert told.json["next"] == expected
        assert stands(m, five, "c") == expected
    (second,) = m("sub", five, "--start", "2", "-n", "1", "--json").ok().json_lines
    for point, expected in ((second["id"], 2), (f"after:{second['id']}", 3)):
        assert m("cursor", "reset", five, "c", point, "--json").ok().json["next"] == expected
    for command in ("cursor", "group"):
        assert "message ID" in m(command, "reset", "--help").ok().out
    assert m("cursor", "reset", five, "c", "last").code == 2
    assert m("cursor", "reset", five, "c", "somewhere").code == 2


@pytest.mark.moderate
def test_cursors_are_listed_edited_and_removed(m: Run, five: str) -> None:
    m("cursor", "edit", five, "c", "--create", "--start", "latest", "--description", "d").ok()
    m("cursor", "move", five, "d", "1").ok()
    rows = m("cursor", "ls", five).ok().rows
    assert [row[:4] for row in rows] == [[five, "c", "5", "0"], [five, "d", "1", "4"]]
    (entry,) = m("cursor", "ls", five, "--prefix", "d", "--json").ok().json
    assert (entry["cursor"], entry["lag"]) == ("d", 4)
    shown = m("cursor", "edit", five, "c", "--pin", "--pin-bytes", "1MiB", "--json").ok().json
    assert (shown["pinned"], shown["settings"]["pin_bytes_max"]) == (True, 1 << 20)
    assert m("cursor", "edit", five, "c", "--no-pin", "--json").ok().json["pinned"] is False
    assert "nothing to change" in m("cursor", "edit", five, "c").err
    told = m("cursor", "rm", five, "c")
    assert (told.code, "--yes" in told.err) == (2, True)
    m("cursor", "rm", five, "c", "--yes").ok()
    assert m("cursor", "info", five, "c").code == 1
    told = m("cursor", "edit", five, "c", "--create", "--start", "last")
    assert (told.code, "stands at one place" in told.err) == (2, True)


@pytest.mark.moderate
def test_who_manages_streams_and_may_not_read_moves_resets_and_edits_their_cursors() -> None:
    with broker_of({"ann": {"write": ["*"], "manage_streams": ["*"]}}) as running:
        run = as_user(running, "ann")
        for body in ("a", "b", "c"):
            run("pub", "s", body).ok()
        assert "made s/c" in run("cursor", "edit", "s", "c", "--create", "--pin").ok().out
        run("cursor", "edit", "s", "c", "--no-pin", "--description", "d").ok()
        run("cursor", "move", "s", "c", "2").ok()
        for point, expected in (("earliest", 0), ("latest", 3), ("1", 1), ("now-1h", 0)):
            assert run("cursor", "reset", "s", "c", point, "--json").ok().json["next"] == expected
        run("cursor", "rm", "s", "c", "--yes").ok()
        assert run("sub", "s", "--start", "earliest", "--until-tail").code == 1


@pytest.mark.moderate
def test_members_of_a_group_share_the_stream(m: Run, broker: EmbeddedBroker, five: str) -> None:
    assert m("sub", five, "--group", "g", "-n", "2").ok().lines == ["0", "1"]
    assert m("sub", five, "--group", "g", "-n", "3").ok().lines == ["2", "3", "4"]
    (row,) = m("group", "ls", five).ok().rows
    assert row[:6] == [five, "g", "shared", "0", "5", "0"]
    with broker.connect_sync() as client, client.group(five, "g") as member:
        member.accepted(WAIT_MS)
        shown = m("group", "info", five, "g", "--json").ok().json
        assert (shown["kind"], shown["next"], len(shown["members"])) == ("shared", 5, 1)
        rows = m("group", "info", five, "g").ok().rows
        assert ["pattern", "all"] in rows
        assert [row[0] for row in rows].count("member") == 1
        assert ["visibility", "durable"] in rows
        told = m("group", "rm", five, "g", "--yes")
        assert told.code == 1
        assert "in_use" in told.err
    assert m("group", "rm", five, "g").code == 2
    m("group", "rm", five, "g", "--yes").ok()
    assert m("group", "ls", five).ok().lines == []


@pytest.mark.moderate
def test_a_requeue_tells_of_the_dead_letters_that_stay(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client, client.group(five, "g", ack="manual") as member:
        member.accepted()
        m("group", "edit", five, "g", "--attempts", "1").ok()
        for record in member:
            (member.nack if record.offset in (1, 3) else member.ack)(record)
            if record.offset == 4:
                break
    m("stream", "trim", five, "--before", "2", "--yes").ok()
    told = m("group", "requeue", five, "g").ok().out
    assert f"1 record of {five} again for g; 1 message left in {five}.g.dead, of others," in told
    assert m("group", "info", five, "g", "--json").ok().json["dead"] == 1


@pytest.mark.moderate
def test_a_requeue_of_dead_letters_whose_records_are_gone_fails_and_says_so(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client, client.group(five, "g", ack="manual") as member:
        member.accepted()
        m("group", "edit", five, "g", "--attempts", "1").ok()
        for record in member:
            (member.nack if record.offset in (1, 3) else member.ack)(record)
            if record.offset == 4:
                break
    letters = m("mailbox", "peek", f"{five}.g.dead", "--json").ok().json_lines
    m("stream", "trim", five, "--before", "5", "--yes").ok()
    for numbers in ([], [str(letters[0]["number"])]):
        told = m("group", "requeue", five, "g", *numbers)
        assert told.code == 1
        assert "has none of these" in told.err
        assert "has no dead letters" not in told.out + told.err
    assert m("group", "info", five, "g", "--json").ok().json["dead"] == 2


@pytest.mark.moderate
def test_a_requeue_without_a_dead_letter_fails_alike_whoever_shares_the_mailbox(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client, client.group(five, "g") as member:
        member.accepted()
    assert m("group", "info", five, "g", "--json").ok().json["dead"] == 0
    told = m("group", "requeue", five, "g").ok().out
    assert told == "g has no dead letters\n"
    by_number = m("group", "requeue", five, "g", "77")
    assert by_number.code == 1
    assert "no such dead letter" in by_number.err
    m("send", f"{five}.g.dead", "of another").ok()
    told = m("group", "requeue", five, "g").ok().out
    assert f"0 records of {five} again for g; 1 message left in {five}.g.dead, of others" in told


@pytest.mark.moderate
def test_a_requeue_finds_dead_letters_beside_the_mailbox_of_the_settings(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client:
        with client.group(five, "g", ack="manual") as member:
            member.accepted()
            m("group", "edit", five, "g", "--attempts", "1").ok()
            for record in member:
                (member.nack if record.offset == 1 else member.ack)(record)
                if record.offset == 4:
                    break
        m("group", "edit", five, "g", "--dead-letters", "elsewhere").ok()
        shown = m("group", "info", five, "g", "--json").ok().json
        assert (shown["dead"], shown["dead_in"]) == (1, {f"{five}.g.dead": 1})
        # In a pipe, too: `dead_letters` alone names a mailbox that has none of them.
        assert f"dead_in.{five}.g.dead\t1" in m("group", "info", five, "g").ok().lines
        m("send", "elsewhere", "of another").ok()
        told = m("group", "requeue", five, "g").ok().out
        assert f"1 record of {five} again for g; 1 message left in elsewhere, of others" in told


@pytest.mark.moderate
def test_a_requeue_by_number_tells_of_numbers_that_are_no_dead_letters(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client, client.group(five, "g", ack="manual") as member:
        member.accepted()
        m("group", "edit", five, "g", "--attempts", "1").ok()
        for record in member:
            (member.nack if record.offset == 1 else member.ack)(record)
            if record.offset == 4:
                break
    (letter,) = m("mailbox", "peek", f"{five}.g.dead", "--json").ok().json_lines
    told = m("group", "requeue", five, "g", str(letter["number"]), "77").ok().out
    assert f"1 record of {five} again for g; 1 of these numbers stay: no dead letters of g" in told


@pytest.mark.moderate
def test_dead_letters_of_a_group_are_shown_and_requeued(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    with broker.connect_sync() as client:
        with client.group(five, "g", ack="manual") as member:
            member.accepted()
            m("group", "edit", five, "g", "--attempts", "1").ok()
            for record in member:
                (member.nack if record.offset == 1 else member.ack)(record)
                if record.offset == 4:
                    break
        shown = m("group", "info", five, "g", "--json").ok().json
        assert (shown["dead"], shown["dead_letters"]) == (1, f"{five}.g.dead")
        assert shown["settings"]["attempts_max"] == 1
        assert m("group", "ls", five).ok().rows[0][-1] == "1"
        (letter,) = m("mailbox", "peek", f"{five}.g.dead", "--json").ok().json_lines
        assert letter["origin"] == {"stream": five, "group": "g", "offset": 1, "attempts": 1}
        told = m("group", "requeue", five, "g", "--json").ok().json
        assert told["requeued"] == 1
        assert "no dead letters" in m("group", "requeue", five, "g").ok().out
        assert m("sub", five, "--group", "g", "-n", "1").ok().lines == ["1"]
    assert m("group", "edit", five, "g").code == 2


@pytest.mark.moderate
def test_a_group_is_reset_and_with_members_only_when_told(
    m: Run, broker: EmbeddedBroker, five: str
) -> None:
    assert m("sub", five, "--group", "g", "-n", "5").ok().lines == ["0", "1", "2", "3", "4"]
    told = m("group", "reset", five, "g", "3", "--json").ok().json
    assert told == {"stream": five, "group": "g", "next": 3, "before": 5}
    assert m("sub", five, "--group", "g", "-n", "2").ok().lines == ["3", "4"]
    with broker.connect_sync() as client, client.group(five, "g") as member:
        member.accepted()
        refused = m("group", "reset", five, "g", "earliest")
        assert refused.code == 1
        assert "--force ends its memberships" in refused.err
        assert "(it stood at 5)" in m("group", "reset", five, "g", "earliest", "--force").ok().out
    assert m("sub", five, "--group", "g", "-n", "1").ok().lines == ["0"]
    assert m("group", "reset", five, "g", "last").code == 2


@pytest.mark.moderate
def test_the_kind_of_a_group_is_chosen_by_its_first_member(m: Run, five: str) -> None:
    m("sub", five, "--group", "g", "--kind", "keyed", "-n", "1").ok()
    assert m("group", "info", five, "g", "--json").ok().json["kind"] == "keyed"
    told = m("sub", five, "--group", "g", "--kind", "exclusive", "-n", "1")
    assert told.code == 2
    assert "bad_setting" in told.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cursor", "c", "--group", "g"], "exclude each other"),
        (["--group", "g", "--until-tail"], "do not go with"),
        (["--group", "g", "--kind", "any"], "any"),
        (["--cursor", "no/name"], "bad_name"),
    ],
)
def test_wrong_usage_is_said(m: Run, five: str, args: list[str], says: str) -> None:
    told = m("sub", five, *args)
    assert told.code == 2
    assert says in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["cursor", "group"])
def test_a_misspelt_name_is_named_right(m: Run, five: str, kind: str) -> None:
    m("sub", five, f"--{kind}", "billing", "-n", "1", "--start", "0").ok()
    told = m(kind, "info", five, "biling")
    assert (told.code, "did you mean billing?" in told.err) == (1, True)
    told = m(kind, "info", f"{five}x", "billing")
    assert (told.code, f"did you mean {five}?" in told.err) == (1, True)
    assert m(kind, "ls", f"{five}x").code == 1


def test_in_a_pipe_each_count_of_attempts_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    groups._show(GroupFacts(stream="s", group="g", attempts=[(1, 2), (3, 4)]), False)
    lines = capsys.readouterr().out.splitlines()
    assert [each for each in lines if "attempts" in each] == ["attempts.1\t2", "attempts.3\t4"]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (["all"], "#"),
        (["topic", "a.*"], "a.*"),
        (["prefix", "a."], "prefix:a."),
        (["fields", "any", [["k", "v"], ["l"]]], "any:k=v,l"),
        (["not", ["all"]], "['not', ['all']]"),
    ],
)
def test_patterns_are_shown_as_they_are_typed(pattern: list[Any], text: str) -> None:
    from malamute_py.cli.values import pattern_text

    assert pattern_text(pattern) == text
