"""The examples for Kubernetes and Slurm without a cluster: stand-ins replace `kubectl`, `scontrol` and `srun`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..elastic.elastic_jobs import Elastic, worlds
from ..elastic.elastic_jobs import job as job
from ..hosts import stand_in_srun
from ..launch.conftest import launcher as launcher
from ..netns import Hosts, need_hosts
from ..waiting import until
from .sums import PROGRAM, expect_sums

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "deploy"
KUBECTL = """
import json, os, sys
words = sys.argv[1:]
here = os.environ["PODS"]
if words[:2] == ["get", "pods"]:
    assert words[2:4] == ["--selector", "app=train-worker"]
    print(open(f"{here}/pods.json").read())
else:
    assert words[:3] == ["exec", "--stdin", "--quiet"] and words[4:7] == ["--container", "worker", "--"]
    first = open(f"{here}/{words[3]}").read()
    os.execvp("nsenter", ["nsenter", "-t", first, "--pid", "--mount", "--", *words[7:]])
"""
SCONTROL = """
import os, sys
if sys.argv[1] == "requeue":
    open(f"{os.environ['NODES']}/requeued", "w").write(sys.argv[2])
else:
    assert sys.argv[1:] == ["--oneliner", "show", "node", os.environ["SLURM_JOB_NODELIST"]]
    print(open(f"{os.environ['NODES']}/nodes").read(), end="")
"""
SRUN = """
import os, sys
words = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(words):]
assert words == sys.argv[1:1 + len(words)] and "--overlap" in words
os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "1"}
os.execvp(command[0], command)
"""
ENTER = """
import os, sys
words = open(f"{os.environ['NODES']}/{sys.argv[1]}").read().split()
os.execvp(words[0], [*words, *sys.argv[2:]])
"""


def stand_in(place: Path, name: str, text: str) -> None:
    """Make a command from a Python program."""
    place.mkdir(exist_ok=True)
    path = place / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def manifest() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of the manifest, by kind and name."""
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes" / "elastic.yaml").read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def test_what_the_manifest_names_is_there() -> None:
    """Volumes, accounts and labels: every object that another one refers to exists."""
    objects = manifest()
    files = objects["ConfigMap", "train"]["data"]
    for kind, name in (("StatefulSet", "train-worker"), ("Job", "train")):
        spec = objects[kind, name]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
        assert ("ConfigMap", volumes["train"]["configMap"]["name"]) in objects
        for word in " ".join(container["command"]).split():
            if word.startswith("/train/"):
                assert word.removeprefix("/train/") in files
    workers = objects["StatefulSet", "train-worker"]["spec"]
    labels = workers["template"]["metadata"]["labels"]
    assert (
        labels == workers["selector"]["matchLabels"] == objects["Service", workers["serviceName"]]["spec"]["selector"]
    )
    assert f"app={labels['app']}" in files["hosts.py"]
    account = objects["Job", "train"]["spec"]["template"]["spec"]["serviceAccountName"]
    binding = objects["RoleBinding", "train"]
    assert ("ServiceAccount", account) in objects and binding["subjects"][0]["name"] == account
    assert ("Role", binding["roleRef"]["name"]) in objects


class Pods:
    """Pods whose first process is that of the manifest, each in a process namespace of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, text in manifest()["ConfigMap", "train"]["data"].items():
            (home / name).write_text(text)

    def start(self, *names: str) -> None:
        for name in names:
            command = [
                "unshare",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                sys.executable,
                self.home / "stay.py",
            ]
            process = self.processes[name] = subprocess.Popen(command)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            first = until(children.read_text, f"the first process of {name}").strip()
            until(lambda first=first: waits_for_sigterm(first), f"the first process of {name}")  # type: ignore[misc]
            (self.home / name).write_text(first)
        self.tell()

    def tell(self, *leaving: str) -> None:
        """Set the pods that the API lists."""
        ready = [{"type": "Ready", "status": "True"}]
        pods = [
            {"metadata": {"name": name} | ({"deletionTimestamp": "now"} if name in leaving else {}), "status": status}
            for name in self.processes
            for status in [{"conditions": ready}]
        ]
        pods.append({"metadata": {"name": "pending"}, "status": {}})
        (self.home / "draft").write_text(json.dumps({"items": pods}))
        (self.home / "draft").rename(self.home / "pods.json")


def waits_for_sigterm(pid: str) -> bool:
    """Return whether a pod's first process is ready for SIGTERM: it ignores SIGCHLD only after that."""
    with open(f"/proc/{pid}/status") as status:
        ignored = next(line for line in status if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    allowed = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"no namespaces of processes: {allowed.stderr.decode().strip()}")
    made = Pods(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_a_pod_that_is_told_to_go_lets_its_workers_leave(job: Elastic, pods: Pods) -> None:
    """The manifest's launcher finds pods by the API and starts agents by kubectl; a SIGTERM loses no step."""
    pods.start("train-worker-0", "train-worker-1")
    stand_in(pods.home / "bin", "kubectl", KUBECTL)
    (container,) = manifest()["Job", "train"]["spec"]["template"]["spec"]["containers"]
    slots = {each["name"]: each["value"] for each in container["env"]}
    path = f"{pods.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job.launcher.environment |= slots | {"PODS": str(pods.home), "PATH": path}
    words = [word.replace("python /train", f"{sys.executable} {pods.home}") for word in container["command"]]
    options = ["-np=2" if word == "-np=4" else "--min-np=1" if word == "--min-np=2" else word for word in words[1:-2]]
    process = job.start(*(word.replace("eth0", "lo") for word in options))
    job.world(1, 2)
    pods.tell("train-worker-1")
    os.kill(int((pods.home / "train-worker-1").read_text()), signal.SIGTERM)
    job.world(2, 1)
    pods.processes["train-worker-1"].wait(30)
    done = job.finish(process)
    assert done.code == 0, done.err
    assert worlds(done)[1].startswith("2: 1 rank, because host train-worker-1 leaves")


def test_the_batch_script_leaves_out_a_drained_node_and_is_requeued(job: Elastic, tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "scontrol", SCONTROL)
    stand_in(tmp_path / "bin", "srun", SRUN)
    state = "NodeName={} Arch=x86_64 State={} ThreadsPerCore=1\n"
    (tmp_path / "nodes").write_text(state.format("a", "ALLOCATED") + state.format("b", "MIXED+PLANNED"))
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    job.launcher.environment |= {"PATH": path, "NODES": str(tmp_path), "NETWORK": "lo", "SLURM_CPUS_ON_NODE": "2"}
    numbers = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job.launcher.environment |= numbers | {"SLURM_JOB_NODELIST": "[a-b]"}
    program = job.program(
        "def body(t):\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n    while True: t.step()\n"
    )
    process = job.start_command(["bash", str(EXAMPLES / "slurm" / "elastic.sbatch"), str(program)])
    job.world(1, 2)
    (tmp_path / "draft").write_text(state.format("a", "ALLOCATED") + state.format("b", "ALLOCATED+DRAIN"))
    (tmp_path / "draft").rename(tmp_path / "nodes")
    job.world(2, 1)
    process.send_signal(signal.SIGTERM)
    done = job.wait(process)
    assert done.code == 128 + signal.SIGTERM, done.err
    assert worlds(done)[1] == "2: 1 rank, because host b is not among the hosts any more"
    assert (tmp_path / "requeued").read_text() == "77"


def test_the_batch_script_starts_ranks_on_all_nodes(tmp_path: Path) -> None:
    """A stand-in for srun starts the tasks, on namespaces as nodes."""
    need_hosts()
    stand_in(tmp_path / "bin", "srun", f"import runpy; runpy.run_path({stand_in_srun.__file__!r}, run_name='__main__')")
    stand_in(tmp_path / "bin", "enter", ENTER)
    (tmp_path / "train.py").write_text(PROGRAM)
    with Hosts(2) as hosts:
        for host in range(2):
            (tmp_path / f"node{host}").write_text(" ".join([*hosts.entering(host), "env", f"--chdir={tmp_path}"]))
        path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "STAND_IN_ENTER": "enter {host}", "NODES": str(tmp_path)}
        allocation = {"JOB_NODELIST": "node0,node1", "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "3"}
        environment |= {f"SLURM_{name}": value for name, value in allocation.items()}
        environment.pop("OMP_NUM_THREADS", None)
        script = ["bash", str(EXAMPLES / "slurm" / "train.sbatch"), "train.py"]
        done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    expect_sums(done.stdout, 2, 2, threads=3)


@pytest.mark.parametrize(
    ("state", "there"),
    [("IDLE", True), ("MIXED+CLOUD", True), ("DOWN*", False), ("IDLE*", False), ("ALLOCATED+MAINTENANCE", False)],
)
def test_only_nodes_that_do_their_work_are_hosts(tmp_path: Path, state: str, there: bool) -> None:
    stand_in(tmp_path / "bin", "scontrol", SCONTROL)
    (tmp_path / "nodes").write_text(f"NodeName=n1 State={state} Weight=1\n")
    text = (EXAMPLES / "slurm" / "elastic.sbatch").read_text()
    function = text[text.index("hosts() {") : text.index("export -f hosts")]
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NODES": str(tmp_path), "SLOTS": "4"}
    environment["SLURM_JOB_NODELIST"] = "n1"
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, "-c", f"{function}\nhosts"], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("n1:4\n" if there else "", "")
