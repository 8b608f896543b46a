"""`malamute check`: thresholds, exit codes and the one line, as monitoring systems read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.broker.mail import administration as mail
from malamute_py.broker.services import administration as services
from malamute_py.broker.streams import catalogue
from malamute_py.cli.check import (
    CRITICAL,
    KINDS,
    OK,
    UNKNOWN,
    WARNING,
    Datum,
    _performance,
    judged,
    threshold,
)
from malamute_py.cli.failures import CommandFailed
from malamute_py.cli.looking import COUNTS, TOLD_TO, Look
from malamute_py.cli.looking import look as look_at
from malamute_py.client.facts import (
    BrokerFacts,
    CursorFacts,
    GroupFacts,
    LinkFacts,
    MailboxFacts,
    ServiceFacts,
)
from malamute_py.health.facts import Everything, Facts
from tests.cli.running import Run, as_user, broker_of

NOW_MS = 1_000_000
KIND = {each.option: each for each in KINDS}


def look(*, unseen: dict[str, str] | None = None, links: list[LinkFacts] | None = None,
         broker: dict[str, Any] | None = None, **things: Any) -> Look:  # fmt: skip
    facts = Facts({"now_ms": NOW_MS, "gauges": {"links": 3}, **(broker or {})})
    return Look(Everything(facts, **things), links or [], unseen or {})


def worst(seen: Look, option: str, *texts: str) -> tuple[int, list[str]]:
    kind = KIND[option]
    findings, _ = judged(seen, [(kind, [threshold(kind, text) for text in texts])])
    bad = [each for each in findings if each.state != OK]
    states = {each.state for each in findings} | {OK}
    worst = next(state for state in (CRITICAL, WARNING, UNKNOWN, OK) if state in states)
    return worst, [each.words for each in bad]


@pytest.fixture
def alone() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tcp=True) as running:
        yield running


@pytest.mark.parametrize(
    ("text", "state"),
    [("10", OK), ("9", WARNING), (",9", CRITICAL), ("5,9", CRITICAL), ("5,10", WARNING),
     ("desk=9", WARNING), ("desk=10,20", OK)],
)  # fmt: skip
def test_a_threshold_is_passed_above_its_value(text: str, state: int) -> None:
    seen = look(mailboxes=[MailboxFacts(name="desk", messages=10)])
    assert worst(seen, "depth", text)[0] == state


def test_a_thing_with_a_threshold_of_its_own_is_not_judged_by_that_for_all() -> None:
    boxes = [MailboxFacts(name="desk", messages=10), MailboxFacts(name="big", messages=900)]
    seen = look(mailboxes=boxes)
    assert worst(seen, "depth", "100", "big=1000")[0] == OK
    assert worst(seen, "depth", ",5", "big=1000,2000") == (
        CRITICAL,
        ["desk: 10 messages (critical above 5)"],
    )


def test_the_verbs_by_which_a_listing_is_seen_are_those_of_the_broker() -> None:
    assert TOLD_TO == {
        "streams": catalogue.TOLD_TO, "cursors": catalogue.TOLD_TO, "groups": catalogue.TOLD_TO,
        "mailboxes": mail.TOLD_TO, "services": services.TOLD_TO,
    }  # fmt: skip


def test_a_thing_that_is_named_and_not_there_is_unknown() -> None:
    assert worst(look(), "lag", "trades/etl=1") == (
        UNKNOWN,
        ["there is no cursor or group trades/etl"],
    )


def test_what_may_not_be_seen_is_unknown_and_not_well() -> None:
    seen = look(unseen={"services": "forbidden: not for you"})
    assert worst(seen, "waiting", "1") == (UNKNOWN, ["waiting: forbidden: not for you"])
    # A thing that is named and was seen is judged, whatever else could not be seen.
    groups = [GroupFacts(stream="trades", group="etl", dead=3)]
    seen = look(groups=groups, unseen={"services": "forbidden: not for you"})
    assert worst(seen, "dead", "trades/etl=1,2")[0] == CRITICAL
    found = ["trades/etl: 3 dead letters (critical above 2)", "dead: forbidden: not for you"]
    assert worst(seen, "dead", "1,2") == (CRITICAL, found)
    assert worst(seen, "dead", "5,9") == (UNKNOWN, ["dead: forbidden: not for you"])
    assert worst(seen, "dead", "up=1,2")[0] == UNKNOWN
    seen = look(unseen={COUNTS: "a tenant"})
    assert worst(seen, "clients-least", "0")[0] == UNKNOWN


def test_a_thing_that_was_seen_is_judged_where_its_listing_has_no_others() -> None:
    boxes = [MailboxFacts(name="desk", messages=3)]
    seen = look(mailboxes=boxes, unseen={"mailboxes": "only its own"})
    assert worst(seen, "depth", "desk=5") == (OK, [])
    assert worst(seen, "depth", "desk=1,2")[0] == CRITICAL
    assert worst(seen, "depth", "5") == (UNKNOWN, ["depth: only its own"])
    assert worst(seen, "depth", "other=5") == (UNKNOWN, ["depth other: only its own"])


def test_each_threshold_is_judged_by_itself_where_some_may_not_be_seen() -> None:
    groups = [GroupFacts(stream="trades", group="etl", lag=5)]
    seen = look(groups=groups, unseen={"cursors": "forbidden: not for you"})
    # A cursor of the same name may be farther behind.
    hidden = "lag trades/etl: forbidden: not for you"
    assert worst(seen, "lag", "trades/etl=5") == (UNKNOWN, [hidden])
    (behind,) = worst(seen, "lag", "trades/etl=1,2")[1]
    assert behind.startswith("trades/etl: 5 records behind (critical")
    found = worst(seen, "lag", "100", "trades/etl=1,2")
    assert found == (CRITICAL, ["lag: forbidden: not for you", behind])
    # No group has a name without a stream.
    services = [ServiceFacts(name="desk")]
    seen = look(services=services, unseen={"groups": "forbidden: not for you"})
    assert worst(seen, "dead", "desk=0") == (OK, [])
    # No service has a name with a slash.
    seen = look(groups=groups, unseen={"services": "forbidden: not for you"})
    assert worst(seen, "dead", "trades/etl=1") == (OK, [])


def test_ages_are_judged_by_the_clock_of_the_broker() -> None:
    seen = look(
        mailboxes=[MailboxFacts(name="desk", messages=1, oldest_ms=NOW_MS - 61_000)],
        services=[ServiceFacts(name="up", waiting=1, oldest_ms=NOW_MS - 5_000)],
    )
    assert worst(seen, "oldest", "30s,1m")[0] == CRITICAL
    assert worst(seen, "waiting-age", "4s,1m")[0] == WARNING
    assert worst(seen, "waiting-age", "5s,1m")[0] == OK


def test_too_little_is_bad_where_more_is_better() -> None:
    own = {"end_lsn": 95, "start_lsn": 0, "ring_bytes": 100, "full": "refuse"}
    disk = {"own": own, "main": {**own, "end_lsn": 100, "full": "overwrite"}}
    seen = look(broker={"disk": disk, "checkpoint": {"ring_use": 0.25}})
    assert worst(seen, "headroom", "20%,2%") == (WARNING, ["own: 5.0% left (warning below 20%)"])
    assert worst(seen, "headroom", "main=80%")[0] == WARNING
    seen.broker["rings"] = {"own": {"stream": "trades"}}
    assert worst(seen, "headroom", "trades=20%,2%") == (
        WARNING, ["trades: 5.0% left (warning below 20%)"],
    )  # fmt: skip
    seen.broker["rings"] = {"own": {"stream": "main"}}
    assert worst(seen, "headroom", "main (own)=20%,2%")[0] == WARNING
    # The command's own link is no client.
    assert worst(seen, "clients-least", "2,1")[0] == OK
    assert worst(seen, "clients-least", "4,3") == (CRITICAL, ["2 clients (critical below 3)"])


def test_clients_that_do_not_read_are_counted() -> None:
    links = [LinkFacts(link=1, more={"blocked": True, "unread_bytes": 5}), LinkFacts(link=2)]
    assert worst(look(links=links), "slow-clients", ",0")[0] == CRITICAL


def test_a_broker_that_is_not_ready_is_critical_and_a_warning_warns() -> None:
    def states(broker: dict[str, Any]) -> set[int]:
        return {each.state for each in judged(look(broker=broker), [])[0]}

    assert states({}) == {OK}
    assert states({"disk_free_bytes": 1}) == {CRITICAL}
    assert states({"damage": ["ring main"]}) == {OK, WARNING}


@pytest.mark.parametrize(
    ("option", "text"),
    [("depth", "x"), ("depth", ""), ("depth", "desk="), ("oldest", "5"), ("headroom", "200%"),
     ("clients-least", "a=1"), ("depth", "-1"), ("depth", "5,1"), ("clients-least", "1,5")],
)  # fmt: skip
def test_what_is_no_threshold_is_refused_with_its_form(option: str, text: str) -> None:
    with pytest.raises(CommandFailed, match="write it as"):
        threshold(KIND[option], text)


def test_the_figure_of_a_threshold_for_all_is_the_worst() -> None:
    seen = look(cursors=[CursorFacts(stream="t", cursor=str(at), lag=at) for at in range(500)])
    _, data = judged(seen, [(KIND["lag"], [threshold(KIND["lag"], "1000")])])
    assert [(each.label, each.value) for each in data] == [("lag", 499.0)]


@pytest.mark.moderate
def test_the_line_and_the_exit_code_are_those_of_a_monitoring_plugin(
    monkeypatch: pytest.MonkeyPatch, m: Run, alone: EmbeddedBroker
) -> None:
    monkeypatch.setenv("MALAMUTE_ENDPOINT", alone.tcp_endpoint)
    assert m("check").ok().out == "MALAMUTE OK - ready\n"
    with alone.connect_sync() as client:
        for _ in range(3):
            client.send("desk", b"x")
    told = m("check", "--depth", "1,5", "--depth", "desk=,2")
    assert told.code == CRITICAL
    assert told.out == (
        "MALAMUTE CRITICAL - desk: 3 messages (critical above 2) | 'depth desk'=3;;2;0\n"
    )
    figure = m("check", "--clients-least", "0").ok().out.partition(" | ")[2]
    assert figure.startswith("'clients-least'=")
    assert figure.endswith(";0:;;0\n")
    warned = m("check", "--depth", "2", "--json")
    assert warned.code == WARNING
    assert warned.json["state"] == "WARNING"
    assert warned.json["data"][0] == {
        "label": "depth", "value": 3.0, "unit": "", "warn": 2.0, "crit": None,
    }  # fmt: skip


@pytest.mark.moderate
def test_who_may_see_nothing_of_a_kind_is_told_unknown_and_not_ok() -> None:
    """A monitor whose permission had been taken stayed green."""
    permissions = {
        "root": {"read": ["*"], "write": ["*"], "receive": ["*"], "send": ["*"]},
        "some": {"read": ["other.*"]}, "none": {"write": ["*"]},
    }  # fmt: skip
    with broker_of(permissions) as broker:
        assert as_user(broker, "root")("check", "--lag", "0", "--depth", "0").code == OK
        assert as_user(broker, "some")("check", "--lag", "0").code == OK
        told = as_user(broker, "none")("check", "--lag", "0")
        assert told.code == UNKNOWN
        assert "this user may see no cursors: it has none of read, trim, manage_streams" in told.out
        assert as_user(broker, "some")("check", "--waiting", "0").code == UNKNOWN
        # Whoever reads no other mailbox is told of its own, which says nothing of all.
        as_user(broker, "root")("send", "none", "x").ok()
        told = as_user(broker, "none")("check", "--depth", "5")
        assert told.code == UNKNOWN
        assert "may see no mailboxes but its own" in told.out
        assert as_user(broker, "none")("check", "--depth", "none=5").code == OK


@pytest.mark.moderate
def test_no_broker_is_critical_and_a_wrong_threshold_unknown(
    monkeypatch: pytest.MonkeyPatch, m: Run
) -> None:
    assert m("check", "--depth", "many").code == UNKNOWN
    for wrong in (["--bogus", "1"], ["--lag"], ["bogus"]):
        told = m("check", *wrong)
        assert (told.code, told.err) == (UNKNOWN, "")
        assert told.out.startswith("MALAMUTE UNKNOWN - ")
    told = m("--bogus", "check")
    assert (told.code, told.out[:19]) == (UNKNOWN, "MALAMUTE UNKNOWN - ")
    for wrong in (["check", "--json", "--bogus"], ["--bogus", "check", "--json"]):
        told = m(*wrong)
        assert (told.code, json.loads(told.out)["state"]) == (UNKNOWN, "UNKNOWN")
    assert m("--bogus", "pub").code == 2
    assert m("check", "--help").code == 0
    monkeypatch.setenv("MALAMUTE_ENDPOINT", "tcp://127.0.0.1:9")
    told = m("--connect-timeout", "200ms", "check")
    assert told.code == CRITICAL
    assert told.out.startswith("MALAMUTE CRITICAL - no broker answers at tcp://127.0.0.1:9")


@pytest.mark.moderate
def test_a_line_with_many_findings_names_the_worst_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch, m: Run, alone: EmbeddedBroker
) -> None:
    monkeypatch.setenv("MALAMUTE_ENDPOINT", alone.tcp_endpoint)
    with alone.connect_sync() as client:
        for at in range(8):
            client.send_many(f"box{at}", [b"x"] * (at + 1))
    told = m("check", "--depth", "0,6")
    assert told.code == CRITICAL
    assert "CRITICAL - box7: 8 messages" in told.out
    assert "; and 3 more | " in told.out


def test_a_cursor_is_judged_beside_a_group_of_its_name() -> None:
    for lags in ((50, 0), (0, 50)):
        seen = look(
            cursors=[CursorFacts(stream="t", cursor="etl", lag=lags[0])],
            groups=[GroupFacts(stream="t", group="etl", lag=lags[1])],
        )
        assert worst(seen, "lag", "t/etl=10") == (
            WARNING, ["t/etl: 50 records behind (warning above 10)"],
        )  # fmt: skip


def test_the_figure_of_a_thing_whose_name_is_like_an_option_has_its_bounds_the_right_way() -> None:
    assert _performance(Datum("depth at-least-once", 3, "", 5, None)) == (
        "'depth at-least-once'=3;5;;0"
    )


def test_links_are_all_looked_at_where_all_are_judged() -> None:
    class Asked:
        """A client that notes what it is asked for."""

        def broker_info(self) -> BrokerFacts:
            return BrokerFacts()

        def list_links(self, limit: int = 1000) -> list[LinkFacts]:
            found = [LinkFacts(link=number) for number in range(1500)]
            return found[:limit] if limit else found

    client: Any = Asked()
    assert len(look_at(client, {"clients"}).links) == 1500
    assert len(look_at(client, {"clients"}, limit=1000).links) == 1000
