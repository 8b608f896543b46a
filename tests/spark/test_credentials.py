"""Against a broker that wants to know who reads: PLAIN and CURVE, in driver and executors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import zmq

from malamute_py.client.settings import Curve, Plain
from malamute_py.client.sync.client import connect_sync
from malamute_py.config import Authentication, Grant
from malamute_py.server.authentication.credentials import hash_password
from tests.spark.conftest import serve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

BODIES = [b"%d" % number for number in range(100)]


class Guarded(NamedTuple):
    """A broker that lets an owner write and read, a reader read, and a guest do neither."""

    endpoint: str
    reader: dict[str, str]
    """Options of the credential that may read."""
    guest: dict[str, str]
    stranger: dict[str, str]
    """Options of a credential that the broker does not know."""


def plain() -> tuple[Authentication, dict[str, Any], dict[str, dict[str, str]]]:
    names = ("owner", "reader", "guest")
    section = Authentication(
        mechanism="plain", users={name: hash_password(f"of {name}") for name in names}
    )
    options = {name: {"user": name, "password": f"of {name}"} for name in names}
    options["stranger"] = {"user": "reader", "password": "guessed"}
    return section, {"credential": Plain("owner", "of owner")}, options


def curve(key_file: Path) -> tuple[Authentication, dict[str, Any], dict[str, dict[str, str]]]:
    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    key_file.write_text(server_secret)
    key_file.chmod(0o600)
    pairs = {
        name: [key.decode() for key in zmq.curve_keypair()]
        for name in ("owner", "reader", "guest", "stranger")
    }
    section = Authentication(
        mechanism="curve", server_key_file=str(key_file),
        clients={name: public for name, (public, _) in pairs.items() if name != "stranger"},
    )  # fmt: skip
    options = {
        name: {
            "curveServerKey": server_public, "curvePublicKey": public, "curveSecretKey": secret,
        }
        for name, (public, secret) in pairs.items()
    }  # fmt: skip
    return section, {"credential": Curve(server_public, *pairs["owner"])}, options


@pytest.fixture(scope="module", params=["plain", "curve"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp(request.param)
    section, owner, options = plain() if request.param == "plain" else curve(directory / "key")
    permissions = {
        "owner": Grant(read=["*"], write=["*"], admin=True),
        "reader": Grant(read=["flights"]),
        "guest": Grant(read=["weather"]),
    }
    with serve(directory / "data", authentication=section, permissions=permissions) as server:
        endpoint = server.endpoints[0]
        with connect_sync(endpoint, **owner) as client:
            client.publish_many("flights", BODIES)
        yield Guarded(endpoint, options["reader"], options["guest"], options["stranger"])


@pytest.fixture
def reading(spark: SparkSession, guarded: Guarded) -> Callable[[dict[str, str]], DataFrame]:
    def load(credential: dict[str, str]) -> DataFrame:
        given = {"endpoint": guarded.endpoint, "stream": "flights"}
        return spark.read.format("malamute").options(**given, **credential).load()

    return load


def test_a_credential_that_may_read_reads_everything(
    reading: Callable[[dict[str, str]], DataFrame], guarded: Guarded
) -> None:
    rows = reading(guarded.reader).select("offset", "body").orderBy("offset").collect()
    assert [bytes(row.body) for row in rows] == BODIES


def test_a_streaming_query_hands_the_credential_to_its_tasks(
    spark: SparkSession, guarded: Guarded, tmp_path: Path
) -> None:
    query = (
        spark.readStream.format("malamute")
        .options(endpoint=guarded.endpoint, stream="flights", startingOffsets="earliest")
        .options(**guarded.reader)
        .load()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(180)
    rows = spark.read.parquet(str(tmp_path / "out")).select("offset").collect()
    assert sorted(row.offset for row in rows) == list(range(len(BODIES)))


def test_who_is_not_known_or_not_allowed_is_told_which_option_or_permission_to_look_at(
    reading: Callable[[dict[str, str]], DataFrame], guarded: Guarded
) -> None:
    from pyspark.errors import PySparkException

    for credential, words in (
        (guarded.stranger, "refused the credential"),
        # libzmq may end the connection before it has said which kind of credential it wants.
        ({"connectTimeoutMs": "3000"}, r"refused the credential|the handshake with .* failed"),
        (guarded.guest, "does not allow this identity"),
    ):
        with pytest.raises(PySparkException) as caught:
            reading(credential).collect()
        text = str(caught.value)
        assert re.search(words, text)
        for secret in ("password", "curveSecretKey"):
            assert credential.get(secret, "\0") not in text
