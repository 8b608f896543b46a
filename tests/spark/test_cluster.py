"""A Spark standalone cluster: the connector comes in a zip, and every record once over deaths."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pyspark
import pytest

from malamute_py.client.sync.client import SyncClient, connect_sync
from malamute_py.demo.daemon import Daemon
from pyspark_malamute.shipping import build_zip
from tests.house.checkout import ROOT
from tests.spark import cluster_job
from tests.spark.cluster import WAIT_S, Cluster, killed
from tests.spark.killed_copy import copied, faults, publish

ROWS = 100_000
PAGE = ROOT / "docs" / "guides" / "spark-cluster.md"
COUNTING = """\
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
read = spark.read.format("malamute").options(endpoint=sys.argv[1], stream="s", splitBytes="1m")
print("counted", read.load().selectExpr("length(body) as n").groupBy().sum("n").first()[0])
"""
SPECULATING = """\
import sys, time
from pyspark import TaskContext
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.config("spark.speculation", "true")
    .config("spark.speculation.multiplier", "1.0").config("spark.speculation.quantile", "0.25")
    .config("spark.speculation.interval", "100ms")
    .config("spark.speculation.minTaskRuntime", "100ms")
    .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2000").getOrCreate()
)
endpoint, seen = sys.argv[1:]
def slowly(batches):
    context = TaskContext.get()
    with open(seen, "a") as attempts:
        attempts.write(f"{context.partitionId()} {context.attemptNumber()}\\n")
    for batch in batches:
        if context.partitionId() == 0:
            time.sleep(1)
        yield batch
# Executors and their Python start here, so that no task of the next job takes long for that.
spark.range(0, 400, 1, 8).mapInArrow(lambda batches: batches, "id bigint").count()
rows = spark.range(0, 100_000, 1, 4).selectExpr("lpad(cast(id as string), 100, ' ') body")
slow = rows.mapInArrow(slowly, "body string").write.format("malamute").mode("append")
slow.options(endpoint=endpoint, stream="s", chunkBytes="64k").save()
print("written")
"""
"""A job of four tasks, one of which is so slow that Spark runs it a second time beside itself."""


@pytest.mark.moderate
def test_the_zip_has_the_sources_of_the_three_packages_and_the_same_bytes_each_time(
    tmp_path: Path,
) -> None:
    files = [tmp_path / "one.zip", tmp_path / "two.zip"]
    counts = [build_zip(file) for file in files]
    names = zipfile.ZipFile(files[0]).namelist()
    assert counts == [len(names)] * 2
    assert {"pyspark_malamute/source.py", "malamute_py/client/sync/client.py",
            "malamute_protocol/batch.py"} <= {*names}  # fmt: skip
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_executor_broker_and_driver_are_killed_and_each_record_is_copied_once(
    tmp_path: Path,
) -> None:
    zipped = tmp_path / "malamute.zip"
    build_zip(zipped)

    def until(client: SyncClient, count: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while copied(client, "s") < count:
            assert time.monotonic() < deadline_s, cluster.log("driver")[-3000:]
            time.sleep(0.02)

    with (
        Daemon(tmp_path / "broker") as broker,
        connect_sync(broker.endpoint) as client,
        Cluster(tmp_path / "cluster") as cluster,
    ):
        publish(client, "s", ROWS)
        job = (cluster_job.__file__, broker.endpoint, "s", str(tmp_path / "query"))
        with cluster.running(zipped, *job) as driver:
            until(client, ROWS // 10)
            cluster.kill_an_executor()
            until(client, ROWS * 3 // 10)
            broker.kill()
            broker.start()
            client.opened(timeout_ms=60_000)
            until(client, ROWS * 5 // 10)
            killed(driver)
        with cluster.running(zipped, *job):
            until(client, ROWS)
        assert not faults(client, "s", ROWS)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_the_commands_of_the_guide_ship_the_connector(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (each for each in blocks if "malamute spark package" in each)
    (tmp_path / "job.py").write_text(COUNTING)
    with (
        Daemon(tmp_path / "broker") as broker,
        connect_sync(broker.endpoint) as client,
        Cluster(tmp_path / "cluster") as cluster,
    ):
        client.publish_many("s", [b"7 bytes"] * 300)
        words = block.replace("spark://host:7077", cluster.url)
        words = words.replace("job.py", f"job.py {broker.endpoint}")
        given = cluster.environment()
        programs = (Path(sys.executable).parent, Path(pyspark.__file__).parent / "bin")
        given["PATH"] = ":".join([*map(str, programs), given["PATH"]])
        done = subprocess.run(
            ["bash", "-ec", words], cwd=tmp_path, env=given, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert "counted 2100" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_speculative_attempts_publish_each_row_once(tmp_path: Path) -> None:
    zipped, job, seen = (tmp_path / name for name in ("malamute.zip", "job.py", "attempts"))
    build_zip(zipped)
    job.write_text(SPECULATING)
    with (
        Daemon(tmp_path / "broker") as broker,
        connect_sync(broker.endpoint) as client,
        Cluster(tmp_path / "cluster") as cluster,
    ):
        # Spark runs no second attempt on a host that has the first.
        cluster.add_worker("127.0.0.2")
        with cluster.running(zipped, str(job), broker.endpoint, str(seen)) as driver:
            driver.wait(WAIT_S)
            assert "written" in cluster.log("driver"), cluster.log("driver")[-3000:]
        with client.subscribe("s", start="earliest", until="tail") as reading:
            found = [int(body) for batch in reading.batches() for body in batch.bodies()]
    assert "0 1" in seen.read_text().splitlines()
    assert sorted(found) == [*range(100_000)]
