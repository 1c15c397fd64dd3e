"""What `deploy/` says agrees with the server: its options, its paths, its times."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.replica_registry import ReplicaRegistry
from twostroke.fleet.router.state import fleet_state
from twostroke.server.http.model_names import ModelNames
from twostroke.server.observability.health import HealthReports

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def documents(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return the documents of a kind in a file of Kubernetes, by name."""
    every = yaml.safe_load_all((DEPLOY / name).read_text())
    return {
        document["metadata"]["name"]: document for document in every if document["kind"] == kind
    }


def pods() -> dict[str, dict[str, Any]]:
    return {
        f"{file} {name}": document["spec"]["template"]["spec"]
        for file in ("kubernetes.yaml", "fleet.kubernetes.yaml", "fleet-several.kubernetes.yaml")
        for name, document in documents(file, "Deployment").items()
    }


def compose(name: str) -> dict[str, Any]:
    text = (DEPLOY / name).read_text().replace("!override", "")  # a word of Compose
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def commands() -> dict[str, list[str]]:
    """Return every command of `twostroke` in the files, by where it stands."""
    results = {
        f"{file} {name}": service["command"]
        for file in ("compose.yaml", "fleet.compose.yaml", "fleet-several.compose.yaml")
        for name, service in compose(file).items()
        if name != "redis"
    }
    for where, pod in pods().items():
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            results[f"{where} {container['name']}"] = container["args"]
    image = (DEPLOY / "Dockerfile").read_text()
    results["image"] = yaml.safe_load(re.search(r"^CMD (\[.*\])$", image, re.MULTILINE)[1])  # type: ignore[index]
    for key in ("ExecStartPre", "ExecStart"):
        [line] = re.findall(rf"^{key}=(.*)$", unit(), re.MULTILINE)
        results[f"systemd {key}"] = shlex.split(line.replace("$OPTIONS", ""))[1:]
    return results


def unit() -> str:
    return (DEPLOY / "twostroke.service").read_text()


@pytest.mark.parametrize("where", commands())
def test_commands_and_their_options_are_known(where: str) -> None:
    name, *arguments = commands()[where]
    command = importlib.import_module(f"twostroke.cli.{name}").command
    params = command.make_context(name, arguments).params
    assert params.get("model") or params.get("models") or params.get("discover")


@pytest.mark.parametrize("where", pods())
def test_probes_ask_paths_that_are_served(where: str) -> None:
    paths = HealthReports(None, ModelNames(("",)), lambda: False, None).routes()  # type: ignore[arg-type]
    [container] = pods()[where]["containers"]
    body = {name: container[name]["httpGet"]["path"] for name in PROBES if name in container}
    assert set(body.values()) <= paths.keys()
    assert body["livenessProbe"] == "/health/live"
    assert body["readinessProbe"] == "/health/ready"


@pytest.mark.parametrize("where", pods())
def test_a_pod_may_drain(where: str) -> None:
    [container] = pods()[where]["containers"]
    [drain] = [int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--drain=")]
    assert drain < pods()[where]["terminationGracePeriodSeconds"]


def test_routers_find_their_replicas() -> None:
    services = compose("fleet.compose.yaml")
    assert "--discover=serve:8000" in services["route"]["command"]
    keys = [services[name]["environment"]["TWOSTROKE_REPLICA_KEY"] for name in ("serve", "route")]
    assert keys[0] == keys[1]
    file = "fleet.kubernetes.yaml"
    headless = documents(file, "Service")["twostroke-replicas"]["spec"]
    assert headless["clusterIP"] == "None"
    replica = documents(file, "Deployment")["twostroke-replica"]["spec"]["template"]
    assert headless["selector"] == replica["metadata"]["labels"]
    [router] = pods()[f"{file} twostroke-router"]["containers"]
    assert "--discover=twostroke-replicas:8000" in router["args"]


def test_the_router_of_servers_that_scale_to_zero_waits_for_them() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    file, scaling = kustomization["resources"]
    deployments, services = documents(file, "Deployment"), documents(file, "Service")
    for entry in kustomization["patches"]:
        kind, name = entry["target"]["kind"], entry["target"]["name"]
        document = {"Deployment": deployments, "Service": services}[kind][name]
        for patch in yaml.safe_load(entry["patch"]):
            *parents, last = patch["path"].strip("/").split("/")
            place: Any = document
            for key in parents:
                place = place[int(key)] if isinstance(place, list) else place[key]
            if patch["op"] == "add" and last == "-":
                place.append(patch["value"])
            elif patch["op"] == "add":
                place[last] = patch["value"]
            else:
                assert patch["op"] == "remove"
                del place[last]
    [router] = deployments["twostroke-router"]["spec"]["template"]["spec"]["containers"]
    name, *arguments = router["args"]
    command = importlib.import_module(f"twostroke.cli.{name}").command
    params = command.make_context(name, arguments).params
    [serve] = deployments["twostroke-replica"]["spec"]["template"]["spec"]["containers"]
    assert params["startable_models"] == (serve["args"][1],)
    assert "replicas" not in deployments["twostroke-replica"]["spec"], "the autoscaler sets it"
    [scaled] = documents(scaling, "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] in deployments
    assert scaled["spec"]["minReplicaCount"] == 0
    [trigger] = scaled["spec"]["triggers"]
    fleet = ReplicaRegistry(RouteOptions(discover="x:1"))
    location = trigger["metadata"]["valueLocation"]
    assert isinstance(fleet_state(fleet)[location], int)
    url = urlsplit(trigger["metadata"]["url"])
    service = services[url.hostname or ""]["spec"]
    assert services["twostroke-replicas"]["spec"]["publishNotReadyAddresses"] is True
    assert service["ports"][0]["port"] == url.port
    [secret] = documents(scaling, "TriggerAuthentication").values()
    assert secret["metadata"]["name"] == trigger["authenticationRef"]["name"]
    [key] = secret["spec"]["secretTargetRef"]
    references = [each["valueFrom"]["secretKeyRef"] for each in router["env"]]
    assert {"name": key["name"], "key": key["key"]} in references


def test_several_routers_share_a_store_that_keeps_what_it_has_acknowledged() -> None:
    services = compose("fleet-several.compose.yaml")
    assert "--store=redis://redis:6379" in services["route"]["command"]
    file = "fleet-several.kubernetes.yaml"
    [router] = pods()[f"{file} twostroke-router"]["containers"]
    assert "--store=redis://twostroke-redis:6379" in router["args"]
    assert documents(file, "Deployment")["twostroke-router"]["spec"]["replicas"] > 1
    stateful_set = documents(file, "StatefulSet")["twostroke-redis"]["spec"]["template"]["spec"]
    for command in (services["redis"]["command"], stateful_set["containers"][0]["command"]):
        assert "--appendonly yes --appendfsync always" in command[-1]
        assert "--maxmemory-policy noeviction" in command[-1]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "twostroke.service"
    path.write_text(unit().replace("/opt/twostroke/bin/twostroke", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "twostroke" not in done.stderr
