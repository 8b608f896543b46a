"""From what the broker says to what Prometheus reads."""

from __future__ import annotations

from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.client.facts import (
    CursorFacts,
    GroupFacts,
    MailboxFacts,
    MemberFacts,
    NamespaceFacts,
    ServiceFacts,
    StreamFacts,
)
from malamute_py.health.facts import Everything, Facts
from malamute_py.http.metrics import render
from malamute_py.http.source import Labels
from malamute_py.http.table import METRICS
from tests.http.running import at, parsed

NOW_MS = 1_000_000
BROKER: dict[str, Any] = {"software": "malamute-py 1", "now_ms": NOW_MS, "uptime_ms": 4_000}


def shown(labels: Labels | None = None, broker: dict[str, Any] = BROKER, **rest: Any) -> Any:
    everything = Everything(Facts(broker), 0.25, **rest)
    return parsed(render(everything, labels or Labels(10)).decode())


def test_a_broker_that_does_not_answer_is_down_and_nothing_else_is_said() -> None:
    assert shown(broker={}) == {"malamute_up": 0}


def test_figures_are_in_base_units() -> None:
    found = shown(broker={**BROKER, "longest_turn_us": 2_500})
    assert found["malamute_start_time_seconds"] == 996
    assert found["malamute_longest_turn_seconds"] == 0.0025
    assert found["malamute_asking_seconds"] == 0.25
    assert found['malamute_build_info{software="malamute-py 1"}'] == 1


def test_a_counter_that_counted_nothing_is_zero_and_families_go_by_their_label() -> None:
    found = shown(
        broker={
            **BROKER,
            "counters": {"records_in": 7, "refused_full": 2, "quota_links": 1, "unheard_of": 9},
            "shell": {"denied_total": 3, "denied_paused_total": 2, "ring_opened_total": 1},
        }
    )
    assert found["malamute_published_records_total"] == 7
    assert found["malamute_gaps_total"] == 0
    assert found['malamute_refusals_total{code="full"}'] == 2
    assert found['malamute_quota_refusals_total{resource="links"}'] == 1
    assert found["malamute_denied_connections_total"] == 3
    assert found['malamute_denied_connections_by_reason_total{reason="paused"}'] == 2
    assert found['malamute_events_total{event="ring_opened"}'] == 1
    assert not any("unheard" in name for name in found)


def test_a_histogram_counts_upwards_and_ends_with_everything() -> None:
    latency = {"sync": {"bounds_s": [0.001, 0.01], "counts": [3, 2, 1], "sum_s": 0.5}}
    found = shown(broker={**BROKER, "latency": latency})
    name = "malamute_sync_duration_seconds"
    assert [found[f'{name}_bucket{{le="{le}"}}'] for le in ("0.001", "0.01", "+Inf")] == [3, 5, 6]
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (6, 0.5)


def test_what_has_no_label_of_its_own_is_added_up_under_other() -> None:
    streams = [StreamFacts(name=f"s{n}", first=n, tail=10 * n, bytes=100) for n in range(5)]
    labels = Labels(2)
    found = shown(labels, streams=streams)
    names = {name for name in found if name.startswith("malamute_stream_records_total")}
    assert names == {
        f'malamute_stream_records_total{{stream="{name}"}}' for name in ("s0", "s1", "other")
    }
    assert found['malamute_stream_records_total{stream="other"}'] == 20 + 30 + 40
    assert found['malamute_stream_bytes{stream="other"}'] == 300
    # One that comes first by name takes nobody's label; one that goes leaves its own.
    more = [StreamFacts(name="a", tail=1), *streams[1:]]
    found = shown(labels, streams=more)
    assert found['malamute_stream_records_total{stream="a"}'] == 1
    assert found['malamute_stream_records_total{stream="s1"}'] == 10
    assert 'malamute_stream_records_total{stream="s0"}' not in found


def test_a_stream_called_other_is_in_the_rest() -> None:
    found = shown(streams=[StreamFacts(name="a", tail=1), StreamFacts(name="other", tail=2)])
    assert found['malamute_stream_records_total{stream="other"}'] == 2
    assert found['malamute_stream_records_total{stream="a"}'] == 1


def test_mailboxes_go_by_the_part_before_the_first_dot() -> None:
    found = shown(
        mailboxes=[
            MailboxFacts(name="crew.berlin", messages=2, bytes=20, oldest_ms=NOW_MS - 9_000),
            MailboxFacts(name="crew.paris", messages=1, bytes=10, oldest_ms=NOW_MS - 4_000),
            MailboxFacts(name="desk", held=1),
        ]
    )
    assert found['malamute_mailbox_class_mailboxes{class="crew"}'] == 2
    assert found['malamute_mailbox_class_messages{class="crew"}'] == 3
    assert found['malamute_mailbox_class_oldest_message_age_seconds{class="crew"}'] == 9
    assert found['malamute_mailbox_class_oldest_message_age_seconds{class="desk"}'] == 0
    assert found['malamute_mailbox_class_held_messages{class="desk"}'] == 1


def test_services_groups_and_cursors_tell_their_lag_and_what_starves() -> None:
    found = shown(
        services=[
            ServiceFacts(
                name="tax", waiting=4, credit=0, dead=2, attempts=[(0, 4), (1, 3), (2, 5), (3, 1)],
                oldest_ms=NOW_MS - 30_000,
            )
        ],
        groups=[
            GroupFacts(
                stream="s", group="g", lag=12, moved_ms=NOW_MS - 5_000,
                members=[MemberFacts(held=3, oldest_ms=NOW_MS - 7_000), MemberFacts(held=1)],
            )
        ],
        cursors=[CursorFacts(stream="s", cursor="c", lag=8, pinned_bytes=64)],
    )  # fmt: skip
    assert found['malamute_service_waiting_requests{service="tax"}'] == 4
    assert found['malamute_service_credit_requests{service="tax"}'] == 0
    assert found['malamute_service_retried_requests{service="tax"}'] == 6
    assert found['malamute_service_dead_letters{service="tax"}'] == 2
    assert found['malamute_service_oldest_request_age_seconds{service="tax"}'] == 30
    group = 'group="g",stream="s"'
    assert found[f"malamute_group_lag_records{{{group}}}"] == 12
    assert found[f"malamute_group_records_in_hand{{{group}}}"] == 4
    assert found[f"malamute_group_oldest_record_in_hand_age_seconds{{{group}}}"] == 7
    assert found[f"malamute_group_unmoved_seconds{{{group}}}"] == 5
    assert found['malamute_cursor_lag_records{cursor="c",stream="s"}'] == 8
    assert found['malamute_cursor_pinned_bytes{cursor="c",stream="s"}'] == 64


def test_namespaces_tell_their_use_of_quotas_what_came_in_and_what_was_refused() -> None:
    spaces = [
        NamespaceFacts(
            namespace=name, held={"links": 2, "streams": held}, messages_in=10, bytes_in=100,
            quotas={"streams": 4, "mailboxes": 5, "messages_s": 50}, refused={"rate": 1},
        )
        for name, held in (("acme", 3), ("beta", 1), ("core", 2))
    ]  # fmt: skip
    found = shown(Labels(1), namespaces=spaces)

    def of(metric: str, namespace: str) -> dict[str, float]:
        return {
            resource: found[key]
            for resource in ("links", "streams", "mailboxes", "messages_s", "rate")
            if (key := f'malamute_namespace_{metric}{{namespace="{namespace}",resource='
                       f'"{resource}"}}') in found
        }  # fmt: skip

    assert of("limit", "acme") == {"streams": 4, "mailboxes": 5, "messages_s": 50}
    assert of("limit_used", "acme") == {"links": 2, "streams": 3, "mailboxes": 0}
    assert of("quota_refusals_total", "acme") == {"rate": 1}
    assert found['malamute_namespace_messages_total{namespace="acme"}'] == 10
    assert of("limit", "other") == {}, "one namespace's bound is not another's"
    assert of("limit_used", "other") == {"links": 4, "streams": 3, "mailboxes": 0}
    assert of("quota_refusals_total", "other") == {"rate": 2}
    assert found['malamute_namespace_bytes_total{namespace="other"}'] == 200
    assert not any('"beta"' in name for name in found)


def test_how_many_were_not_looked_at_is_told() -> None:
    mailboxes = [MailboxFacts(name=f"m{n}") for n in range(1_000)]
    gauges = {"mailboxes": 1_500, "temporary_mailboxes": 100, "streams": 3}
    found = shown(broker={**BROKER, "gauges": gauges}, mailboxes=mailboxes)
    assert found['malamute_unlisted{kind="mailboxes"}'] == 400
    assert found['malamute_unlisted{kind="streams"}'] == 0


def test_names_that_would_break_the_page_are_quoted() -> None:
    name = 'a"b\\c\nd'
    found = shown(streams=[StreamFacts(name=name, tail=3)])
    assert found[f'malamute_stream_records_total{{stream="{name}"}}'] == 3


@pytest.mark.moderate
def test_a_running_broker_shows_every_metric_that_is_not_of_a_thing_it_lacks() -> None:
    with EmbeddedBroker(tcp=True) as broker, broker.connect_sync(identity="desk") as client:
        client.publish("trades", b"1")
        client.send("crew.berlin", b"gate")
        client.cursor("trades", "reader").move(0)
        client.edit_service("tax")
        with at(broker) as http, client.group("trades", "g") as member:
            member.accepted()
            found = http.samples()
            text = http.get("/metrics").text
    assert found['malamute_stream_records_total{stream="trades"}'] == 1
    assert found['malamute_stream_records{stream="trades"}'] == 1
    assert found['malamute_stream_lagging{stream="trades"}'] == 0
    assert found['malamute_mailbox_class_messages{class="crew"}'] == 1
    assert found['malamute_cursor_lag_records{cursor="reader",stream="trades"}'] == 1
    assert found['malamute_group_members{group="g",stream="trades"}'] == 1
    assert found['malamute_ring_used_bytes{full="overwrite",ring="main"}'] > 0
    assert found['malamute_ring_refusing{full="overwrite",ring="main"}'] == 0
    assert found['malamute_limit_used{resource="streams"}'] == 1
    assert found["malamute_published_records_total"] == 1
    assert found["malamute_confirm_duration_seconds_count"] > 0
    missing = {each.name for each in METRICS if f"# HELP {each.name} " not in text}
    # In memory there is neither a disk nor a checkpoint, and the program collects its garbage.
    assert {
        name for name in missing
        if not name.startswith(("malamute_checkpoint_", "malamute_collector_"))
    } == {"malamute_disk_free_bytes"}  # fmt: skip
