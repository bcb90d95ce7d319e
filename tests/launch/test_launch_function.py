"""`engine.run`: a function on every rank."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import engine
from engine.launch import JobError, LaunchError
from engine.launch.hosts.remote_files import ENCLOSED
from engine.launch.process.leftovers import ERROR, RESULT, lock

from . import called
from .host_jobs import other_python

# Caller program of the last test but one.
CALLER = """
import sys
sys.path.append({root!r})
import engine
from tests.launch import called
engine.run(called.sleeps, ({here!r},), num_proc=2)
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Let the ranks import the engine under test, and check that no file is left."""
    root = str(Path(engine.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    temporary = tmp_path / "calls"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    assert list(temporary.glob("enginerun-call-*")) == []


def test_results_come_by_rank_and_arguments_arrive():
    results = engine.run(called.place, ("a", 2), {"key": [3]}, 3)
    assert results == [(rank, 3, ("a", 2), {"key": [3]}, os.getcwd()) for rank in range(3)]


def test_the_ranks_are_a_world():
    assert engine.run(called.total, [2.0], np=3, start_timeout=60) == [6.0] * 3


@pytest.mark.slow
def test_a_call_that_lasts_for_weeks_is_no_leftover():
    assert engine.run(called.ages_and_clears, (tempfile.gettempdir(),), num_proc=1) == [True]


def test_a_failing_ranks_traceback_comes_first():
    with pytest.raises(JobError) as caught:
        engine.run(called.raises_on, (1,), num_proc=2)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["rank 1 failed first:", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: rank 1 does not like it"
    assert caught.value.rank == 1


@pytest.mark.slow
def test_a_killed_rank_is_named():
    with pytest.raises(JobError, match=r"(?s)^rank 0 failed first\n.*killed by SIGKILL") as caught:
        engine.run(called.killed_on, (0,), num_proc=2)
    assert caught.value.rank == 0


@pytest.mark.slow
def test_a_rank_that_ends_without_a_result_is_an_error():
    with pytest.raises(JobError, match="rank 1 ended before the function returned"):
        engine.run(called.exits_on, (1,), num_proc=2)


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(JobError, match=r"TypeError: the result of rank 0, of type lock, cannot be pickled"):
        engine.run(called.unpicklable)


@pytest.mark.slow
def test_a_lambda_takes_cloudpickle():
    pytest.importorskip("cloudpickle", reason="needs cloudpickle")
    factor = 7
    assert engine.run(lambda value: value * factor, (6,), num_proc=2) == [42, 42]


@pytest.mark.slow
def test_without_cloudpickle_only_functions_of_modules_are_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert [result[0] for result in engine.run(called.place, num_proc=2)] == [0, 1]
    with pytest.raises(TypeError, match=r"cannot pickle .*: 'pip install cloudpickle', or put it into a module"):
        engine.run(lambda: 1)
    script = eval("lambda: 1", {"__name__": "__main__"})
    with pytest.raises(TypeError, match=r"belongs to the main script: 'pip install cloudpickle'"):
        engine.run(script)


def test_arguments_that_cannot_be_pickled_are_refused():
    with pytest.raises(TypeError, match=r"cannot pickle .*place.* or its arguments"):
        engine.run(called.place, (threading.Lock(),))


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "said"),
    [
        (called.place, 0.1, None, r"as a tuple: write args=\(0.1,\), not 0.1"),
        (called.place, "abc", None, r"as a tuple: write args=\('abc',\), not 'abc'"),
        (called.place, {1, 2}, None, r"as a tuple: write args=\(\{1, 2\},\)"),
        (called.place, (), [1], r"keyword arguments as a dict, such as \{'lr': 0.1\}, not \[1\]"),
        ("train.py", (), None, r"'train.py' is a str, not a function. .* 'enginerun -np N python train.py'"),
        (None, (), None, "None is a NoneType, not a function"),
    ],
)
def test_what_is_no_call_is_refused_before_a_rank_starts(monkeypatch, func, args, kwargs, said):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(TypeError, match=said):
        engine.run(func, args, kwargs, num_proc=2)


# The second host has a temporary directory of its own, with the files of `far`.
APART = """#!/bin/sh
name=$1; shift
[ $name = a ] && exec "$@"
exec unshare -m sh -c 'mount --bind "$TMPDIR.far" "$TMPDIR" && exec "$@"' sh "$@"
"""


@pytest.fixture
def apart(tmp_path):
    """Options that reach two hosts, the second of which does not see the launcher's directories."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a mount namespace: run as root")
    Path(f"{tempfile.gettempdir()}.far").mkdir()
    (tmp_path / "agent").write_text(APART)
    (tmp_path / "agent").chmod(0o755)
    return {"launch_agent": f"{tmp_path}/agent {{host}}", "network_interface": "lo", "remote_directory": str(tmp_path)}


@pytest.mark.slow
def test_a_function_runs_on_several_hosts_and_its_results_come_back(tmp_path, apart):
    large, output, reach = "x" * 3_000_000, Path(tempfile.gettempdir(), "output"), apart
    (output / "rank.3").mkdir(parents=True)
    (output / "rank.3" / RESULT).write_text("of an earlier job")
    results = engine.run(called.place, (large,), hosts="a:2,b:2", output_filename=output, **reach)
    assert results == [(rank, 4, (large,), {}, str(tmp_path)) for rank in range(4)]
    assert engine.run(called.sees, (str(output / "rank.0"),), hosts="a:2,b:1", **reach) == [True, True, False]
    assert sorted(path.name for path in output.iterdir()) == [f"rank.{rank}" for rank in range(4)]
    assert list((output / "rank.3").iterdir()) == [output / "rank.3" / "stderr", output / "rank.3" / "stdout"]
    with pytest.raises(JobError, match=r"^rank 1 on b failed first:\nTraceback (?s:.*) rank 1 does not like it$"):
        engine.run(called.raises_on, (1,), hosts="a:1,b:1", **reach)


@pytest.mark.slow
def test_what_an_earlier_job_has_left_is_not_taken_for_this_jobs(apart):
    output = Path(tempfile.gettempdir(), "output")
    far = Path(f"{tempfile.gettempdir()}.far", "output")
    for directory, rank in ((output, 0), (far, 1)):
        (directory / f"rank.{rank}").mkdir(parents=True)
        (directory / f"rank.{rank}" / ERROR).write_text("of an earlier job")
        (directory / f"rank.{rank}" / RESULT).write_text("of an earlier job")
    with pytest.raises(JobError, match=r"^rank 1 on b failed first\n(?s:.*)killed by SIGKILL"):
        engine.run(called.killed_on, (1,), hosts="a:1,b:1", output_filename=output, **apart)
    assert not any((far / "rank.1" / name).exists() for name in (ERROR, RESULT))
    assert not (far / ENCLOSED).exists()


@pytest.mark.slow
def test_a_result_that_could_not_be_written_here_is_told(apart, capfd):
    """The launcher may write no file over 1 MiB; the other host has no such limit."""
    agent = Path(apart["launch_agent"].split()[0])
    agent.write_text(agent.read_text().replace("shift", "shift; ulimit -S -f unlimited"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(JobError, match=r"^the result of rank 1 did not arrive whole, .*: File too large: raise 'u"):
            engine.run(called.large_on, (1, 3_000_000), hosts="a:1,b:1", **apart)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"/rank.1/{RESULT} is not complete: File too large: raise 'ulimit -f'" in capfd.readouterr().err


@pytest.mark.slow
def test_another_python_of_the_hosts_makes_the_call(tmp_path):
    python = other_python(tmp_path / "far")
    reach = {"launch_agent": "env HOST={host}", "network_interface": "lo", "remote_python": python}
    assert engine.run(called.pythons, hosts="a:1,b:1", **reach) == [(python, python)] * 2


@pytest.mark.slow
def test_results_of_a_job_that_runs_are_not_touched_by_one_that_is_refused(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / RESULT).write_text("of the job that runs")
    held = lock(tmp_path)
    try:
        with pytest.raises(LaunchError, match="is in use by another job"):
            engine.run(called.place, output_filename=tmp_path)
    finally:
        os.close(held)
    assert (tmp_path / "rank.0" / RESULT).read_text() == "of the job that runs"


@pytest.mark.slow
def test_the_call_is_written_where_nobody_else_reads_it_and_through_no_link(tmp_path):
    output, victim = tmp_path / "output", tmp_path / "victim"
    output.mkdir()
    victim.write_text("mine")
    (output / ENCLOSED).symlink_to(victim)
    assert engine.run(called.mode_of_the_call, num_proc=1, output_filename=output) == [0o600]
    assert victim.read_text() == "mine" and not (output / ENCLOSED).exists()


def test_a_call_that_somebody_has_changed_is_not_unpickled(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / ENCLOSED).write_bytes(pickle.dumps(([], sys.executable, pickle.dumps((called.place, (), {})))))
    environment = {**os.environ, "ENGINE_RANK": "0", "ENGINE_OUTPUT_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "engine.runner.rank", "0" * 64]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ended.returncode == 1
    assert f"{tmp_path / ENCLOSED} is not what engine.run has written there".encode() in ended.stderr
    assert [path.name for path in (tmp_path / "rank.0").iterdir()] == [ERROR]


@pytest.mark.slow
def test_a_job_that_cannot_start_is_refused():
    with pytest.raises(LaunchError, match="elsewhere: cannot start '/no/such': No such file"):
        engine.run(called.place, hosts="elsewhere:2", num_proc=2, launch_agent="/no/such")
    with pytest.raises(LaunchError, match="-np 2 must lie between --min-np 3"):
        engine.run(called.place, num_proc=2, min_num_proc=3)
    with pytest.raises(LaunchError, match="'0' is not a whole number"):
        engine.run(called.place, num_proc=0)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [{"min_num_proc": 1}, {"min_num_proc": 2, "max_num_proc": 2}], ids=["less", "fixed"])
def test_an_elastic_job_returns_what_the_ranks_of_its_last_world_returned(tmp_path, bounds):
    """A rank is killed in the first world and restarted; a script names the hosts, whatever the bounds."""
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o700)
    results = engine.run(
        called.trains_and_is_killed_once, (str(tmp_path),), num_proc=2, **bounds, host_discovery_script=str(script)
    )
    size = len(results)
    assert size == 2 or (size == 1 and bounds["min_num_proc"] == 1)  # the survivor may have ended first
    assert results == [(rank, size, 6) for rank in range(size)]
    assert (tmp_path / "killed").exists()


@pytest.mark.slow
def test_an_elastic_job_without_a_script_has_its_first_failure_in_the_error(tmp_path):
    with pytest.raises(JobError, match=r"(?s)raised the same: ValueError.*first failure: .*nobody does"):
        engine.run(called.raises_everywhere, num_proc=2, min_num_proc=1, elastic_timeout=60)


@pytest.mark.slow
def test_a_function_that_never_comes_to_elastic_run_ends_an_elastic_job_at_once():
    with pytest.raises(JobError, match=r"ended with exit code 0 and never came to elastic\.run"):
        engine.run(called.process, num_proc=2, min_num_proc=1)


def test_what_means_nothing_here_is_said_in_one_line(capfd, tmp_path):
    output = tmp_path / "output"
    result = engine.run(
        called.place,
        num_proc=1,
        min_np=1,
        max_np=1,
        slots=1,
        reset_limit=3,
        cooldown_range=(1, 2),
        ssh_port=22,
        disable_cache=True,
        use_gloo=True,
        use_mpi=False,
        mpi_args="--map-by slot",
        network_interfaces=["lo", "eth0"],
        output_filename=output,
        executable=sys.executable,
    )
    assert result[0][:2] == (0, 1)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("enginerun: ")]
    assert line.startswith("enginerun: without effect: --slots-per-host, --reset-limit, --blacklist-cooldown-range (")
    assert all(option in line for option in ("--ssh-port", "--disable-cache", "--gloo", "--mpi-args"))
    assert "--mpi," not in line
    assert (output / "rank.0" / "stdout").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_the_job_ends_with_its_caller(launcher, signum):
    program = launcher.home / "caller.py"
    program.write_text(CALLER.format(root=str(Path(called.__file__).parents[2]), here=str(launcher.home)))
    caller = subprocess.Popen(
        [sys.executable, program], env=launcher.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    launcher.started.append(caller)
    launcher.wait_for("ready.0", "ready.1")
    caller.send_signal(signum)
    err = caller.communicate(timeout=60)[1].decode()
    launcher.nothing_left()
    assert list(launcher.temporary.glob("enginerun-call-*")) == []
    if signum == signal.SIGINT:
        assert "KeyboardInterrupt" in err
        assert caller.returncode == -signal.SIGINT
    else:
        assert caller.returncode == -signum


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(JobError("text", 3)))
    assert (str(error), error.rank) == ("text", 3)
