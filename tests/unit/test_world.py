"""Detection of a process's rank and place from the variables of each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.hub_address import HubAddress
from engine.config.world import World, detect_world
from engine.errors import ConfigError

OURS = {"ENGINE_RANK": "1", "ENGINE_SIZE": "2", "ENGINE_LOCAL_RANK": "1", "ENGINE_LOCAL_SIZE": "2", "ENGINE_JOB": "a"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.size, world.local_rank, world.local_size


@pytest.mark.parametrize(
    ("environ", "source"),
    [(OURS, "enginerun"), (TORCHRUN, "torchrun"), (OMPI, "mpirun"), (PMI, "mpiexec"), (SRUN, "srun")],
)
def test_each_launcher_is_believed(environ: dict[str, str], source: str) -> None:
    world = detect_world(environ)
    assert place(world) == (1, 2, 1, 2)
    assert world.source.startswith(source)


def test_without_a_launcher_there_is_one_rank() -> None:
    assert place(detect_world({})) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"WORLD_SIZE": "1"},
        {"RANK": "3"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_RANK": "0"},
    ],
)
def test_stray_variables_leave_a_plain_script_alone(environ: dict[str, str]) -> None:
    assert place(detect_world(environ)) == (0, 1, 0, 1)


def test_our_launcher_may_also_speak_for_torchrun() -> None:
    assert detect_world({**OURS, **TORCHRUN}).source == "enginerun"


@pytest.mark.parametrize("other", [TORCHRUN, OMPI, PMI])
def test_two_launchers_that_differ_are_refused(other: dict[str, str]) -> None:
    ours = {**OURS, "ENGINE_RANK": "0", "ENGINE_LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match=r"enginerun says rank 0 of 2, .* says rank 1 of 2"):
        detect_world({**ours, **other})


def test_one_rank_of_a_launcher_does_not_hide_the_world_of_another() -> None:
    alone = {"ENGINE_RANK": "0", "ENGINE_SIZE": "1", "ENGINE_LOCAL_RANK": "0", "ENGINE_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match="Start with one launcher"):
        detect_world({**alone, **OMPI})
    assert place(detect_world({**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "1"})) == (1, 2, 1, 2)


@pytest.mark.parametrize("complete", [OURS, TORCHRUN, OMPI, SRUN])
def test_a_launcher_that_does_not_say_who_is_on_this_host_is_passed_over(complete: dict[str, str]) -> None:
    # `srun --mpi=pmi2` sets PMI's rank and size beside Slurm's own variables, and others for processes of a step.
    assert detect_world({**complete, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5"}) == detect_world(complete)
    if complete is not SRUN:
        assert detect_world({**complete, "PMI_RANK": "0", "PMI_SIZE": "3"}) == detect_world(complete)


def test_a_launcher_that_does_not_say_who_is_on_this_host_is_an_error_when_nobody_else_does() -> None:
    with pytest.raises(ConfigError, match=r"MPI_LOCALRANKID is not set; .*MPI_LOCALNRANKS=\$PMI_SIZE"):
        detect_world({"PMI_RANK": "1", "PMI_SIZE": "2"})
    with pytest.raises(ConfigError, match="ENGINE_LOCAL_RANK is not set"):  # the engine's own must be complete
        detect_world({**OMPI, "ENGINE_RANK": "1", "ENGINE_SIZE": "2"})


def test_slurm_may_start_another_launcher() -> None:
    assert detect_world({**TORCHRUN, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).source == "torchrun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ENGINE_SIZE": ""}, "ENGINE_RANK is '1', but ENGINE_SIZE is not set"),
        ({"ENGINE_RANK": ""}, "ENGINE_SIZE is '2', but ENGINE_RANK is not set"),
        ({"ENGINE_LOCAL_SIZE": ""}, "ENGINE_LOCAL_SIZE is not set"),
        ({"ENGINE_RANK": "one"}, "ENGINE_RANK is 'one'; expected a whole number"),
        ({"ENGINE_RANK": "-1"}, "ENGINE_RANK is '-1'; expected a whole number"),
        ({"ENGINE_RANK": "2"}, "ENGINE_RANK is 2, but ENGINE_SIZE is 2; ranks count from 0"),
        ({"ENGINE_LOCAL_RANK": "2"}, "ENGINE_LOCAL_RANK is 2, but ENGINE_LOCAL_SIZE is 2"),
        ({"ENGINE_LOCAL_SIZE": "3"}, "ENGINE_LOCAL_SIZE is 3, more than ENGINE_SIZE"),
        ({"ENGINE_SIZE": "4"}, "enginerun started 4 processes, 2 of them on this host, and there is no ENGINE_SECRET"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_world({**OURS, **change})


def test_a_world_of_several_without_a_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is '2', but RANK is not set"):
        detect_world({"WORLD_SIZE": "2"})


def test_ranks_set_by_hand_on_the_loopback_need_no_local_rank() -> None:
    assert place(detect_world({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"})) == (1, 3, 1, 3)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set"):
        detect_world({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node1"})


@pytest.mark.parametrize(("text", "refused"), [("4", False), ("2(x2)", True), ("3,1", True)])
def test_slurm_says_how_many_tasks_a_machine_has(text: str, refused: bool) -> None:
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": text}
    if refused:
        with pytest.raises(ConfigError, match="on this host, and there is no ENGINE_SECRET"):
            detect_world(environ)
    else:
        assert place(detect_world(environ)) == (1, 4, 1, 4)


def test_a_restart_and_an_elastic_world_get_keys_of_their_own() -> None:
    first, again = detect_world(TORCHRUN), detect_world({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert len({first.key, replace(first, number=2).key, again.key}) == 3
    assert detect_world({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}).key == first.key


def test_the_job_may_be_named_under_any_launcher() -> None:
    assert detect_world({**PMI, "ENGINE_JOB": "mine"}).job == "ENGINE_JOB=mine"


def test_the_proof_depends_on_secret_job_and_number() -> None:
    world, other = (
        detect_world({**OURS, "ENGINE_SECRET": "a secret of tests"}),
        detect_world({**OURS, "ENGINE_SECRET": "another secret of tests"}),
    )
    without = detect_world(OURS)
    assert len({world.proof, replace(world, number=2).proof, other.proof, without.proof}) == 4
    assert world.proof == detect_world({**OURS, "ENGINE_SECRET": "a secret of tests"}).proof


HOSTS = {
    "enginerun": {**OURS, "ENGINE_SIZE": "4", "ENGINE_HUB": "node0:4711", "ENGINE_CROSS_RANK": "0"},
    "torchrun": {**TORCHRUN, "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "GROUP_RANK": "0"},
    "mpirun (Open MPI)": {**OMPI, "OMPI_COMM_WORLD_SIZE": "4", "ENGINE_HUB": "node0:4711"},
    "mpiexec (PMI)": {**PMI, "PMI_SIZE": "4", "ENGINE_HUB": "node0:4711"},
    "srun": {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_NODEID": "0",
    },
}


@pytest.mark.parametrize("source", HOSTS)
def test_on_several_hosts_there_must_be_a_secret(source: str) -> None:
    by_torchrun = "Run `openssl rand -hex 32` once, and on every host `export ENGINE_SECRET=` with what it printed"
    said = {"torchrun": by_torchrun}.get(source, "export ENGINE_SECRET=$(openssl rand -hex 32)` into the batch script")
    with pytest.raises(ConfigError, match=re.escape(said)):
        detect_world(HOSTS[source])
    world = detect_world({**HOSTS[source], "ENGINE_SECRET": "a secret of tests"})
    assert (world.several_hosts, world.secret, world.source) == (True, "a secret of tests", source)
    assert world.hub is not None and world.hub.host == "node0"


def test_the_secret_may_be_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    environ = {**HOSTS["srun"], "ENGINE_SECRET_FILE": str(path)}
    with pytest.raises(ConfigError, match=r"ENGINE_SECRET_FILE is .* which cannot be read: .*No such file"):
        detect_world(environ)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="which is empty"):
        detect_world(environ)
    path.write_text("a word in a file\n")
    path.chmod(0o600)
    assert detect_world(environ).secret == "a word in a file" and not caplog.records
    assert detect_world({**environ, "ENGINE_SECRET": "another in the variable"}).secret == "another in the variable"
    path.chmod(0o644)
    assert detect_world(environ).secret == "a word in a file"
    assert "ENGINE_SECRET_FILE" in caplog.text and "which other users can read: chmod 600 it" in caplog.text


def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("fifteen letters\n")
    for environ, what in [
        ({"ENGINE_SECRET": "fifteen letters"}, "ENGINE_SECRET has 15 characters, which can be guessed"),
        ({"ENGINE_SECRET_FILE": str(path)}, f"what ENGINE_SECRET_FILE names, '{path}', has 15 characters"),
        ({"ENGINE_SECRET_FILE": "/dev/zero"}, "which cannot be read: .* a device"),
    ]:
        with pytest.raises(ConfigError, match=what):
            detect_world({**HOSTS["srun"], **environ})


@pytest.mark.parametrize("source", [source for source, environ in HOSTS.items() if "ENGINE_HUB" in environ])
def test_a_launcher_that_does_not_say_where_rank_0_is_needs_the_hub(source: str) -> None:
    environ = {**HOSTS[source], "ENGINE_SECRET": "a secret of tests"}
    del environ["ENGINE_HUB"]
    with pytest.raises(ConfigError, match=r"does not say where rank 0 is reached\..* Set ENGINE_HUB=HOST:PORT"):
        detect_world(environ)


def test_a_host_is_called_as_the_user_has_told() -> None:
    environ = {**HOSTS["torchrun"], "ENGINE_SECRET": "a secret of tests"}
    assert [detect_world(environ | name).host_name for name in ({"ENGINE_HOST_NAME": "pod-0"}, {})] == ["pod-0", ""]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node1:4711", "node1", 4711), ("10.0.0.1:1", "10.0.0.1", 1), ("[fd00::1]:65535", "fd00::1", 65535)],
)
def test_the_hub_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    hub = detect_world(
        {**HOSTS["torchrun"], "ENGINE_SECRET": "a secret of tests", "ENGINE_HUB": text, "ENGINE_HUB_FD": "7"}
    ).hub
    assert hub is not None and (hub.host, hub.port, hub.descriptor) == (host, port, 7)


@pytest.mark.parametrize(
    "text", ["node1", "node1:", ":4711", "node1:0", "node1:65536", "fd00::1:4711", "a b:1", "a:1x"]
)
def test_a_hub_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"ENGINE_HUB is .*; expected HOST:PORT"):
        detect_world({**HOSTS["torchrun"], "ENGINE_SECRET": "a secret of tests", "ENGINE_HUB": text})


def test_the_port_follows_from_the_job_and_is_not_that_of_torch() -> None:
    def port(**change: str) -> int:
        hub = detect_world({**HOSTS["torchrun"], "ENGINE_SECRET": "a secret of tests", **change}).hub
        assert hub is not None
        return hub.port

    # Each host may know the first one by another name.
    assert port() == port(RANK="3") == port(MASTER_ADDR="10.0.0.1")
    assert len({port(), port(TORCHELASTIC_RESTART_COUNT="1"), port(TORCHELASTIC_RUN_ID="other")}) == 3
    named = port(ENGINE_JOB="j")
    assert port(ENGINE_JOB="j", MASTER_PORT=str(named)) == named + 1
    assert all(10_240 <= port(TORCHELASTIC_RUN_ID=str(number)) < 30_241 for number in range(50))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b,c", "a"),
        ("gpu[01-03,7],cpu5", "gpu01"),
        ("gpu[9,11]", "gpu9"),
        ("rack[2-3]node[04-05]-ib,z", "rack2node04-ib"),
    ],
)
def test_the_first_node_of_a_step_is_the_hub(nodes: str, first: str) -> None:
    hub = detect_world({**HOSTS["srun"], "ENGINE_SECRET": "a secret of tests", "SLURM_STEP_NODELIST": nodes}).hub
    assert hub is not None and hub.host == first


@pytest.mark.parametrize("source", ["mpirun (Open MPI)", "mpiexec (PMI)"])
def test_ranks_that_mpi_has_started_agree_on_what_is_not_given(source: str) -> None:
    """Given values stay, and if both are given, nothing is negotiated."""
    environ = {**HOSTS[source], "ENGINE_SECRET": "a secret of tests"}
    asked: list[World] = []

    def agree(world: World) -> World:
        asked.append(world)
        return replace(world, secret=world.secret or "told", hub=world.hub or HubAddress("told", 1), job="told")

    assert detect_world(environ, agree).hub == HubAddress("node0", 4711) and not asked
    del environ["ENGINE_HUB"]
    world = detect_world(environ, agree)
    assert (world.secret, world.hub, world.job) == ("a secret of tests", HubAddress("told", 1), "told")
    world = detect_world({**HOSTS[source]}, agree)
    assert (world.secret, world.hub) == ("told", HubAddress("node0", 4711))
    with pytest.raises(ConfigError, match=r"With mpi4py \(`pip install mpi4py`\) they agree on it themselves"):
        detect_world(environ, lambda world: None)
    with pytest.raises(ConfigError, match="no ENGINE_SECRET"):
        detect_world(HOSTS["torchrun"], agree)


def test_processes_of_mpich_belong_to_the_one_that_has_started_them(tmp_path: Path) -> None:
    """MPICH names no job, gives each process a session of its own, and a shell may stand in between."""
    code = "import os; from engine.config.world import detect_world; print(detect_world(dict(os.environ)).job)"
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    environ = {**os.environ, **PMI}
    jobs = {
        subprocess.run(
            command, env=environ, start_new_session=True, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        for _ in range(2)
    }
    (job,) = jobs
    assert job.startswith(f"starter={os.getpid()}@")
    assert detect_world({**PMI, "PMI_JOBID": "7"}).job == "PMI_JOBID=7"


def test_one_host_needs_neither_secret_nor_hub() -> None:
    assert detect_world(TORCHRUN).hub is None
    assert not detect_world(TORCHRUN).several_hosts


def test_the_first_rank_of_each_host_leads() -> None:
    environ = {**HOSTS["torchrun"], "ENGINE_SECRET": "a secret of tests"}
    assert not detect_world(environ).leads
    assert detect_world({**environ, "RANK": "2", "LOCAL_RANK": "0"}).leads
    assert detect_world({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "1"}).leads  # on a single host rank 0 leads
