"""Links that several users of a process share: who may close them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from malamute_protocol.errors import BrokerRefused, ConnectionLost, Timeout
from pyspark_malamute import links
from pyspark_malamute.errors import BatchChanged, DataLoss, SourceUnavailable
from pyspark_malamute.kept_links import KEPT
from pyspark_malamute.loss import fail_or_log_gone
from pyspark_malamute.option_values import LinkOptions
from pyspark_malamute.options import parse_options
from pyspark_malamute.pipelines import archiving, reading, replaying
from pyspark_malamute.pipelines.archive_log import Settings, State
from pyspark_malamute.sink_options import parse_sink_options
from pyspark_malamute.sink_task import own_link

LINK = {"endpoint": "tcp://127.0.0.1:9797", "stream": "s"}
ANN = {**LINK, "user": "ann", "password": "secret"}


class Link:
    """A link that was made before, of which others may be users, at a broker without sinks."""

    identity = "ann"
    linked = True

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def list_streams(self, prefix: str = "") -> list[str]:
        return [f"{prefix}.of.another"]

    def subscribe(self, *_: object, **__: object) -> Any:
        raise BrokerRefused("unknown_stream", "there is none")


@pytest.fixture
def kept() -> Iterator[Any]:
    """Keeps a link for options, as if the process had made it."""
    made: list[LinkOptions] = []

    def keep(options: LinkOptions) -> Link:
        link: Any = Link()
        KEPT.put(links._link_key(options), link)
        made.append(options)
        return link  # type: ignore[no-any-return]

    yield keep
    for options in made:
        links.drop(options)


def test_a_sink_leaves_the_link_of_a_credential_unless_it_failed(kept: Any) -> None:
    options = parse_sink_options(ANN, streaming=True)
    link = kept(options)
    with own_link(options, "spark-1") as own_options:
        assert own_options.identity == ""
    assert not link.closed
    with pytest.raises(BatchChanged), own_link(options, "spark-1"):
        raise BatchChanged
    assert not link.closed
    with (
        pytest.raises(SourceUnavailable),
        own_link(options, "spark-1"),
        links.explained(options, "publish"),
    ):
        raise ConnectionLost("gone")
    assert link.closed, "the next attempt makes another one"


@pytest.mark.parametrize(("cause", "linked"), [(Timeout, False), (ConnectionLost, True)])
def test_a_sink_that_failed_leaves_a_link_that_serves_others(
    kept: Any, cause: type[Exception], linked: bool
) -> None:
    """It makes itself anew after a Timeout, or was made by another after the one that was lost."""
    options = parse_sink_options(ANN, streaming=True)

    def fail() -> None:
        with own_link(options, "spark-1"), links.explained(options, "publish"):
            raise cause("gone")

    link = kept(options)
    link.linked = linked
    with links.in_use(options):
        with pytest.raises(SourceUnavailable):
            fail()
        assert not link.closed
        if cause is ConnectionLost:
            link.linked = False
            with pytest.raises(SourceUnavailable):
                fail()
            assert link.closed, "it is over"
            return
    with pytest.raises(SourceUnavailable):
        fail()
    assert link.closed, "no other user has it"


def test_a_link_that_is_over_takes_none_along_that_was_made_since(kept: Any) -> None:
    options = parse_options(ANN)
    first = kept(options)
    broker: Any = links.Broker(options)
    assert broker._opened() is first
    second = kept(options)
    broker._forget(first)
    assert first.closed
    assert not second.closed
    assert broker._opened() is second
    broker.close()
    assert second.closed


def test_a_sink_closes_the_link_of_an_identity_that_it_asked_for(kept: Any) -> None:
    options = parse_sink_options(LINK, streaming=True)
    link = kept(options.named("spark-1"))
    with own_link(options, "spark-1") as own_options:
        assert own_options.identity == "spark-1"
    assert link.closed


def test_a_replay_that_looks_how_far_it_is_leaves_the_link_of_a_credential(kept: Any) -> None:
    """Another stream of a longer name is no stream of commits either."""
    options = parse_sink_options({**ANN, "sinkId": "again"}, streaming=False)
    link = kept(options)
    run = replaying._Run(None, None, options, {}, lambda _: None)  # type: ignore[arg-type]
    assert run._done() == 0
    assert not link.closed


def test_an_archive_that_asks_for_its_streams_leaves_the_link(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse_options(ANN)
    link = kept(options)

    def find_streams(broker: links.Broker, _: object) -> dict[str, Any]:
        broker._opened()
        return {}

    state = State(0, Settings({}, "append_time", 1, ""))
    monkeypatch.setattr(reading, "find_streams", find_streams)
    monkeypatch.setattr(archiving, "find_streams", find_streams)
    folder: Any = None
    assert reading._check_seam(folder, state, options) == {}
    assert archiving._with_gaps(folder, folder, state, options, accepted=True) is state
    assert not link.closed


def test_no_records_before_the_end_of_a_range_are_no_loss_by_a_trim() -> None:
    """As of a query with availableNow that has come to its end when a trim goes beyond it."""
    options = parse_options({**LINK, "failOnDataLoss": "all"})
    fail_or_log_gone(options, 100, 100, 200, "retention")
    with pytest.raises(DataLoss, match="offsets 99 to 99 were removed by a trim"):
        fail_or_log_gone(options, 99, 100, 200, "retention")
