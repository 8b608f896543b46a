"""The Spark program of the cookbook computes what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.examples.running import example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]


def test_the_pipeline_has_the_mean_of_each_sensor_and_minute(
    spark: SparkSession, endpoint: str
) -> None:
    module = example("spark_pipeline")
    module.publish(endpoint, minutes=3)
    expected = {
        (f"sensor.{name}", minute): 29.5 for name in ("north", "south") for minute in range(3)
    }
    assert module.means(spark, endpoint) == expected
