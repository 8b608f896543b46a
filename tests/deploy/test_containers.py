"""Container image, compose file and chart in deploy/, as their own tools read them.

hadolint, the schemas of compose and Kubernetes and Helm's own code come with `make setup`; a test
is skipped where its tool is missing. No test runs a container: it would need an image of a
registry.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from malamute_py.config import Config, load
from malamute_py.server.sockets import check_public, parse_endpoint
from tests.house.checkout import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = DEPLOY / "container"
COMPOSE = DEPLOY / "compose" / "compose.yml"
CHART = DEPLOY / "kubernetes" / "malamute"
STOP_S = (Config().loop.drain_ms + Config().checkpoint.stop_ms) / 1_000
BESIDE_PYTHON = Path(sys.executable).parent


def tool(name: str, *words: str) -> None:
    found = shutil.which(name, path=f"{BESIDE_PYTHON}:/usr/local/bin:/usr/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([found, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rendered(**values: Any) -> dict[str, dict[str, Any]]:
    """Return kind -> object that Helm makes of the chart."""
    helm = pytest.importorskip("helm_python.chart")
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="prod")
    objects = [yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")]
    return {each["kind"]: each for each in objects if each}


def check_config(path: Path) -> Config:
    """Fail unless the file configures a broker that may listen to other machines."""
    config = load(path)
    check_public([parse_endpoint(text) for text in config.listen], config)
    assert config.authentication.mechanism == "curve"
    assert config.http.token_file
    return config


@pytest.mark.moderate
def test_the_containerfile_is_sound() -> None:
    tool("hadolint", str(IMAGE / "Containerfile"))


def test_the_image_is_not_run_by_root_and_its_last_stage_has_no_installer() -> None:
    text = (IMAGE / "Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert "USER 10001:10001" in last
    assert "pip install" not in last
    assert 'ENTRYPOINT ["malamute"]' in last, "signals reach the broker itself"


def test_the_configurations_of_containers_are_good(tmp_path: Path) -> None:
    config = check_config(IMAGE / "malamute.toml")
    assert config.data_directory.startswith("/var/lib/malamute/")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (tmp_path / "chart.toml").write_text(values["config"])
    assert check_config(tmp_path / "chart.toml") == config


@pytest.mark.slow
def test_the_compose_file_fits_its_schema() -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))


def test_compose_mounts_files_that_the_kit_has_and_stops_in_time() -> None:
    from malamute_py.cli.deploying import contents

    files = contents("compose")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert volume[2:].split(":")[0] in files
    assert int(services["broker"]["stop_grace_period"].removesuffix("s")) > STOP_S
    paths = re.findall(r"/keys/([\w.-]+)", files["malamute.toml"].decode())
    made = services["keys"]["command"][0]
    assert all(path in made for path in paths)


@pytest.mark.slow
def test_the_chart_renders_to_what_kubernetes_knows(tmp_path: Path) -> None:
    objects = rendered()
    kinds = {"StatefulSet", "ConfigMap", "Service", "PodDisruptionBudget"}
    assert objects.keys() == kinds
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects.values()))
    tool("kubernetes-validate", "--strict", str(file))
    helm = pytest.importorskip("helm_python.chart")
    told = helm.lint(CHART)
    assert not told["errors"]
    assert {message["error"] for message in told["messages"]} <= {"icon is recommended"}


@pytest.mark.moderate
def test_a_pod_stops_in_time_and_may_do_little_else_than_serve() -> None:
    objects = rendered(image={"repository": "registry.example/malamute", "tag": "1"})
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > STOP_S
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/malamute:1"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    paths = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert paths == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    # Files of a Secret are root's and its group's: read_guarded() takes these modes.
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert secret["defaultMode"] == 0o440


@pytest.mark.moderate
def test_a_change_of_the_configuration_restarts_the_pod_and_labels_stay() -> None:
    before, after = rendered(), rendered(config='data_directory = "/var/lib/malamute/data"\n')
    old, new = (each["StatefulSet"]["spec"]["template"]["metadata"] for each in (before, after))
    assert old["annotations"] != new["annotations"]
    assert old["labels"] == new["labels"]
    assert before["Service"]["spec"]["selector"] == old["labels"]
    budget = before["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"] == old["labels"]


def test_the_log_s_rotation_is_understood(tmp_path: Path) -> None:
    if shutil.which("logrotate") is None:
        pytest.skip("logrotate is not installed")
    log = tmp_path / "broker.log"
    log.write_text(json.dumps({"event": "listening"}) + "\n")
    with log.open("a") as writing:
        text = (DEPLOY / "logrotate" / "malamute").read_text()
        rules = tmp_path / "rules"
        rules.write_text(text.replace("/var/log/malamute/*.log", str(log)))
        rules.chmod(0o600)
        subprocess.run(
            ["logrotate", "--force", "--state", tmp_path / "state", rules],
            check=True,
            capture_output=True,
        )
        writing.write("after\n")
    assert log.read_text() == "after\n", "a broker that goes on writing writes to the new beginning"
    assert "listening" in (tmp_path / "broker.log.1").read_text()
