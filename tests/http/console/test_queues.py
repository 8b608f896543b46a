"""Pages of mailboxes, services, groups, cursors, clients and settings, and their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from malamute_py import EmbeddedBroker, Plain, SyncClient, connect_sync
from tests.http.console.browsing import Browser
from tests.http.console.conftest import PASSWORDS
from tests.http.running import until

HOSTILE = "<script>alert(1)</script>\u202e"
DEAD = 3


@pytest.fixture(scope="module", autouse=True)
def filled(client: SyncClient, broker: EmbeddedBroker) -> None:
    for number in range(60):
        client.send("box", b"message %d" % number, subject="s")
    client.send("box", HOSTILE.encode(), subject=HOSTILE, fields={"<k>": HOSTILE})
    client.edit_service("up", attempts_max=1)
    for number in range(DEAD):
        client.submit("up", b"dead %d" % number, subject="job")
    with (
        connect_sync(
            broker.tcp_endpoint, credential=Plain("root", PASSWORDS["root"]), identity="root"
        ) as worker,
        worker.worker("up") as offer,
    ):
        for _ in range(DEAD):
            request = offer.next()
            assert request is not None
            request.fail("it cannot be done")
    until(lambda: client.service_info("up").dead == DEAD)
    client.submit("up", b"waits")
    client.publish("closed", b"x")
    client.cursor("closed", "reader").move(1)
    client.publish_many("open.trades", [b"x"] * 100, subject="a.b")
    client.cursor("open.trades", "reader").move(40)
    with client.group("open.trades", "crew") as member:
        member.accepted()


@pytest.fixture
def held(broker: EmbeddedBroker) -> Iterator[SyncClient]:
    """A client that has the request of service `up` and records of group `crew` in hand."""
    with (
        connect_sync(
            broker.tcp_endpoint, credential=Plain("root", PASSWORDS["root"]), software="holder"
        ) as holding,
        holding.group("open.trades", "crew", ack="manual") as member,
    ):
        assert member.next_batch(10_000) is not None
        yield holding


@pytest.mark.moderate
def test_the_overview_names_what_is_stuck_first(root: Browser) -> None:
    words = root.get().words
    assert "service up : 1 request waiting for" in words
    assert "service up : 3 dead letters" in words
    assert words.index("and no worker is there") < words.index("dead letters")
    assert "group open.trades / crew : 100 records behind, and it has no members" in words


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("mailboxes", {}, ["box", "up.dead"]),
        ("mailboxes", {"prefix": "up"}, ["up.dead", "1 listed"]),
        ("mailbox", {"name": "box"}, ["Messages 61", "message 0", "next →"]),
        ("services", {}, ["up", "■ stuck", "no worker is there"]),
        ("service", {"name": "up"}, ["Waiting 1", "Dead letters 3", "it cannot be done", "dead 2"]),
        ("groups", {}, ["crew", "open.trades", "shared"]),
        ("group", {"stream": "open.trades", "name": "crew"}, ["Behind 100", "no members now"]),
        ("cursors", {}, ["reader", "60"]),
        ("cursor", {"stream": "open.trades", "name": "reader"}, ["Next offset 40", "Behind 60"]),
        ("clients", {}, ["malamute console", "root"]),
        ("clients", {"prefix": "nothing"}, ["No clients"]),
        ("users", {}, ["root", "reader", "read: open.*", "admin", "password"]),
        ("users", {"verb": "read", "name": "open.x"}, ["May read open.x", "✓ yes"]),
        ("users", {"verb": "work", "name": "up", "prefix": "rea"}, ["✕ no", "1 listed"]),
        ("users", {"verb": "work"}, ["Not asked: name the stream"]),
        ("settings", {}, ["links", "Limits of a link", "malamute-py"]),
        ("settings", {}, ["authentication.mechanism plain program –", "was not read anew since"]),
        ("settings", {}, ["authentication.users.root ******** program"]),
        ("settings", {"all": "yes"}, ["journal.full overwrite default –"]),
        ("settings", {"prefix": "journal.full"}, ["journal.full overwrite default"]),
        ("settings", {"prefix": "links.heartbeat_min"}, ["links.heartbeat_min_ms 50 ms default"]),
        ("settings", {"prefix": "nothing"}, ["No setting begins so"]),
    ],
)
def test_each_page_shows_its_things(
    root: Browser, path: str, query: dict[str, object], words: list[str]
) -> None:
    page = root.get(path, **query)
    assert page.status == 200
    for each in words:
        assert each in page.words, each
    # A page refreshes a part of itself, which the same address gives.
    assert 'id="live"' in page.text
    assert root.get(path, poll=1, **query).status == 200


@pytest.mark.parametrize(
    ("path", "query", "actions", "words"),
    [
        ("stream", {"name": "closed"}, ["publish", "trim", "purge", "edit-stream"],
         "Publish is not offered: it takes the permission write on closed."),
        ("mailbox", {"name": "box"}, ["purge-mailbox"],
         "Purge is not offered: it takes the permission purge on box."),
        ("service", {"name": "up"}, ["requeue"],
         "To queue them anew is not offered: it takes the permission manage_queues on up."),
        ("group", {"stream": "open.trades", "name": "crew"}, ["reset-group", "remove-group"],
         "Stand elsewhere is not offered: it takes the permission manage_streams on open.trades."),
        ("cursor", {"stream": "closed", "name": "reader"}, ["reset-cursor"],
         "Move it is not offered: it takes the permission manage_streams on closed."),
        ("streams", {}, ["create-stream"],
         "Make a stream is not offered: it takes the permission create."),
        ("settings", {}, ["reload"],
         "is not offered: it takes the permission manage_users on the broker."),
    ],
)  # fmt: skip
def test_what_a_person_may_not_do_is_not_offered(
    root: Browser,
    enter: Callable[[str], Browser],
    path: str,
    query: dict[str, object],
    actions: list[str],
    words: str,
) -> None:
    page, whole = enter("watcher").get(path, **query), root.get(path, **query)
    assert page.status == 200
    assert words in page.words
    assert "is not offered" not in whole.words
    for action in actions:
        assert f'/console/do/{action}"' not in page.text
        assert f'/console/do/{action}"' in whole.text


def test_what_a_person_may_do_is_offered(enter: Callable[[str], Browser]) -> None:
    page = enter("watcher").get("stream", name="closed")
    assert "/console/do/copy" in page.text
    assert "<button>Look</button>" in page.text
    assert 'id="tail"' in page.text


def test_messages_are_paged_and_text_of_strangers_is_text(root: Browser) -> None:
    page = root.get("mailbox", name="box")
    assert "message 49" in page.words
    assert "message 50" not in page.words
    start = page.text.index("&amp;after=") + len("&amp;after=")
    number = page.text[start : page.text.index('"', start)]
    page = root.get("mailbox", name="box", after=number)
    assert "message 50" in page.words
    assert "<script>alert" not in page.text
    assert "<k>" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text
    assert "\u202e" not in page.text


def test_a_group_shows_what_each_member_holds(root: Browser, held: SyncClient) -> None:
    words = root.get("group", stream="open.trades", name="crew").words
    assert "Members 1" in words
    assert "In hand" in words
    page = root.post("do/remove-group", {"stream": "open.trades", "name": "crew"})
    assert "Not done: in_use" in page.words


def test_a_purge_empties_a_mailbox_and_says_how_much_went(
    root: Browser, client: SyncClient
) -> None:
    for number in range(5):
        client.send("full", b"%d" % number)
    root.get()
    page = root.post("do/purge-mailbox", {"name": "full"})
    assert "Done: 5 messages of full purged." in page.words
    assert client.mailbox_info("full").messages == 0
    # The note was for one page.
    assert "Done:" not in root.get("mailbox", name="full").words


def test_dead_letters_go_back_into_the_queue(root: Browser, client: SyncClient) -> None:
    page = root.get("service", name="up")
    start = page.text.index('name="number" value="') + len('name="number" value="')
    number = page.text[start : page.text.index('"', start)]
    page = root.post("do/requeue", {"name": "up", "which": "marked"})
    assert "Not done: mark the ones to put back" in page.words
    page = root.post("do/requeue", {"name": "up", "which": "marked", "number": ["x"]})
    assert "Not done: A number is a number from" in page.words
    page = root.post("do/requeue", {"name": "up", "which": "marked", "number": [number, "99999"]})
    assert "Done: 1 request back in the queue of up; 1 of those marked stay" in page.words
    page = root.post("do/requeue", {"name": "up", "which": "all"})
    assert "Done: 2 requests back" in page.words
    assert client.service_info("up").dead == 0


@pytest.mark.moderate
def test_dead_letters_of_a_group_come_again(root: Browser, client: SyncClient) -> None:
    client.publish_many("poison", [b"bad %d" % number for number in range(2)])
    with client.group("poison", "pack", ack="manual", settings={"attempts_max": 1}) as member:
        held = member.next_batch(10_000)
        assert held is not None
        member.nack(held)
        until(lambda: client.group_info("poison", "pack").dead == 2)
        page = root.get("group", stream="poison", name="pack")
        assert "Dead letters 2" in page.words
        assert "bad 1" in page.words
        until(lambda: "group poison / pack : 2 dead letters" in root.get().words)
        # The mailbox of the settings is another one by now; the letters lie where they lay.
        client.edit_group("poison", "pack", dead_letters="elsewhere")
        page = root.get("group", stream="poison", name="pack")
        assert "bad 1" in page.words
        assert "mailbox poison.pack.dead" in page.words
        assert "mailbox elsewhere" not in page.words
        fields = {"stream": "poison", "name": "pack"}
        page = root.post("do/requeue-group", {**fields, "which": "marked"})
        assert "Not done: mark the ones to put back" in page.words
        page = root.post("do/requeue-group", {**fields, "which": "all"})
        assert "Done: 2 records of poison again for pack." in page.words
        assert client.group_info("poison", "pack").dead == 0


@pytest.mark.parametrize(("point", "offset"), [("7", 7), ("earliest", 0), ("latest", 100)])
def test_a_cursor_moves_where_it_is_told(
    root: Browser, client: SyncClient, point: str, offset: int
) -> None:
    page = root.post("do/reset-cursor", {"stream": "open.trades", "name": "reader", "point": point})
    assert f"stands at {offset};" in page.words
    assert client.cursor_info("open.trades", "reader").next == offset


def test_a_cursor_stays_where_the_place_cannot_be_read(root: Browser) -> None:
    page = root.post("do/reset-cursor", {"stream": "open.trades", "name": "reader", "point": "?"})
    assert "Not done: “?” is no place in a stream" in page.words


def test_a_group_without_members_is_forgotten(root: Browser, client: SyncClient) -> None:
    with client.group("open.trades", "gone") as member:
        member.accepted()
    until(lambda: not client.group_info("open.trades", "gone").members)
    page = root.post("do/remove-group", {"stream": "open.trades", "name": "gone"})
    assert "Done: Group gone of open.trades is forgotten" in page.words


def test_a_group_stands_where_it_is_told_and_with_members_only_when_that_is_marked(
    root: Browser, client: SyncClient
) -> None:
    fields = {"stream": "open.trades", "name": "resettled"}
    with client.group("open.trades", "resettled") as member:
        member.accepted()
        page = root.post("do/reset-group", {**fields, "point": "7"})
        assert "Not done: in_use" in page.words
        page = root.post("do/reset-group", {**fields, "point": "7", "force": "yes"})
        assert "Done: Group resettled of open.trades stands at 7; it stood at 0." in page.words
    assert client.group_info("open.trades", "resettled").next == 7
    assert "is no place" in root.post("do/reset-group", {**fields, "point": "?"}).words


def test_requests_of_a_service_are_shown_with_who_asked_and_who_has_them(
    root: Browser, client: SyncClient
) -> None:
    client.submit("sights", b"1", subject="first.job")
    client.submit("sights", b"2", subject="second.job")
    with client.worker("sights", concurrency=1) as worker:
        held = worker.next()
        assert held is not None
        words = root.get("service", name="sights").words
        assert "first.job" in words
        assert "has it for" in words
        assert "second.job waits 0" in words
        held.reply(b"")
    until(lambda: "first.job" not in root.get("service", name="sights").words)


def test_subjects_are_purged_before_a_place(root: Browser, client: SyncClient) -> None:
    for subject in ("a.x", "b.y", "a.z", "a.x"):
        client.publish("soiled", b"x", subject=subject)
    assert "say which subjects" in root.post("do/purge", {"name": "soiled", "pattern": " "}).words
    page = root.post("do/purge", {"name": "soiled", "pattern": "a.*", "before": "3"})
    assert "Done: Records of soiled that match a.* before offset 3 are gone." in page.words
    left = client.subscribe("soiled", start="earliest", until="tail")
    assert [record.offset for record in left] == [1, 3]


def test_a_client_shows_its_credit_and_how_far_it_is_behind(
    root: Browser, client: SyncClient, broker: EmbeddedBroker
) -> None:
    for _ in range(5):
        client.publish("followed", b"x")
    credential = Plain("root", PASSWORDS["root"])
    with (
        connect_sync(broker.tcp_endpoint, credential=credential, software="reader 1.0") as reading,
        reading.subscribe(
            "followed", start="earliest", credit_records=2, credit_bytes=1 << 20
        ) as subscription,
    ):
        assert subscription.accepted().next == 0

        def told() -> bool:
            row = root.get("clients").words.partition("reader 1.0")[2].partition("Disconnect")[0]
            return "1 (0 live, 1 without credit) 3" in row

        until(told)


def test_a_client_is_disconnected(
    root: Browser, broker: EmbeddedBroker, client: SyncClient
) -> None:
    with connect_sync(
        broker.tcp_endpoint, credential=Plain("root", PASSWORDS["root"]), software="victim"
    ) as victim:
        assert "victim" in root.get("clients").words
        (link,) = (each.link for each in client.list_links() if each.software == "victim")
        page = root.post("do/kick", {"link": link, "reason": "maintenance"})
        assert f"Done: Link {link} was ended" in page.words
        until(lambda: not victim.linked)
    page = root.post("do/kick", {"link": link})
    assert "Not done: unknown_link" in page.words


def test_a_range_is_copied_into_another_stream(root: Browser, client: SyncClient) -> None:
    client.publish("source", b"one", subject="a.x", fields={"k": "v"})
    client.publish_many("source", [b"%d" % number for number in range(500)], subject="b")
    root.get()
    fields = {"name": "source", "to": "target", "from": "0", "until": "101", "pattern": ""}
    page = root.post("do/copy", fields)
    assert "Begun: Copying source into target" in page.words
    told = "101 records copied into target, 101 of them confirmed"
    until(lambda: told in root.get("stream", name="source").words)
    assert client.stream_info("target").records == 101
    copied = next(iter(client.subscribe("target", start="earliest", until="tail")))
    assert (copied.subject, copied.fields, copied.body) == ("a.x", {"k": "v"}, b"one")


@pytest.mark.parametrize(("before", "first"), [("3", 3), ("earliest", 3), ("latest", 10)])
def test_a_trim_removes_the_records_before_a_place(
    root: Browser, client: SyncClient, before: str, first: int
) -> None:
    if "trimmed" not in [each.name for each in client.list_streams()]:
        client.publish_many("trimmed", [b"x"] * 10)
    was = client.stream_info("trimmed").first
    root.get()
    page = root.post("do/trim", {"name": "trimmed", "before": before})
    assert f"of trimmed before offset {max(first, was)} removed for good" in page.words
    assert client.stream_info("trimmed").first == first


@pytest.mark.parametrize("before", ["11000", "?", ""])
def test_a_trim_of_what_is_not_there_removes_nothing(
    root: Browser, client: SyncClient, before: str
) -> None:
    client.publish("source", b"x")
    first = client.stream_info("source").first
    root.get()
    assert "Not done" in root.post("do/trim", {"name": "source", "before": before}).words
    assert client.stream_info("source").first == first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"to": ""}, "name the stream to copy into"),
        ({"to": "source"}, "is the stream itself"),
        ({"to": "bad name!"}, "Not done: the stream to copy into: 'bad name!'"),
        ({"to": "x", "from": "soon"}, "is no place in a stream"),
        ({"to": "x", "name": "nothing"}, "unknown_stream"),
        ({"to": "x", "from": "4", "until": "2"}, "source has no record from 4 until 2"),
        ({"to": "x", "from": "latest"}, "source has no record from latest until latest"),
        ({"to": "x", "from": "2100-01-01"}, "source has no record from 2100-01-01 until latest"),
        ({"to": "x", "until": "now-9d"}, "source has no record from earliest until now-9d"),
    ],
)
def test_a_copy_that_has_no_sense_is_refused(
    root: Browser, client: SyncClient, fields: dict[str, object], words: str
) -> None:
    client.publish("source", b"x")
    root.get()
    assert words in root.post("do/copy", {"name": "source", **fields}).words


# --- permissions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("mailbox", {"name": "box"}),
        ("service", {"name": "up"}),
        ("group", {"stream": "closed", "name": "crew"}),
        ("cursor", {"stream": "closed", "name": "reader"}),
        ("clients", {}),
        ("users", {}),
    ],
)
def test_what_a_person_may_not_see_is_not_shown(
    reader: Browser, client: SyncClient, path: str, query: dict[str, object]
) -> None:
    page = reader.get(path, **query)
    assert page.status in (403, 404)
    assert "Not shown" in page.words


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("trim", {"name": "open.trades", "before": "latest"}),
        ("purge-mailbox", {"name": "box"}),
        ("requeue", {"name": "up", "which": "all"}),
        ("requeue-group", {"stream": "closed", "name": "crew", "which": "all"}),
        ("reset-cursor", {"stream": "closed", "name": "reader", "point": "0"}),
        ("remove-group", {"stream": "closed", "name": "crew"}),
        ("reset-group", {"stream": "open.trades", "name": "crew", "point": "0", "force": "yes"}),
        ("purge", {"name": "open.trades", "pattern": "#"}),
        ("publish", {"name": "open.trades", "body": "x"}),
        ("create-stream", {"name": "open.other"}),
        ("edit-stream", {"name": "open.trades", "max_records": "1"}),
        ("kick", {"link": 1}),
        ("copy", {"name": "closed", "to": "open.copy"}),
    ],
)
def test_what_a_person_may_not_do_is_not_done(
    reader: Browser, client: SyncClient, action: str, fields: dict[str, object]
) -> None:
    reader.get()
    page = reader.post(f"do/{action}", fields)
    assert page.status in (200, 403, 404)
    # A page that may not be shown does not tell what became of the change; the next one does.
    words = page.words if "Not done" in page.words else reader.get().words
    assert "Not done" in words
    assert "forbidden" in words or "unknown_" in words
    assert client.mailbox_info("box").messages == 61


@pytest.mark.parametrize(("to", "verb"), [("open.copy", "write"), ("open.kept.new", "create")])
def test_a_copy_into_what_a_person_may_not_write_or_make_is_refused_by_name(
    enter: Callable[[str], Browser], client: SyncClient, to: str, verb: str
) -> None:
    client.publish("open.trades", b"x")
    copier = enter("copier")
    words = copier.post("do/copy", {"name": "open.trades", "to": to}).words
    assert f"Not done: a copy into {to} takes the permission {verb} on {to}" in words
    assert "Begun" not in words
    assert to not in [each.name for each in client.list_streams()]


@pytest.mark.moderate
def test_a_copy_under_a_subject_that_a_person_may_not_write_ends_early(
    enter: Callable[[str], Browser], client: SyncClient
) -> None:
    client.publish("open.trades", b"x", subject="other")
    client.create_stream("open.narrow")
    copier = enter("copier")
    copier.post("do/copy", {"name": "open.trades", "to": "open.narrow"})
    until(lambda: "Ended early" in copier.get("stream", name="open.trades").words)
    assert "forbidden" in copier.get("stream", name="open.trades").words
    assert client.stream_info("open.narrow").records == 0


@pytest.mark.moderate
def test_every_change_needs_the_token(
    root: Browser, enter: Callable[[str], Browser], client: SyncClient
) -> None:
    other = enter("root")
    other.get()
    root.get()
    for token in ("", other.csrf):
        page = root.post("do/purge-mailbox", {"name": "box", "csrf": token})
        assert page.status == 403
    assert root.ask("/console/do/purge-mailbox?name=box").status == 405
    assert client.mailbox_info("box").messages == 61
