"""The ledger of a stream's bytes: what was recovered, what is joined, what goes first."""

from __future__ import annotations

from malamute_py.broker.log.ledger import PIECES_MAX, Ledger


def test_a_recovered_piece_is_whole_until_it_is_split_or_gone() -> None:
    ledger = Ledger(0, 100, 10_000)
    assert (ledger.unsplit, ledger.first_piece_end) == (True, 100)
    ledger.split([(50, 4_000), (100, 5_000)], 0)
    assert (ledger.unsplit, ledger.bytes, ledger.first_piece_end) == (False, 9_000, 50)
    ledger.split([(100, 1)], 0)
    assert ledger.bytes == 9_000
    ledger.add(110, 500, 1)
    assert ledger.recovered_end == 100
    gone = Ledger(0, 100, 10_000)
    gone.add(110, 500, 1)
    gone.trimmed(100)
    assert (gone.unsplit, gone.bytes) == (False, 500)
    gone.split([(110, 1)], 0)
    assert (gone.bytes, gone.recovered_end) == (500, 0)
    assert not Ledger(5, 5, 0).unsplit


def test_pieces_that_were_recovered_are_joined_apart_from_those_with_a_time() -> None:
    ledger = Ledger(0, 1_000, 1_000_000)
    ledger.split([(offset + 1, 1_000) for offset in range(1_000)], 0)
    for number in range(400):
        ledger.add(1_001 + number, 70_000, 5)
    assert len(ledger._pieces) <= PIECES_MAX
    assert ledger.bytes == 1_000_000 + 400 * 70_000
    times = [bool(piece.newest_ms) for piece in ledger._pieces]
    assert times == sorted(times)
    assert ledger.first_since(6) is None, "recovered pieces count as young"
    assert ledger.bytes_before(1_000) == 1_000_000


def test_bytes_before_an_offset_within_a_piece_are_a_share_of_it() -> None:
    ledger = Ledger(50, 150, 10_000)
    assert [ledger.bytes_before(offset) for offset in (0, 50, 75, 150)] == [0, 0, 2_500, 10_000]
    ledger.trimmed(75)
    assert (ledger.bytes, ledger.bytes_before(75)) == (10_000, 2_500), "some of a piece counts"
    ledger.split([(100, 1_000), (150, 4_000)], 75)
    assert (ledger.bytes, ledger.bytes_before(75), ledger.bytes_before(125)) == (5_000, 0, 3_000)
    ledger.trimmed(150)
    ledger.add(160, 500, 1)
    assert ledger.bytes_before(155) == 250
