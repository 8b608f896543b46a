"""The planted bugs of publishing, and of delivery to subscriptions."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

from malamute_py.broker.broker import Broker
from malamute_py.broker.log.confirms import SYNCED
from malamute_py.broker.log.stream import Stream
from malamute_py.broker.streams.producers import ProducerStream
from malamute_py.broker.streams.publishing import Publishing
from malamute_py.broker.subscriptions import selection
from malamute_py.broker.subscriptions.lagging import Lagging
from malamute_py.broker.subscriptions.live import Delivery
from malamute_py.broker.subscriptions.own_turns import OwnTurns
from malamute_py.broker.subscriptions.portion import Portion
from malamute_py.broker.subscriptions.subscription import Subscription
from tests.simulation.plants.planted import Planted, codes, replace


def _confirm_before_sync(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def appended(self: Any, answer: Any) -> None:
            original(self, answer)
            for ring in self._catalogue.rings.values():
                for settled in ring.unsettled:
                    for waiter in settled.waiters or ():
                        self._confirms.confirm(waiter, SYNCED)
                    settled.waiters = ()

        return appended

    replace(stack, Broker, "appended", make)


def _gap_instead_of_reading(stack: contextlib.ExitStack) -> None:
    def read(self: Any, sub: Any) -> None:
        self._lagging.gap(sub, min(sub.tail, sub.stop, sub.stream.hot_first), "retention", "")
        self._lagging.consider(sub)

    replace(stack, OwnTurns, "_read", lambda _: read)


def _cover_instead_of_gap(stack: contextlib.ExitStack) -> None:
    def gap(self: Any, sub: Any, to: int, _code: str, _reason: str) -> None:
        sub.position = to
        self._delivery.cover(sub)

    replace(stack, Lagging, "gap", lambda _: gap)


def _slow_reader_skips(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def fall_behind(self: Any, sub: Any, _position: int) -> None:
            original(self, sub, sub.tail)

        return fall_behind

    replace(stack, Delivery, "fall_behind", make)


def _duplicate_accepted(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def in_sequence(self: Any, *arguments: Any) -> bool:
            counters = self._shard.counters
            before = counters["publishes_duplicate"]
            return bool(original(self, *arguments)) or counters["publishes_duplicate"] > before

        return in_sequence

    replace(stack, Publishing, "_in_sequence", make)


def _duplicate_points_elsewhere(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def found(self: Any, sequence: int) -> Any:
            place = original(self, sequence)
            return place._replace(offset=place.offset + 1) if place.offset >= 0 else place

        return found

    replace(stack, ProducerStream, "original", make)


def _durable_sees_all(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(Subscription, "tail", property(lambda sub: sub.stream.next)))


def _rewind_forgotten(stack: contextlib.ExitStack) -> None:
    replace(stack, Stream, "epoch_end", lambda _: lambda _self, _epoch, tail: tail)


def _credit_ignored(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(Portion, "takes_more", True))


def _expired_is_everything(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def unexpired(content: Any, now_ms: int) -> Any:
            mask = original(content, now_ms)
            return None if mask is None else mask & False

        return unexpired

    replace(stack, selection, "unexpired", make)


def _waiting_overtaken(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def put_off(self: Any, audience: Any, late: Any) -> None:
            if late.job is not None or audience.late:
                original(self, audience, late)

        return put_off

    replace(stack, Delivery, "_put_off", make)


def _duplicate_overtakes(stack: contextlib.ExitStack) -> None:
    def make(original: Any) -> Any:
        def duplicate(
            self: Any, link: Any, command: Any, stream: Any, place: Any, again: Any
        ) -> None:
            under_way, place.under_way = place.under_way, {}
            try:
                original(self, link, command, stream, place, again)
            finally:
                place.under_way = under_way

        return duplicate

    replace(stack, Publishing, "_duplicate", make)


PLANTS: dict[str, Planted] = {
    "confirm-before-sync": Planted(
        "broker", "a batch is confirmed as synced when it is appended",
        _confirm_before_sync, codes("lost"), 60,
    ),
    "hole-called-gap": Planted(
        "broker", "history that is there is announced as a gap",
        _gap_instead_of_reading, codes("hole_called_gap"), 40,
    ),
    "gap-called-hole": Planted(
        "broker", "what retention took is covered without a word",
        _cover_instead_of_gap, codes("gap_called_hole"), 120,
    ),
    "slow-reader-skips": Planted(
        "broker", "a live reader without credit loses the batch at which it falls behind",
        _slow_reader_skips, codes("gap_called_hole"), 40,
    ),
    "duplicate-accepted": Planted(
        "broker", "a batch that comes again is appended again",
        _duplicate_accepted, codes("twice", "order"), 60,
    ),
    "duplicate-points-elsewhere": Planted(
        "broker", "the confirm of a duplicate names another offset than the original's",
        _duplicate_points_elsewhere, codes("wrong_duplicate"), 60,
    ),
    "durable-ignores-the-sync": Planted(
        "broker", "durable readers see what is only appended",
        _durable_sees_all, codes("early", "lost_seen", "start"), 40,
    ),
    "rewind-forgotten": Planted(
        "broker", "a resume beyond its epoch's end is taken as it is",
        _rewind_forgotten, codes("rewound", "start"), 400,
    ),
    "credit-ignored": Planted(
        "broker", "readers on demand are given more than their credit",
        _credit_ignored, codes("credit"), 40,
    ),
    "expiry-takes-neighbours": Planted(
        "broker", "one expired record hides the others of its batch",
        _expired_is_everything, codes("gap_called_hole"), 120,
    ),
    "waiting-overtaken": Planted(
        "broker", "a batch that is put off, as too much was given, is never given",
        _waiting_overtaken, codes("gap_called_hole", "lost"), 120,
    ),
    "duplicate-overtakes": Planted(
        "broker", "a duplicate is confirmed before its original is in the log",
        _duplicate_overtakes, codes("wrong_confirm", "wrong_duplicate", "lost", "early"), 120, 40,
    ),
}  # fmt: skip
