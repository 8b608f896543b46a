"""Messages: sent ones come back, and errors name their place."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malamute_protocol import commands as c
from malamute_protocol.errors import LocalProtocolError, RemoteProtocolError
from malamute_protocol.framing import COMMANDS, NUMBERS, decode_message, encode_message
from malamute_protocol.limits import Limits
from tests.seeds import examples


def packed(*commands: Any) -> bytes:
    result: bytes = msgpack.packb(list(commands))
    return result


def test_commands_come_back_with_their_own_frames_in_order() -> None:
    commands = [
        c.Ping(1),
        c.Publish("s", 1),
        c.Deliver(3, 0, 5, 2, b"\x1f"),
        c.Cover(3, 5, 9),
        c.Publish("t", 2, 3),
    ]
    frames = encode_message(commands, [b"a", b"b", b"c", b"d"])
    assert decode_message(frames) == [
        (commands[0], ()),
        (commands[1], (b"a",)),
        (commands[2], (b"b", b"c")),
        (commands[3], ()),
        (commands[4], (b"d",)),
    ]


def test_trailing_fields_may_be_left_off_and_surplus_ones_are_ignored() -> None:
    assert decode_message([packed([3])]) == [(c.Ping(0), ())]
    assert decode_message([packed([3, 7, "from", ["a", "later", "version"]])]) == [(c.Ping(7), ())]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "without frames"),
        ([b""], "not a MessagePack array"),
        ([b"\xc1"], "not a MessagePack array"),
        ([packed([3]) + b"\0"], "frame 0"),
        ([msgpack.packb(5)], "not a MessagePack array"),
        ([packed()], "without commands"),
        ([packed([])], "command 0 is not an array that starts with a number"),
        ([packed([3], ["x"])], "command 1 is not an array that starts with a number"),
        ([packed([3], [250, 1])], "command 1 has the unknown number 250"),
        ([packed([3, "x"])], r"command 0 \(Ping\): Expected `int`, got `str` - at `token`"),
        ([packed([3, True])], "`token`"),
        ([packed([3, 1.0])], "`token`"),
        ([packed([10, "s"])], r"command 0 \(Publish\): Expected `array` of at least length 3"),
        ([packed([10, "s", 1])], "owns 1 content frames, 0 are left"),
        ([packed([3]), b"x"], "1 content frames without a command"),
        ([packed([17, 1, 0, 1, -1])], "owns -1 content frames"),
        ([packed([17, 1, 0, 1, 2**40])], "content frames, 0 are left"),
        ([b"\x91\x93\x05\xa1\xff\xa0"], "(?i)utf-8"),
        ([b"\x91" * 100_000], "recursion|nests"),
        ([packed([12, 1, "s", msgpack.Timestamp(0), [1]])], "frame 0|Expected|extension"),
        ([packed([12, 1, "s", [msgpack.ExtType(5, b"")], [1]])], "holds an extension type"),
        ([packed([30, 1, "s", {"a": {5: 1}}])], "a key that is no string"),
        ([packed([12, 1, "s", [[[[]]]], [1]])], "`pattern` nests deeper than 2"),
        ([packed([43, 1, []])], r"command 0 \(AckMail\): at least one range"),
        ([packed([3], [64, 1, [[2, 3], [1, 2]]])], r"command 1 \(AckRecords\): ranges ascend"),
        ([packed([53, 1, [[0, 2**60]], 3])], "ranges of 1152921504606846976 numbers"),
        ([packed([40, "s", 1, 0, b"", 0, 200]), b"c"], "`priority`"),
        ([packed([60, "s", "c", -1, 1])], "`next`"),
        ([packed([3], [66, 1, 2], [10, "s", 0]), b"c"], r"command 1 \(Atomic\): 2 parts, 1 comm"),
        ([packed([66, 1, 1], [3])], r"command 0 \(Atomic\): Ping cannot be a part"),
        ([packed([66, 1, 1], [64, 1, [[1, 2]], 4])], "AckRecords with a tracker of its own"),
        ([packed([66, 1, 1], [53, 1, [[1, 2]], 2])], "ACK_WORK of state 2 cannot be a part"),
    ],
)
def test_a_broken_message_is_named_with_its_place(frames: list[bytes], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason) as caught:
        decode_message(frames, Limits(nesting_max=2))
    assert caught.value.code == "malformed"


@pytest.mark.parametrize(
    ("frames", "limits"),
    [
        ([packed([3], [3], [3])], Limits(message_commands_max=2)),
        ([packed([3, 1])], Limits(command_frame_bytes_max=3)),
        ([packed([17, 1, 0, 1, 3]), b"", b"", b""], Limits(message_frames_max=3)),
        ([packed([43, 1, [[n, n + 1] for n in range(65537)]])], Limits()),
        ([packed([54, 1, [0] * 65537, 1]), b"c"], Limits()),
        ([packed([58, 1, "s", [0] * 65537])], Limits()),
        ([packed([42, 1, "a", 1, 0, None, [[b"", 0, 1]] * 65537])], Limits()),
        ([packed([40, "s", 1, 0, b"k" * 129]), b"c"], Limits()),
        ([packed([53, 1, [[1, 2]], 4, 0, 0, 0, "x" * 1025])], Limits()),
    ],
)
def test_a_count_over_its_limit_is_too_large(frames: list[bytes], limits: Limits) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(frames, limits)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("ranges", [[], [(1, 1)], [(2, 1)], [(-1, 1)], [(0, 2), (1, 3)]])
def test_we_make_no_command_of_ranges_that_are_none(ranges: list[tuple[int, int]]) -> None:
    for make in (c.AckMail, c.AckRecords, lambda number, wrong: c.AckWork(number, wrong, 3)):
        with pytest.raises(ValueError, match="range"):
            make(1, ranges)
    assert c.AckMail(1, [(0, 1), (1, 2), (5, 5 + (1 << 20) - 2)]).ranges[0] == (0, 1)


def test_an_array_that_claims_more_than_its_frame_holds_costs_nothing() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\x91\x93\x2b\x01\xdd\xff\xff\xff\xff"):
        with pytest.raises(RemoteProtocolError):
            decode_message([head])


def test_we_send_no_message_whose_frames_do_not_fit() -> None:
    with pytest.raises(LocalProtocolError, match="own 1 frames, not 0"):
        encode_message([c.Publish("s", 1)])
    with pytest.raises(LocalProtocolError):
        encode_message([])


def test_every_number_has_one_command() -> None:
    assert len(COMMANDS) == len(NUMBERS) == 79
    assert all(COMMANDS[number] is command for command, number in NUMBERS.items())


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.text(max_size=4),
        st.binary(max_size=4),
        st.floats(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=examples(400))
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(COMMANDS)), st.lists(anything, max_size=8)), max_size=4
    ),
    st.lists(st.binary(max_size=3), max_size=4),
)
def test_any_arrays_decode_or_raise_remote_errors(
    commands: list[tuple[int, list[Any]]], frames: list[bytes]
) -> None:
    first = packed(*([number, *fields] for number, fields in commands))
    with suppress(RemoteProtocolError):
        decode_message([first, *frames])


@pytest.mark.moderate
@settings(max_examples=examples(400))
@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_remote_errors(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode_message([data])
