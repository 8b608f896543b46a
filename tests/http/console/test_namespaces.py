"""The console of a person who belongs to a namespace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from malamute_py import SyncClient
from tests.http.console.browsing import Browser


@pytest.fixture(scope="module")
def eve(enter: Callable[[str], Browser], client: SyncClient) -> Browser:
    for name in ("acme.orders", "acmex.orders", "orders"):
        client.publish(name, b"x")
        client.send(f"{name}.box", b"x")
    return enter("acme.eve")


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("", ""), ("streams", "acme.orders"), ("mailboxes", "acme.orders.box"), ("services", ""),
        ("groups", ""), ("cursors", ""), ("clients", "acme.eve"), ("users", "acme.eve"),
        ("settings", ""),
    ],
)  # fmt: skip
def test_each_page_shows_what_lies_in_the_namespace(eve: Browser, page: str, shown: str) -> None:
    answer = eve.get(page)
    assert answer.status == 200
    assert shown in answer.words
    for other in ("acmex", "root", "reader", " orders"):
        assert other not in answer.words, other


@pytest.mark.moderate
def test_a_person_of_a_namespace_is_not_offered_to_have_the_configuration_read(
    eve: Browser,
) -> None:
    page = eve.get("settings")
    assert "is not offered: it is for users of no namespace" in page.words
    assert "do/reload" not in page.text


@pytest.mark.moderate
def test_a_look_outside_is_forbidden(eve: Browser) -> None:
    assert eve.get("stream", name="acme.orders").status == 200
    assert "may not read" in eve.get("stream", name="acmex.orders").words


@pytest.mark.moderate
def test_the_page_of_users_tells_the_namespace_of_each(root: Browser) -> None:
    assert "acme" in root.get("users", prefix="acme.e").words.replace("acme.e", "")
