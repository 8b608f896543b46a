"""Words that arguments may be: the types that a checker sees are what the calls check."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import pytest

import malamute_py as malamute
from malamute_protocol.errors import LocalProtocolError
from malamute_py.client.aio.client import Client
from malamute_py.client.readers import mail
from malamute_py.client.session import calls, group_options, offer_options, publisher
from malamute_py.client.sync.client import SyncClient


def test_each_type_has_the_words_that_are_checked() -> None:
    assert set(get_args(malamute.ConfirmAt)) == set(publisher._ASKED_LEVELS)
    assert get_args(malamute.ReadVisibility) == calls._VISIBILITIES
    assert set(get_args(malamute.GroupVisibility)) == set(group_options.VISIBILITIES)
    assert set(get_args(malamute.GroupKind)) == set(group_options.KINDS)
    assert get_args(malamute.AckWhen) == mail.ACKS
    assert get_args(malamute.OnError) == offer_options.ON_ERROR


WORDS = ("confirm", "visibility", "ack", "kind", "until", "on_error")


@pytest.mark.parametrize("client", [Client, SyncClient])
def test_no_public_call_takes_any_text_for_such_an_argument(client: type) -> None:
    seen = set()
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if name.startswith("_"):
            continue
        hints = get_type_hints(method, include_extras=True)
        for argument in WORDS:
            if argument in inspect.signature(method).parameters:
                assert get_args(hints[argument]), f"{client.__name__}.{name}({argument})"
                seen.add(argument)
    assert seen == set(WORDS)


@pytest.mark.parametrize(
    ("check", "named"),
    [
        (publisher.level_number, "synced"),
        (group_options.group_visibility, "durable"),
        (offer_options.make_on_error, "nack"),
    ],
)
def test_a_wrong_word_is_refused_with_those_that_are_allowed(check: Any, named: str) -> None:
    with pytest.raises(LocalProtocolError, match=named):
        check("sometimes")
