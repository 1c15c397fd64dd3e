"""What `deploy/` says agrees with the server: its options, its paths, its times."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from twostroke.serve.health import HealthReports

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def kubernetes() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    return kubernetes()["Deployment"]["spec"]["template"]["spec"]


def commands() -> dict[str, list[str]]:
    """Return every command of `twostroke` in the files, by where it stands."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    [container], [before] = pod()["containers"], pod()["initContainers"]
    found = {f"compose {name}": service["command"] for name, service in compose.items()}
    found |= {"kubernetes": container["args"], "kubernetes init": before["args"]}
    image = (DEPLOY / "Dockerfile").read_text()
    found["image"] = yaml.safe_load(re.search(r"^CMD (\[.*\])$", image, re.MULTILINE)[1])  # type: ignore[index]
    for key in ("ExecStartPre", "ExecStart"):
        [line] = re.findall(rf"^{key}=(.*)$", unit(), re.MULTILINE)
        found[f"systemd {key}"] = shlex.split(line.replace("$OPTIONS", ""))[1:]
    return found


def unit() -> str:
    return (DEPLOY / "twostroke.service").read_text()


@pytest.mark.parametrize("where", commands())
def test_commands_and_their_options_are_known(where: str) -> None:
    name, *given = commands()[where]
    command = importlib.import_module(f"twostroke.cli.{name}").command
    params = command.make_context(name, given).params
    assert params.get("model") or params.get("models")


def test_probes_ask_paths_that_are_served() -> None:
    paths = HealthReports(None, [""], lambda: False).routes()  # type: ignore[arg-type]
    [container] = pod()["containers"]
    asked = {probe: container[probe]["httpGet"]["path"] for probe in PROBES}
    assert set(asked.values()) <= paths.keys()
    assert asked["livenessProbe"] == "/health/live"
    assert asked["readinessProbe"] == "/health/ready"


def test_a_pod_may_drain() -> None:
    [container] = pod()["containers"]
    [drain] = [int(one.split("=")[1]) for one in container["args"] if one.startswith("--drain=")]
    assert drain < pod()["terminationGracePeriodSeconds"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "twostroke.service"
    path.write_text(unit().replace("/opt/twostroke/bin/twostroke", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "twostroke" not in done.stderr
