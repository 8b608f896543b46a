"""Forms: the fields that a page sends.

Owns how a body becomes fields. The rule: what is no form, or has too many fields, or ends early, is
none at all.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

FORM_BYTES_MAX: Final = 64 << 10
_FIELDS_MAX: Final = 512

Form = dict[str, list[str]]


async def form_of(request: Request) -> Form | None:
    """Return the fields of the form in a request's body; None: the body is not a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        return None
    try:
        pairs = parse_qsl(
            (await request.body()).decode("ascii"), keep_blank_values=True,
            max_num_fields=_FIELDS_MAX, errors="strict",
        )  # fmt: skip
    except (ValueError, ClientDisconnect):  # too many fields, bytes that are no text, no whole body
        return None
    found: Form = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def of(form: Form, name: str) -> str:
    """Return a field of a form; empty: it has none of that name."""
    return form.get(name, [""])[-1]
