"""Command lines written for `horovodrun`: every option is accepted, and its effect is reported."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.host import python_startup
from engine.launch.cli import horovod_options
from engine.launch.cli.check_build import format_table
from engine.launch.cli.options import parse
from engine.launch.errors import LaunchError
from engine.launch.process.cpu_binding import Allotment
from engine.launch.process.plan import Job, plan
from engine.text import readable

YAML = """
verbose: true
params:
    fusion_threshold_mb: 32
    cycle-time-ms: 2.5
    hierarchical_allreduce: true
    torus_allreduce: false
    cache_capacity: 2048
autotune:
    enabled: true
    log_file: "a b.csv"
stall_check:
    enabled: false
    warning_time_seconds: 200
library_options:
    mpi_threads_disable: false
    num_nccl_streams: 2
logging:
    level: "DEBUG"
    hide_timestamp: true
    with_timestamp: null
"""


def test_what_does_nothing_is_told_in_one_line_with_the_reasons():
    given = "-np 2 --gloo --disable-cache -p 22 --mpi-args=--x --gloo --blacklist-cooldown-range 1 2 true"
    options = parse(given.split())
    assert options.ignored == ("--gloo", "--disable-cache", "-p", "--mpi-args", "--gloo", "--blacklist-cooldown-range")
    assert horovod_options.without_effect(options.ignored) == (
        "without effect: --gloo, --mpi-args (shared memory on one host, TCP between hosts); "
        "--disable-cache (nothing is checked over the network); -p (all ranks are on this host); "
        "--blacklist-cooldown-range (of elastic jobs, see --min-np)"
    )


def test_the_launcher_says_that_line_once(launcher):
    done = launcher.run("-np", 2, "--tcp", "--num-nccl-streams", 4, python="print(rank)")
    assert done.code == 0
    said = [line for line in done.err.splitlines() if "without effect" in line]
    assert said == [
        "enginerun: without effect: --tcp (shared memory on one host, TCP between hosts); "
        "--num-nccl-streams (the work of a GPU goes to one stream of the engine's own)"
    ]


@pytest.mark.parametrize(
    ("line", "bounds"),
    [
        ("-np 2 --min-np 1", (1, 2, 2)),
        ("-np 2 --min-np 2 --max-np 2", (2, 2, 2)),
        ("-np 2 --min-num-proc 2 --max-np 4", (2, 2, 4)),
        ("-np 3 --min-np 1 --max-num-proc 4 -H a:2,b:2", (1, 3, 4)),
        ("--min-np 2 --max-np 3 -H a:2,b:2", (2, 3, 3)),
        ("-np 2 --host-discovery-script ./hosts.sh", (2, 2, 2)),
        ("--min-np 2 --max-np 8 --host-discovery-script ./hosts.sh", (2, 2, 8)),
    ],
)
def test_bounds_and_scripts_make_an_elastic_job(line, bounds):
    options = parse([*line.split(), "true"])
    assert options.elastic is not None and options.places == ()
    assert (options.elastic.min_size, options.size, options.elastic.max_size) == bounds


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-np 2 --min-np 3", "-np 2 must lie between --min-np 3, and 2, the --max-np that -np gives"),
        ("-np 4 --max-np 3", "-np 4 must lie between 4, the --min-np that -np gives, and --max-np 3"),
        ("-np 2 --host-discovery-script ./hosts.sh -H a:2", "both name the hosts"),
        ("--host-discovery-script ./hosts.sh", "the number of ranks is missing"),
        ("-np 2 --min-np 1 --slow-time 3", "give --slow-limit as well"),
        ("-np 2 --max-np 999", "--max-np 999 is too many"),
    ],
)
def test_elastic_jobs_that_cannot_be_are_refused(line, said):
    with pytest.raises(LaunchError, match=said):
        parse([*line.split(), "true"])


def test_options_of_elastic_jobs_count_in_elastic_jobs():
    options = parse("-np 2 --min-np 1 --reset-limit 3 --blacklist-cooldown-range 1 2 --elastic-timeout 9 true".split())
    assert options.ignored == () and options.elastic is not None
    assert (options.elastic.reset_limit, options.elastic.cooldown, options.elastic.timeout) == (3, (1.0, 2.0), 9.0)
    limits = options.elastic.make_limits(60.0, 0.0, 5.0)
    assert limits.stall_limit == 600.0 and limits.kill_wait > 5.0
    with pytest.raises(LaunchError, match="-np is 3, which is not an allowed size: a multiple of 2"):
        parse("-np 3 --min-np 1 --np-multiple 2 true".split()).elastic.make_limits(60.0, 0.0, 5.0)


@pytest.mark.slow
def test_short_options_mean_what_they_mean_in_horovodrun(launcher):
    assert launcher.run("-v").out.startswith("enginerun ")
    assert launcher.run("-cb").out == launcher.run("--check-build").out


def test_check_build_tells_what_there_is(launcher):
    pytest.importorskip("torch", reason="needs torch")
    out = launcher.run("--check-build").out
    there = [line.strip()[4:] for line in out.splitlines() if "[X]" in line]
    absent = [line.strip()[4:] for line in out.splitlines() if "[ ]" in line]
    assert f"PyTorch (engine.torch), torch {version('torch')}" in there
    assert any(name.startswith("shared memory, with kernels plain") for name in there)
    assert any(name.startswith("TensorFlow (engine.tensorflow), tensorflow") for name in there) == (
        find_spec("tensorflow") is not None  # the CPU-only distribution has another name
    )
    assert {"MPI", "Gloo", "ROCm", "DDL", "CCL"} <= set(absent)
    assert ("CUDA" in there) == bool([*Path("/dev").glob("nvidia[0-9]*")])
    assert not set(there) & set(absent)


def test_check_build_tells_which_launchers_are_there_and_that_hosts_are_reached(monkeypatch, tmp_path):
    for name in ("srun", "mpirun"):
        (tmp_path / name).touch(0o755 if name == "srun" else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    lines = [line.strip() for line in format_table().splitlines()]
    assert lines[lines.index("Launchers:") + 1 :][:4] == [
        "[X] enginerun",
        "[ ] torchrun: not found here",
        "[ ] mpirun (Open MPI, MPICH): not found here",
        f"[X] srun (by its variables): {tmp_path}/srun",
    ]
    assert lines.count("[X] TCP between hosts") == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("refusal", "gpus"), [(0, 1), (0, 0), (100, 1)])
def test_check_build_tells_of_cuda_where_the_driver_finds_a_gpu(monkeypatch, refusal, gpus):
    def count(found):
        found._obj.value = gpus
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: refusal, cuDeviceGetCount=count)
    library = SimpleNamespace(CDLL=lambda name: driver, c_int=ctypes.c_int, byref=ctypes.byref)
    monkeypatch.setattr("engine.launch.cli.check_build.ctypes", library)
    there = refusal == 0 and gpus > 0
    assert ("[X] CUDA" in format_table()) == there and ("[ ] CUDA" in format_table()) != there


def test_check_build_without_the_extension(launcher):
    program = """
        sys.modules["engine_ext.core"] = None
        from engine.launch.cli.check_build import format_table
        print(format_table())
    """
    out = "\n".join(launcher.run("-np", 1, python=program).lines(0))
    assert "[ ] shared memory: engine's native extension cannot be imported" in out
    assert "[X] shared memory" not in out and "[X] CPU" not in out


def test_a_file_of_settings_becomes_options(tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    files = {"c.yaml": YAML, "c.json": json.dumps(yaml.safe_load(YAML))}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        options = parse(["-np", "2", "--config-file", str(tmp_path / name), "--cycle-time-ms", "7", "true"])
        assert options.settings == {
            "ENGINE_FUSION_THRESHOLD": str(32 << 20),
            "ENGINE_CYCLE_TIME_MS": "7",
            "ENGINE_STALL_WARNING": "0",
            "ENGINE_STALL_LIMIT": "0",
            "ENGINE_LOG_LEVEL": "DEBUG",
            "ENGINE_AUTOTUNE": "1",
            "ENGINE_AUTOTUNE_LOG": str(Path("a b.csv").absolute()),
        }
        assert options.verbose
        assert set(options.ignored) == {
            "--hierarchical-allreduce",
            "--no-torus-allreduce",
            "--cache-capacity",
            "--no-mpi-threads-disable",
            "--num-nccl-streams",
            "--log-hide-timestamp",
        }


def test_a_file_of_settings_in_toml(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("num-proc = 3\n[params]\nfusion-threshold-mb = 1.5\n[stall_check]\nenabled = true\n")
    options = parse(["--config-file", str(path), "true"])
    assert (options.size, options.settings) == (3, {"ENGINE_FUSION_THRESHOLD": "1572864"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"params": {"fusion_treshold_mb": 3}}', "has 'params.fusion_treshold_mb', which stands for no"),
        ("c.json", '{"nparams": {"cycle_time_ms": 3}}', "has 'nparams', which stands for no option"),
        ("c.json", '{"config_file": "x"}', "has 'config_file', which stands for no option"),
        ("c.json", '{"params": {"cycle_time_ms": "fast"}}', "--cycle-time-ms is 'fast'; expected a number"),
        ("c.json", "[1]", "holds no settings by name"),
        ("c.json", "{", "cannot read"),
        ("c.toml", "a = ", "cannot read"),
        ("absent.json", None, "cannot read"),
    ],
)
def test_a_bad_file_of_settings_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        parse(["-np", "2", "--config-file", str(path), "true"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["1_000", "010", "1:30", "0x10", "0b11", ".inf", ".nan", "-1", "1e400", "9" * 400])
def test_a_number_of_a_yaml_file_is_what_is_written_there(tmp_path, number):
    """YAML itself would read 010, 1:30 and 1_000 as 8, 90 and 1000."""
    pytest.importorskip("yaml", reason="needs PyYAML")
    path = tmp_path / "c.yaml"
    path.write_text("num-proc: 3\nparams:\n  cycle-time-ms: 2.5\n")
    options = parse(["--config-file", str(path), "true"])
    assert (options.size, options.settings["ENGINE_CYCLE_TIME_MS"]) == (3, "2.5")
    for line in (f"cycle-time-ms: {number}", f"start-timeout: {number}"):
        path.write_text(f"{line}\n")
        if number != "010":  # decimal 10, as everywhere
            with pytest.raises(LaunchError, match=re.escape(readable.quote_value(number)[:30])):
                parse(["-np", "2", "--config-file", str(path), "true"])
    path.write_text("cycle-time-ms: 010\n")
    assert parse(["-np", "2", "--config-file", str(path), "true"]).settings["ENGINE_CYCLE_TIME_MS"] == "010"


def test_yaml_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "c.yaml").write_text("params: {}")
    with pytest.raises(LaunchError, match=r"'pip install pyyaml', or write it as a \.toml or \.json file"):
        parse(["-np", "2", "--config-file", str(tmp_path / "c.yaml"), "true"])


def test_a_bad_yaml_file_is_refused(tmp_path):
    pytest.importorskip("yaml", reason="needs PyYAML")
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(LaunchError, match=r"cannot read '.*c\.yaml', line 1: expected the node content"):
        parse(["-np", "2", "--config-file", str(tmp_path / "c.yaml"), "true"])


def test_the_switch_goes_first_on_the_path_once_and_horovods_variables_are_there():
    job = Job(2, "job", "secret", 1, Path("/j"), {}, horovod=True)
    startup = str(python_startup.HOROVOD)
    environment = plan(job, Allotment(None, None, ""), {"PYTHONPATH": f"a:{startup}:b"})[1].environment
    assert environment["PYTHONPATH"] == f"{startup}:a:b"
    assert plan(job, Allotment(None, None, ""), {})[0].environment["PYTHONPATH"] == startup
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".split()
    assert [environment[f"HOROVOD_{name}"] for name in names] == ["1", "2", "1", "2", "0", "1"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python train.py -I", None),
        ("python -u -W ignore -X dev train.py", None),
        ("python -m train -E", None),
        ("python -mtrain -E", None),
        ("python -c pass -S", None),
        ("python -Wignore -", None),
        ("bash -E train.sh", None),
        ("mypython -I train.py", None),
        ("python -I -m engine.compat train.py", None),
        ("python -Im engine.compat train.py", None),
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.12 -uE train.py", "-E"),
        ("python3 -W ignore -S -m train", "-S"),
        ("python -I -c pass", "-I"),
    ],
)
def test_a_python_that_the_switch_does_not_reach_is_refused(command, option):
    if option is None:
        assert parse(["-np", "1", "--horovod", "--", *command.split()]).horovod
        return
    assert not parse(["-np", "1", "--", *command.split()]).horovod
    with pytest.raises(LaunchError) as caught:
        parse(["-np", "1", "--horovod", "--", *command.split()])
    assert f"write 'python {option} -m engine.compat train.py'" in str(caught.value)
