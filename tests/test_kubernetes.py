"""deploy/kubernetes: what a cluster is told is true of the code, shut, and stops nothing that is under way."""

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from madeira import metrics, settings
from madeira.cli import main
from madeira.routing.fields import MAX_TIMEOUT_S

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = (FOLDER, FOLDER / "migrate")


def named(folder: Path) -> list[dict[str, Any]]:
    """The objects of the files that a kustomization names."""
    files = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [found for file in files for found in yaml.safe_load_all((folder / file).read_text())]


OBJECTS = {f"{o['kind']}/{o['metadata']['name']}": o for folder in KUSTOMIZATIONS for o in named(folder)}
PODS = {name: o["spec"]["template"] for name, o in OBJECTS.items() if o["kind"] in ("Deployment", "Job")}


def container(name: str) -> dict[str, Any]:
    (found,) = PODS[name]["spec"]["containers"]
    return dict(found)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl, which has kustomize")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=["all", "migrate"])
def test_kustomize_builds_what_the_files_say(folder: Path) -> None:
    """Every object is there, in one namespace, with labels that lead services and deployments to their own pods only."""
    told = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout
    built = list(yaml.safe_load_all(told))
    assert sorted(o["kind"] for o in built) == sorted(o["kind"] for o in named(folder))
    for found in built:
        assert found["kind"] == "Namespace" or found["metadata"]["namespace"] == "madeira"
        if found["kind"] == "Deployment":
            wanted = found["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= found["spec"]["template"]["metadata"]["labels"].items()
            assert "app.kubernetes.io/component" in wanted


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_shut(name: str) -> None:
    """No root, no writable root filesystem, no capability, no token of the cluster, and no variables made of services' names."""
    pod, found = PODS[name]["spec"], container(name)
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (user,) = re.findall(r"^USER (\d+):", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert found["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert found["resources"]["requests"]["memory"]


@pytest.mark.parametrize("name", PODS)
def test_commands_are_those_of_the_image(name: str) -> None:
    """Behind its init, by programs that it has."""
    found = container(name)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", dockerfile, re.MULTILINE)
    assert found["command"] == [word.strip(' "') for word in entry.split(",")]
    program, *arguments = found["args"]
    assert program in ("madeira", "gunicorn", "dramatiq", "periodiq")
    if program == "madeira":
        assert arguments[0] in main.commands
    assert all((ROOT / word).is_file() for word in arguments if word.startswith("deploy/"))


def test_ports_and_settings_are_those_of_the_code() -> None:
    """Probes and scrapes go where something listens."""
    known = {settings.environment_name(f) for f in fields(settings.Settings)}
    assert set(OBJECTS["ConfigMap/madeira-settings"]["data"]) <= known
    defaults = settings.load({})
    ports = {"api": defaults.port, "worker": defaults.metrics_port, "scheduler": defaults.scheduler_metrics_port}
    for part, port in ports.items():
        name = f"Deployment/madeira-{part}"
        (listed,) = container(name)["ports"]
        assert listed["containerPort"] == port
        assert PODS[name]["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    routes = [container("Deployment/madeira-api")[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
    assert routes == ["/healthz", "/readyz"]


def test_a_worker_is_given_longer_to_stop_than_any_call_may_take() -> None:
    """The cluster waits longer than Dramatiq, and that longer than the longest timeout of an endpoint."""
    args = container("Deployment/madeira-worker")["args"]
    patience_s = int(args[args.index("--worker-shutdown-timeout") + 1]) / 1000
    assert MAX_TIMEOUT_S < patience_s < PODS["Deployment/madeira-worker"]["spec"]["terminationGracePeriodSeconds"]


def test_the_autoscaler_goes_by_the_age_of_what_waits() -> None:
    """By a metric that there is, of a label that it has; and nobody else says how many there are."""
    scaler = OBJECTS["HorizontalPodAutoscaler/madeira-worker"]["spec"]
    assert f"Deployment/{scaler['scaleTargetRef']['name']}" in OBJECTS
    assert "replicas" not in OBJECTS["Deployment/madeira-worker"]["spec"]
    (metric,) = scaler["metrics"]
    name, labels = metric["external"]["metric"]["name"], metric["external"]["metric"]["selector"]["matchLabels"]
    told = metrics.QUEUE_OLDEST_AGE.of({tuple(labels.values()): 1.0})
    (sample,) = told.samples
    assert (sample.name, sample.labels) == (name, labels)


def test_there_is_one_scheduler_and_never_no_api() -> None:
    """The one ends before the next begins; of the others one stays, whatever node is emptied."""
    scheduler = OBJECTS["Deployment/madeira-scheduler"]["spec"]
    assert (scheduler["replicas"], scheduler["strategy"]) == (1, {"type": "Recreate"})
    for part in ("api", "worker"):
        budget = OBJECTS[f"PodDisruptionBudget/madeira-{part}"]["spec"]
        assert budget["minAvailable"] == 1
        assert budget["selector"] == OBJECTS[f"Deployment/madeira-{part}"]["spec"]["selector"]
        assert OBJECTS[f"Deployment/madeira-{part}"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
