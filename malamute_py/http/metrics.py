"""Metrics for Prometheus, made of what the broker says.

Owns how figures become families with labels. The rules: every metric stands in table.py, with its
help; a kind of thing has labels_max labels at most, and what is beyond them is added up under the
label `other`; a figure that the broker does not tell is left out, never guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from malamute_py.client.facts import RATES, NamespaceFacts
from malamute_py.health.facts import Everything, in_use
from malamute_py.health.troubles import seconds_since
from malamute_py.http import table
from malamute_py.http.source import LISTED_MAX, OTHER, Labels
from malamute_py.http.table import Metric

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_OF_A_NAMED_STREAM: Final = frozenset({"subscriptions", "lagging", "last_time_ms"})
_OLDEST: Final = frozenset({"oldest", "moved"})
"""Facts of which the rest shows the greatest, not the sum."""

Figures = dict[str, float]
"""A figure by its name in a table."""


def render(everything: Everything, labels: Labels) -> bytes:
    """Return the page of metrics, as Prometheus reads it."""
    # auto_describe would make all families twice: register() calls collect() for the names.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(everything, labels))
    return generate_latest(registry)


class _Collector(Collector):
    """families() in the form that Prometheus' registry takes: it calls collect()."""

    def __init__(self, everything: Everything, labels: Labels) -> None:
        self._everything = everything
        self._labels = labels

    def collect(self) -> Iterable[Family]:
        yield from families(self._everything, self._labels)


def families(everything: Everything, labels: Labels) -> Iterator[Family]:
    """Yield all families of metrics for one answer to Prometheus, in the order of table.py.

    Where the broker does not answer, there is only `up`, which is 0.
    """
    broker = everything.facts.broker
    yield _single(table.UP, float(bool(broker)))
    if not broker:
        return
    yield from _of_the_process(everything)
    yield from _plain(table.GAUGES, broker.get("gauges", {}))
    yield from _plain(table.CHECKPOINT, broker.get("checkpoint", {}))
    yield from _rings(broker, labels)
    for name, metric in table.LATENCIES.items():
        if name in broker.get("latency", {}):
            yield _histogram(metric, broker["latency"][name])
    now_ms = float(broker.get("now_ms", 0))
    for rows, things, kind in (
        (table.STREAM, _streams(everything), "stream"),
        (table.MAILBOX, _mailbox_classes(everything, now_ms), "class"),
        (table.SERVICE, _services(everything, now_ms), "service"),
        (table.CURSOR, _cursors(everything, now_ms), "cursor"),
        (table.GROUP, _groups(everything, now_ms), "group"),
    ):
        yield from _labelled(rows, things, labels.of(kind, things))
    yield from _namespaces(everything, labels)
    yield from _counted(broker)


# --- the broker as a whole ------------------------------------------------------------------


def _of_the_process(everything: Everything) -> Iterator[Family]:
    """Yield metrics of the broker as a whole: version, start, damage, bounds, and their use.

    UNLISTED: how many things of a kind the listings did not show, as a listing has LISTED_MAX.
    """
    broker = everything.facts.broker
    yield _family(table.BUILD, [((str(broker.get("software", "")),), 1.0)])
    yield _single(table.STARTED, (broker.get("now_ms", 0) - broker.get("uptime_ms", 0)) / 1_000)
    yield _single(table.DAMAGE, len(broker.get("damage", ())))
    yield _single(table.ANSWER_TIME, everything.answer_s)
    gauges = broker.get("gauges", {})
    listed = {
        "streams": len(everything.streams), "mailboxes": len(everything.mailboxes),
        "services": len(everything.services), "cursors": len(everything.cursors),
        "groups": len(everything.groups),
    }  # fmt: skip
    # How many there are; temporary mailboxes are in no list.
    there = {**gauges, "mailboxes": gauges.get("mailboxes", 0) - gauges.get(
        "temporary_mailboxes", 0)}  # fmt: skip
    yield _family(
        table.UNLISTED,
        # A list shorter than LISTED_MAX is whole: what is missing in it, this client may not see.
        [
            ((kind,), max(0, there.get(kind, 0) - seen) if seen >= LISTED_MAX else 0)
            for kind, seen in listed.items()
        ],
    )
    bounds = broker.get("bounds", {})
    used = in_use(broker)
    yield _family(table.LIMIT, [((name,), bounds[name]) for name in bounds if name in used])
    yield _family(table.LIMIT_USED, [((name,), used[name]) for name in bounds if name in used])
    yield from _plain(table.FACTS, broker)


def _plain(rows: Mapping[str, Metric], facts: Mapping[str, Any]) -> Iterator[Family]:
    """Yield the metrics without labels of a table, as far as the broker tells their figures."""
    for name, metric in rows.items():
        if name in facts:
            yield _single(metric, facts[name] * metric.factor)


def _rings(broker: Mapping[str, Any], labels: Labels) -> Iterator[Family]:
    """Yield metrics of the rings: what is used, and whether they take appends.

    broker: the answer to BROKER_INFO, where the shell tells of rings under "disk", the core under
    "rings", and "refusing" has the rings that refuse appends now. The labels of a ring are its name
    and its setting `full`: overwrite or refuse.
    """
    disk, core = broker.get("disk", {}), broker.get("rings", {})
    refusing = broker.get("refusing", {})
    things: dict[Any, Figures] = {}
    for name, facts in disk.items():
        used = facts["end_lsn"] - facts["start_lsn"]  # LSNs are counted in bytes
        things[name, facts.get("full", "")] = {
            **{key: facts[key] for key in table.RING if key in facts},
            "used": used,
            "headroom": max(0, facts.get("ring_bytes", 0) - used),
            "refusing": name in refusing,
            "failed": bool(core.get(name, {}).get("failed")),
            # The broker tells why there is no next segment; empty: there is one.
            "unprepared": bool(facts.get("unprepared")),
        }
    yield from _labelled(table.RING, things, labels.of("ring", things))


def _counted(broker: Mapping[str, Any]) -> Iterator[Family]:
    """Yield counters of the core and the shell, refusals by code, and events by name.

    broker: the answer to BROKER_INFO: "counters" are the core's, "shell" the shell's. Those that
    table.py does not list are taken by their names, which say what they count.
    """
    counters, shell = broker.get("counters", {}), broker.get("shell", {})
    # A counter that has counted nothing is 0: a rate needs a point to begin from.
    yield from (_single(metric, counters.get(name, 0)) for name, metric in table.COUNTERS.items())
    yield from (_single(metric, shell.get(name, 0)) for name, metric in table.SHELL.items())
    # Counters whose names begin and end so are one family; what is between is the label.
    for metric, source, prefix, suffix in (
        (table.REFUSALS, counters, "refused_", ""),
        (table.QUOTA_REFUSALS, counters, "quota_", ""),
        (table.DENIALS, shell, "denied_", "_total"),
    ):
        yield _family(
            metric,
            [
                ((name.removeprefix(prefix).removesuffix(suffix),), count)
                for name, count in sorted(source.items())
                if name.startswith(prefix) and name.endswith(suffix) and name not in table.SHELL
            ],
        )
    # Every other counter of the shell counts an event of the log.
    yield _family(
        table.EVENTS,
        [
            ((name.removesuffix("_total"),), count)
            for name, count in sorted(shell.items())
            if name not in table.SHELL and not name.startswith("denied_")
        ],
    )


# --- each stream, mailbox class, service, cursor, group ---------------------------------------


def _streams(everything: Everything) -> dict[Any, Figures]:
    """Return the figures of each stream, by its labels.

    Only the streams with a label of their own are asked for details (stream_details).
    """
    things: dict[Any, Figures] = {}
    for each in everything.streams:
        figures = things[(each.name,)] = {
            "tail": each.tail, "first": each.first, "records": each.records, "bytes": each.bytes,
        }  # fmt: skip
        details = everything.stream_details.get(each.name)
        if details is not None:
            figures["subscriptions"] = details.subscriptions
            figures["lagging"] = details.subscriptions - details.more.get("live", 0)
            figures["last_time_ms"] = details.more.get("last_time_ms", 0) / 1_000
    return things


def _mailbox_classes(everything: Everything, now_ms: float) -> dict[Any, Figures]:
    """Return figures of mailboxes by class: the first part of their names, up to a dot.

    Mailboxes may be thousands, each with a series in Prometheus. They are summed; `oldest` is the
    age of the oldest message of all.
    """
    things: defaultdict[Any, Figures] = defaultdict(lambda: dict.fromkeys(table.MAILBOX, 0.0))
    for each in everything.mailboxes:
        figures = things[(each.name.partition(".")[0],)]
        for name, value in (
            ("mailboxes", 1), ("messages", each.messages), ("bytes", each.bytes),
            ("held", each.held), ("delayed", each.delayed), ("readers", each.readers),
        ):  # fmt: skip
            figures[name] += value
        figures["oldest"] = max(figures["oldest"], seconds_since(each.oldest_ms, now_ms))
    return dict(things)


def _services(everything: Everything, now_ms: float) -> dict[Any, Figures]:
    """Return the figures of each service, by its labels."""
    return {
        (each.name,): {
            "waiting": each.waiting, "held": each.held, "delayed": each.delayed,
            "retried": sum(count for times, count in each.attempts if times > 1),
            "bytes": each.bytes, "offers": each.offers, "credit": each.credit, "dead": each.dead,
            "oldest": seconds_since(each.oldest_ms, now_ms),
        }
        for each in everything.services
    }  # fmt: skip


def _cursors(everything: Everything, now_ms: float) -> dict[Any, Figures]:
    """Return the figures of each cursor, by its labels."""
    return {
        (each.stream, each.cursor): {
            "lag": each.lag, "pinned_bytes": each.pinned_bytes,
            "moved": seconds_since(each.moved_ms, now_ms),
        }
        for each in everything.cursors
    }  # fmt: skip


def _groups(everything: Everything, now_ms: float) -> dict[Any, Figures]:
    """Return the figures of each group, by its labels; `oldest`, `moved`: ages in seconds."""
    return {
        (each.stream, each.group): {
            "lag": each.lag, "members": len(each.members),
            "held": sum(member.held for member in each.members),
            "oldest": max(
                (seconds_since(member.oldest_ms, now_ms) for member in each.members), default=0.0
            ),
            "moved": seconds_since(each.moved_ms, now_ms), "dead": each.dead,
        }
        for each in everything.groups
    }  # fmt: skip


def _namespaces(everything: Everything, labels: Labels) -> Iterator[Family]:
    """Yield metrics of the namespaces: what went in, quotas, what of them is used, and refusals.

    Namespaces beyond labels_max are added up under the label OTHER, except for quotas.
    """
    facts = {(each.namespace,): each for each in everything.namespaces}
    named = labels.of("namespace", facts)
    things = {
        key: {"messages_in": float(each.messages_in), "bytes_in": float(each.bytes_in)}
        for key, each in facts.items()
    }
    yield from _labelled(table.NAMESPACE, things, named)
    rest = [each for key, each in facts.items() if key not in named]
    # These have a second label: the resource, such as streams or bytes.
    for metric, amounts in (
        (table.NAMESPACE_LIMIT, lambda each: each.quotas),
        (table.NAMESPACE_LIMIT_USED, _used),
        (table.NAMESPACE_REFUSALS, lambda each: each.refused),
    ):
        samples = [
            ((*key, resource), amount)
            for key, each in facts.items()
            if key in named
            for resource, amount in amounts(each).items()
        ]
        # The sum of several quotas would be the quota of no namespace.
        if metric is not table.NAMESPACE_LIMIT:
            totals: defaultdict[str, int] = defaultdict(int)
            for each in rest:
                for resource, amount in amounts(each).items():
                    totals[resource] += amount
            samples += [((OTHER, resource), amount) for resource, amount in totals.items()]
        yield _family(metric, samples)


def _used(namespace: NamespaceFacts) -> dict[str, int]:
    """Return how much a namespace holds of each resource that it holds or that has a quota."""
    # Of a rate, such as records per second, nothing is held.
    bounded = dict.fromkeys(namespace.quotas.keys() - RATES, 0)
    return {**bounded, **namespace.held}


# --- families -------------------------------------------------------------------------------


def _labelled(
    rows: Mapping[str, Metric], things: Mapping[Any, Figures], named: frozenset[Any]
) -> Iterator[Family]:
    """Yield one family of metrics, with a sample for each thing, for each row of a table.

    rows: a table of table.py, the metric by the name of its figure. things: the figures of each
    stream, cursor or the like, by the values of its labels. named: label values that may be shown,
    since Prometheus keeps a series for each; all other things become one sample with the label
    OTHER: their sum, or the greatest of ages.
    """
    rest = [figures for labels, figures in things.items() if labels not in named]
    for name, metric in rows.items():
        samples = [
            (labels, figures[name])
            for labels, figures in things.items()
            if labels in named and name in figures
        ]
        # _OF_A_NAMED_STREAM: figures that are known of the named streams only.
        if rest and name not in _OF_A_NAMED_STREAM:
            values = [figures[name] for figures in rest if name in figures]
            total = max(values) if name in _OLDEST else sum(values)
            samples.append(((OTHER,) * len(metric.labels), total))
        yield _family(metric, samples)


def _single(metric: Metric, value: float) -> Family:
    return _family(metric, [((), value)])


def _family(metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    """Return a metric with its samples, each of label values and a value."""
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


def _histogram(metric: Metric, facts: Mapping[str, Any]) -> Family:
    """Return a histogram of durations from the broker's facts: bounds, counts and sum."""
    # Prometheus wants for each bound the count of all that is not above it.
    bounds = [*map(str, facts["bounds_s"]), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(facts["counts"])), strict=True))
    return HistogramMetricFamily(
        metric.name, metric.help, buckets=buckets, sum_value=facts["sum_s"]
    )
