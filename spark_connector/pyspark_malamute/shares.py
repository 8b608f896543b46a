"""A cap that several streams share.

Owns the division. The rules: the shares come to the cap; a stream that needs less
leaves the rest to the others; where the cap is less than the streams are many, the first of them
get one each.
"""

from __future__ import annotations

from collections.abc import Mapping


def shares(most: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """The share that each stream gets of a cap of a micro-batch, be it of records or of bytes.

    most: the cap; 0: there is none, and each share is 0. wanted: at least 1 each; what is left when
    all have it is spread over all, for they may have grown meanwhile.
    """
    if most <= 0:
        return dict.fromkeys(wanted, 0)
    if most < len(wanted):
        return dict.fromkeys(list(wanted)[:most], 1)
    left, others = most, len(wanted)
    found: dict[str, int] = {}
    # Streams that want least come first: what they leave is the others'.
    for name in sorted(wanted, key=lambda name: wanted[name]):
        found[name] = min(wanted[name], left // others)
        left -= found[name]
        others -= 1
    # What is left is spread evenly; the first `rest` streams get one more.
    more, rest = divmod(left, len(found))
    return {name: share + more + (at < rest) for at, (name, share) in enumerate(found.items())}
