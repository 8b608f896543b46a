"""Compression of a batch's body section.

Owns the codecs' numbers and their one-shot forms. The rule: decompression never yields
more than the size that the content's head names, whatever the bytes claim: each
decoder runs with a cap and one byte too many is an error. Source: SPEC.md, section 5.5.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from malamute_protocol.errors import BatchError, LocalProtocolError

CODECS: Final[tuple[str, ...]] = ("none", "gzip", "snappy", "lz4", "zstd")
"""Name of each codec; its number is its index."""
_NONE, _GZIP, _SNAPPY, _LZ4, _ZSTD = range(5)

_ZSTD_WINDOW_MAX: Final = 1 << 27


def codec_number(codec: str | int) -> int:
    """Return the number of a codec that an option of encode() gives by name or number.

    Raises LocalProtocolError when there is none such.
    """
    if isinstance(codec, int):
        if 0 <= codec < len(CODECS):
            return codec
    elif codec in CODECS:
        return CODECS.index(codec)
    raise LocalProtocolError("bad_batch", f"unknown codec {codec!r}; known: {', '.join(CODECS)}")


def compress(codec: int, raw: bytes) -> bytes:
    """Compress the body section with a codec.

    Raises LocalProtocolError `unsupported`: the codec's package is not installed here.
    """
    try:
        if codec == _GZIP:
            return zlib.compress(raw, 6, wbits=31)  # 31: with gzip's header and checksum.
        if codec == _SNAPPY:
            import cramjam

            return bytes(cramjam.snappy.compress_raw(raw))
        if codec == _LZ4:
            import lz4.frame

            return bytes(lz4.frame.compress(raw))
        if codec == _ZSTD:
            import zstandard

            return bytes(zstandard.ZstdCompressor(level=3).compress(raw))
    except ImportError as error:
        raise LocalProtocolError("unsupported", _missing(CODECS[codec], error)) from error
    return raw


def decompress(codec: int, stored: Any, raw_bytes: int) -> Any:
    """Decompress the body section to exactly `raw_bytes` bytes.

    Raises BatchError: broken, shorter or longer than `raw_bytes`; `unsupported` when the codec's
    package is not installed. At most `raw_bytes` + 1 bytes are ever produced.
    """
    if codec == _NONE:
        return stored
    name = CODECS[codec]
    try:
        raw = _DECODERS[codec](stored, raw_bytes)
    except BatchError:
        raise
    except ImportError as error:
        raise BatchError("unsupported", _missing(name, error)) from error
    except Exception as error:  # Each codec has its own exception types; all mean broken bytes.
        raise BatchError("bad_batch", f"the body does not decompress as {name}: {error}") from error
    if len(raw) != raw_bytes:  # One more, where a decoder was stopped: there would be more yet.
        raise BatchError(
            "bad_batch", f"the body decompresses to another size than the {raw_bytes} bytes named"
        )
    return raw


def _missing(codec: str, error: ImportError) -> str:
    """Say which package a codec needs, and how it is installed."""
    return f"codec {codec} needs the package {error.name}: pip install 'malamute-py[codecs]'"


def _gunzip(stored: Any, raw_bytes: int) -> bytes:
    """Decompress gzip to no more than `raw_bytes` and one.

    Raises BatchError: the stream is cut short, or bytes follow its end.
    """
    decoder = zlib.decompressobj(wbits=31)  # 31: with gzip's header and checksum.
    raw = decoder.decompress(stored, raw_bytes + 1)
    if len(raw) <= raw_bytes and (not decoder.eof or decoder.unused_data):
        raise BatchError("bad_batch", "the gzip body is cut short or has bytes after its end")
    return raw


def _unsnappy(stored: Any, raw_bytes: int) -> bytes:
    """Decompress snappy's raw form. Raises BatchError: it does not name `raw_bytes` as its size."""
    import cramjam

    # The raw format starts with the uncompressed length: 7 bits in each byte, the lowest first,
    # and the high bit where another byte follows. The output buffer bounds the rest.
    named, shift = 0, 0
    for byte in bytes(stored[:5]):
        named |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    else:
        raise BatchError("bad_batch", "the snappy body does not name its length")
    if named != raw_bytes:
        raise BatchError("bad_batch", f"the snappy body names {named} bytes, not {raw_bytes}")
    return bytes(cramjam.snappy.decompress_raw(bytes(stored)))


def _unlz4(stored: Any, raw_bytes: int) -> bytes:
    """Decompress an lz4 frame to no more than `raw_bytes` and one.

    Raises BatchError: the frame is cut short, or bytes follow its end.
    """
    import lz4.frame

    decoder = lz4.frame.LZ4FrameDecompressor()
    raw = bytes(decoder.decompress(bytes(stored), max_length=raw_bytes + 1))
    if len(raw) <= raw_bytes and (not decoder.eof or decoder.unused_data):
        raise BatchError("bad_batch", "the lz4 body is cut short or has bytes after its end")
    return raw


def _unzstd(stored: Any, raw_bytes: int) -> bytes:
    """Decompress a zstd frame to no more than `raw_bytes` and one.

    Raises BatchError: the frame names another size.
    """
    import zstandard

    # `max_output_size` is no bound when the frame names a size: look at it, then stream.
    named = zstandard.frame_content_size(stored)  # -1: it names none.
    if named not in (-1, raw_bytes):
        raise BatchError("bad_batch", f"the zstd body names {named} bytes, not {raw_bytes}")
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
    with decoder.stream_reader(bytes(stored), read_across_frames=False) as reader:
        pieces, size = [], 0
        while size <= raw_bytes:
            piece = reader.read(min(1 << 20, raw_bytes + 1 - size))
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
    return b"".join(pieces)


_DECODERS: Final[dict[int, Any]] = {
    _GZIP: _gunzip, _SNAPPY: _unsnappy, _LZ4: _unlz4, _ZSTD: _unzstd,
}  # fmt: skip
