"""Codecs: decompression yields no more than the head names, whatever the bytes claim."""

from __future__ import annotations

import resource
import struct
import zlib

import cramjam
import google_crc32c
import lz4.frame
import pytest
import zstandard

from malamute_protocol.batch import Content, encode, iter_batches
from malamute_protocol.codec import CODECS, compress, decompress
from malamute_protocol.errors import BatchError, LocalProtocolError
from malamute_protocol.limits import Limits
from malamute_protocol.stamp import LAST_OF_BUNDLE, Stamp

ZEROS = bytes(64 << 20)
BOMBS = {
    "gzip": zlib.compress(ZEROS, wbits=31),
    "snappy": bytes(cramjam.snappy.compress_raw(ZEROS)),
    "lz4": bytes(lz4.frame.compress(ZEROS)),
    "zstd": zstandard.ZstdCompressor().compress(ZEROS),
    "zstd of unnamed size": zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_the_memory_it_claims(name: str) -> None:
    codec = CODECS.index(name.split(maxsplit=1)[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (0, 1, 1 << 16):
        with pytest.raises(BatchError):
            decompress(codec, BOMBS[name], size)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 32 << 10


@pytest.mark.parametrize("codec", range(1, 5))
def test_a_body_that_is_cut_or_goes_on_is_refused(codec: int) -> None:
    raw = bytes(range(256)) * 8
    stored = compress(codec, raw)
    assert decompress(codec, stored, len(raw)) == raw
    for broken in (stored[:-1], stored[: len(stored) // 2], b"", b"\xff" * 40):
        with pytest.raises(BatchError):
            decompress(codec, broken, len(raw))
    for size in (len(raw) - 1, len(raw) + 1):
        with pytest.raises(BatchError):
            decompress(codec, stored, size)


def test_an_empty_body_section_survives_every_codec() -> None:
    for codec in range(1, 5):
        assert decompress(codec, compress(codec, b""), 0) == b""


def test_a_broken_body_is_found_by_verify_and_not_by_the_brokers_check() -> None:
    content = bytearray(encode([b"compress me " * 50], codec="zstd"))
    at = Content(bytes(content)).sections.body
    content[at + 6] ^= 0xFF
    struct.pack_into("<I", content, 8, google_crc32c.value(bytes(content[12:])))
    broken = Content(bytes(content))
    broken.check()
    with pytest.raises(BatchError):
        broken.verify()


def test_an_unknown_codec_is_named_with_those_that_are_known() -> None:
    with pytest.raises(LocalProtocolError, match="zstd"):
        encode([b"x"], codec="brotli")


@pytest.mark.moderate
@pytest.mark.parametrize("codec", CODECS)
def test_bodies_are_read_under_the_limits_that_the_batch_was_checked_against(codec: str) -> None:
    small, large = Limits(batch_bytes_max=1 << 20), Limits(batch_bytes_max=64 << 20)
    data = encode([bytes(1 << 20)] * 17, subject="s", codec=codec, limits=large)
    stamp = Stamp(LAST_OF_BUNDLE, 0, 0, 0, 1, 0, 0, 1, 0, 96 + len(data), 17, 0, crc_of(data))
    (batch,) = iter_batches([stamp.pack(), data], limits=large)
    assert [len(record.body) for record in batch] == [1 << 20] * 17
    with pytest.raises(BatchError) as refused:
        next(iter_batches([stamp.pack(), data], limits=small))
    assert refused.value.code == "too_large"


def crc_of(data: bytes) -> int:
    return Content(data).head.content_crc
