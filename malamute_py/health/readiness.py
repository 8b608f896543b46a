"""Whether the broker lives, and whether it is ready for work.

Owns the two verdicts and their reasons. The rules: what a restart would mend makes it not live, and
nothing else does; what keeps clients from getting work done makes it not ready; what concerns one
stream, or is the past's, is a warning. Source: deploy/metrics.md, Health.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from malamute_py.health.facts import Facts, ring_title

SILENT_S: Final = 30.0
"""A broker that answered before and has been silent for so long does not live."""
REFUSED_MS: Final = 30_000
"""Age from which a refusal says nothing about now: no client may have tried to append since."""
DISK_LEAST_BYTES: Final = 64 << 20
_MAIN: Final = "main"


@dataclass(frozen=True)
class Verdict:
    """Whether a broker is live, or ready; each reason against it, and each warning.

    Reasons and warnings are (check, sentence).
    """

    holds: bool
    reasons: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)


def live(facts: Facts) -> Verdict:
    """Judge for /livez whether the broker's loop turns: whether it answers questions."""
    if facts.silent_s < SILENT_S:
        return Verdict(True)
    return Verdict(False, [("broker", f"silent for {facts.silent_s:.0f} s: {facts.reason}")])


def ready(facts: Facts) -> Verdict:
    """Judge whether clients can link, publish, send and request now: for /readyz and checks."""
    broker = facts.broker
    if not broker:
        return Verdict(False, [("broker", facts.reason)])
    reasons = [*_links(broker), *_checkpoint(broker), *_rings(broker), *_disk(broker)]
    return Verdict(not reasons, reasons, list(_warnings(broker)))


def _links(broker: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reason if there are as many links or connections as there may be."""
    bounds, gauges = broker.get("bounds", {}), broker.get("gauges", {})
    for name, there in (
        ("links", gauges.get("links", 0)),
        ("connections", broker.get("connections", 0)),
    ):
        if name in bounds and there >= bounds[name]:
            yield "links", f"{there} {name}, which is as many as there may be"


def _checkpoint(broker: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reason if the checkpoint's tables fail to follow the log, or work waits for them."""
    checkpoint = broker.get("checkpoint", {})
    if checkpoint.get("failing"):
        yield "checkpoint", "the last step of the tables failed; the log says why"
    if checkpoint.get("pressed"):
        yield "checkpoint", "new mail, requests and records of ring main wait for the tables"


def _rings(broker: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reason for each ring that failed, and for a main that refuses appends."""
    for name, facts in broker.get("rings", {}).items():
        if facts.get("failed"):
            title = ring_title(broker, name)
            yield "ring", f"ring {title} failed ({facts['failed']}): look at the disk, start again"
    refusal = broker.get("refusing", {}).get(_MAIN)
    if refusal is not None and refusal["ms_ago"] < REFUSED_MS:
        yield "ring", f"ring {_MAIN} refuses appends: {refusal['code']}"


def _disk(broker: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reason if the disk is nearly full, or gives ring main no new segment."""
    code = broker.get("disk", {}).get(_MAIN, {}).get("unprepared")
    if code:
        yield "disk", f"ring {_MAIN} gets no new segment: {code}"
    free_bytes = broker.get("disk_free_bytes")
    if free_bytes is not None and free_bytes < DISK_LEAST_BYTES:
        yield "disk", f"{free_bytes} bytes are free; less than {DISK_LEAST_BYTES} is too little"


def _warnings(broker: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (check, reason) for what a person should look at although the broker is ready.

    broker: the answer to BROKER_INFO.
    """
    checkpoint = broker.get("checkpoint", {})
    if checkpoint.get("lost"):
        reason = checkpoint.get("reason", "")
        yield "checkpoint", f"mail, services, cursors and groups are refused: {reason}"
    # Other rings than main concern single streams; main makes the broker not ready.
    for name, refusal in broker.get("refusing", {}).items():
        if name != _MAIN and refusal["ms_ago"] < REFUSED_MS:
            yield "ring", f"ring {ring_title(broker, name)} refuses appends: {refusal['code']}"
    damage = broker.get("damage", ())
    if damage:
        yield "damage", f"the start found {len(damage)} things missing or damaged"
