"""One Spark session and one broker for all of these tests.

Owns how both are set up. *A session takes 5 s to start and its first Python source 6 more,
so there is one; every test has a stream and a checkpoint of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from malamute_py.config import Config, LogSection
from malamute_py.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from malamute_py.client.sync.client import SyncClient

SETTINGS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Data to the workers by unix socket: 15 to 41 ms a task instead of 60 to 73.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.pollingDelay": "10ms",
    # What runs once is not worth compiling well: *21 s of processor time instead of 34 until a
    # session has done its first queries.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def start_spark(warehouse: Path) -> SparkSession:
    """A session of two cores in which a failed task is tried three times."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder: Any = SparkSession.builder
    builder = builder.master("local[2,3]").appName("malamute tests")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.config("spark.sql.warehouse.dir", str(warehouse)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session."""
    session = start_spark(tmp_path_factory.mktemp("warehouse"))
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()


def serve(directory: Path, endpoint: str = "tcp://127.0.0.1:0", **sections: Any) -> Server:
    """A broker in this process, over real sockets and files; to be started and stopped.

    sections: of its configuration.
    """
    return Server(
        Config(
            data_directory=str(directory), listen=[endpoint],
            log=LogSection(level="critical"), **sections,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a broker for all tests of a file; a test that stops a broker starts its own."""
    with serve(tmp_path_factory.mktemp("broker")) as server:
        yield server.endpoints[0]


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[SyncClient]:
    """A link to that broker, to publish with."""
    from malamute_py.client.sync.client import connect_sync

    with connect_sync(endpoint) as linked:
        yield linked


@pytest.fixture(scope="module", autouse=True)
def _no_link_is_left() -> Iterator[None]:
    """Close the links that the connector keeps in this process, at the end of each file.

    The simulator's tests may come next in it: they replace what the threads of such links call.
    """
    yield
    kept = sys.modules.get("pyspark_malamute.kept_links")
    if kept is not None:
        kept.KEPT.close()


_NUMBERS = count(1)


@pytest.fixture
def stream() -> str:
    """The name of a stream that no other test uses."""
    return f"stream-{next(_NUMBERS)}"


@pytest.fixture
def read(spark: SparkSession, endpoint: str, stream: str) -> Callable[..., DataFrame]:
    """spark.read of the test's stream, with options."""

    def load(**options: Any) -> DataFrame:
        given = {"endpoint": endpoint, "stream": stream, **options}
        return spark.read.format("malamute").options(**given).load()

    return load


@pytest.fixture
def read_stream(spark: SparkSession, endpoint: str, stream: str) -> Callable[..., DataFrame]:
    """spark.readStream of the test's stream from the earliest record on, with options."""

    def load(**options: Any) -> DataFrame:
        given = {
            "endpoint": endpoint, "stream": stream, "startingOffsets": "earliest", **options,
        }  # fmt: skip
        return spark.readStream.format("malamute").options(**given).load()

    return load
