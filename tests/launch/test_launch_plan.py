"""Command, environment and CPUs that each rank is started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.launch.cli import main
from engine.launch.cli.options import load, parse
from engine.launch.errors import LaunchError
from engine.launch.process.cpu_binding import Allotment
from engine.launch.process.plan import Job, plan

pytestmark = pytest.mark.quick

JOB = Job(2, "job-1", "5e" * 32, 1234, Path("/jobs/1"), {"ENGINE_CYCLE_TIME_MS": "2"})
ALLOTMENT = Allotment(3, ((0, 1), (2, 3)), "")


def test_every_rank_knows_its_place_in_both_dialects():
    first, second = plan(JOB, ALLOTMENT, {"HOME": "/h"})
    assert second.environment == {
        "HOME": "/h",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "3",
        "ENGINE_CYCLE_TIME_MS": "2",
        "ENGINE_RANK": "1",
        "ENGINE_SIZE": "2",
        "ENGINE_LOCAL_RANK": "1",
        "ENGINE_LOCAL_SIZE": "2",
        "ENGINE_JOB": "job-1",
        "ENGINE_SECRET": "5e" * 32,
        "ENGINE_OUTPUT_DIR": "/jobs/1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert (first.cpus, second.cpus) == ((0, 1), (2, 3))
    assert second.directory == Path("/jobs/1/rank.1")


def test_torchruns_variables_are_left_out_where_they_would_make_ddp_wrap_the_model():
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert parse(["-np", "2", "true"]).torchrun
    assert not parse(["-np", "2", "--horovod", "true"]).torchrun
    assert not parse(["-np", "2", "--no-torchrun-variables", "true"]).torchrun
    assert parse(["-np", "2", "--horovod", "--torchrun-variables", "true"]).torchrun
    outer = dict.fromkeys(names, "7")
    for rank in plan(replace(JOB, torchrun=False), ALLOTMENT, outer):
        assert not names & set(rank.environment)
        assert rank.environment["ENGINE_SIZE"] == "2"


@pytest.mark.parametrize("line", ["-np 3", "-np3", "--np 3", "--np=3", "-n 3", "-n3", "--num-proc 3"])
def test_the_number_of_ranks_is_understood_as_people_write_it(line):
    assert parse([*line.split(), "true"]).size == 3


@pytest.mark.parametrize("line", ["-np x", "-npx", "-np p", "-np 0", "-np0"])
def test_what_is_no_number_of_ranks_is_refused(line):
    with pytest.raises(LaunchError, match="is not a whole number from 1 to 1048576"):
        parse([*line.split(), "true"])


def test_what_the_user_set_stays():
    users = {"PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "7", "ENGINE_FUSION_THRESHOLD": "5"}
    rank = plan(JOB, Allotment(None, None, ""), users)[0]
    assert {name: rank.environment[name] for name in users} == users
    assert rank.cpus is None


def test_another_launchers_word_does_not_reach_the_ranks():
    outer = {
        "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "7",
        "OMPI_COMM_WORLD_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PMI_RANK": "0",
        "RANK": "5",
    }
    environment = plan(JOB, ALLOTMENT, outer)[0].environment
    assert environment["RANK"] == "0"
    assert environment["SLURM_JOB_ID"] == "7"
    assert not {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_USE_AGENT_STORE", "PMI_RANK"} & set(environment)


def test_the_secret_is_not_in_what_is_printed():
    assert JOB.secret not in repr(JOB)
    assert JOB.secret not in repr(plan(JOB, ALLOTMENT, {}))


def test_options_become_settings():
    options = parse(
        "-np 2 --fusion-threshold-mb 1.5 --cycle-time-ms 2.5 --stall-check-warning-time-seconds 30 "
        "--stall-check-shutdown-time-seconds 90 --log-level DEBUG --start-timeout 9 "
        "--stores streaming --chunk-bytes 64K --compression bf16 python x.py -np 3".split()
    )
    assert options.settings == {
        "ENGINE_FUSION_THRESHOLD": "1572864",
        "ENGINE_CYCLE_TIME_MS": "2.5",
        "ENGINE_STALL_WARNING": "30",
        "ENGINE_STALL_LIMIT": "90",
        "ENGINE_LOG_LEVEL": "DEBUG",
        "ENGINE_START_TIMEOUT": "9",
        "ENGINE_STORES": "streaming",
        "ENGINE_CHUNK_BYTES": "64K",
        "ENGINE_COMPRESSION": "bf16",
    }
    assert options.command == ("python", "x.py", "-np", "3")


def test_the_threshold_has_its_unit_or_the_options_and_the_last_one_counts():
    for line, expected in {
        "--fusion-threshold 64M": "64M",
        "--fusion-threshold 1048576": "1048576",
        "--fusion-threshold-mb 2": "2097152",
        "--fusion-threshold 1k --fusion-threshold-mb 0": "0",
        "--fusion-threshold-mb 8 --fusion-threshold 16MiB": "16MiB",
    }.items():
        assert parse(f"-np 2 {line} true".split()).settings == {"ENGINE_FUSION_THRESHOLD": expected}


def test_without_options_the_environment_decides():
    assert parse(["-np", "2", "true"]).settings == {}


def test_a_log_to_begin_with_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--autotune-from: there is no file"):
        parse(["-np", "2", "--autotune-from", str(tmp_path / "log.jsonl"), "true"])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--autotune-from none", "autotune_from"),
        ("--timeline dynamic", "timeline"),
        ("--timeline-filename DYNAMIC", "timeline"),
        ("--metrics-port none --no-metrics", "metrics_port"),
    ],
)
def test_the_word_for_nothing_asks_for_nothing(line: str, name: str) -> None:
    """The option takes precedence over the environment."""
    environment = {"ENGINE_AUTOTUNE_FROM": "/log", "HOROVOD_TIMELINE": "/t", "ENGINE_METRICS_PORT": "1"}
    assert load(parse(["-np", "2", "true"]), environment).get(name) is not None
    assert load(parse(["-np", "2", *line.split(), "true"]), environment).get(name) is None


def test_no_metrics_leaves_nothing_to_serve() -> None:
    with pytest.raises(LaunchError, match="--no-metrics leaves nothing for --metrics-port: drop one of them"):
        parse("-np 2 --no-metrics --metrics-port 0 true".split())


def test_no_stall_check():
    settings = parse("-np 2 --no-stall-check --stall-check-warning-time-seconds 5 -- true".split()).settings
    assert settings == {"ENGINE_STALL_WARNING": "0", "ENGINE_STALL_LIMIT": "0"}


def test_a_timeline_is_a_setting_with_an_absolute_path():
    for option in ("--timeline", "--timeline-filename"):
        settings = parse(["-np", "2", option, "t.json", "--timeline-mark-cycles", "true"]).settings
        assert settings == {"ENGINE_TIMELINE": str(Path("t.json").absolute()), "ENGINE_TIMELINE_MARK_CYCLES": "1"}
    settings = parse(["-np", "2", "--no-timeline-mark-cycles", "true"]).settings
    assert settings == {"ENGINE_TIMELINE_MARK_CYCLES": "0"}


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--stall-limit", r"did you mean --stall-check-shutdown-time-seconds\?"),
        ("--autotune-trials=3", r"did you mean --autotune-bayes-opt-max-samples\?"),
        ("--shutdown-timeout", "a setting without an option: put ENGINE_SHUTDOWN_TIMEOUT=VALUE into the environment"),
        ("--timelin", "did you mean --timeline\\?"),
        ("--zzz", r"--zzz \(see"),
    ],
)
def test_an_unknown_option_says_what_may_be_meant(option: str, hint: str) -> None:
    with pytest.raises(LaunchError, match=hint):
        parse(["-np", "2", option, "3", "true"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("topp --once", "'topp' is no command of enginerun; did you mean 'top'?"),
        ("dashboard export x", "'dashboard' is no command of enginerun; did you mean 'dashboards'?"),
        ("python train.py", "the number of ranks is missing"),
    ],
)
def test_a_misspelled_command_is_refused_with_the_nearest_one(words, message, capsys):
    assert main(words.split()) == 2
    assert f"enginerun: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_path_is_no_timeline(empty):
    with pytest.raises(LaunchError, match="--timeline is ''; expected dynamic, or a path"):
        parse(["-np", "2", "--timeline", empty, "true"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no command to run"),
        ("-np 2", "no command to run"),
        ("-np 2 --", "no command to run"),
        ("python x.py", "number of ranks is missing"),
        ("-np 0 true", "'0' is not a whole number from 1 to 1048576"),
        ("-np -1 true", "'-1' is not a whole number"),
        ("-np two true", "'two' is not a whole number"),
        ("-np 1.5 true", "'1.5' is not a whole number"),
        ("-np 2 --grace-period nan true", "'nan' is not a number of seconds"),
        ("-np 2 --cycle-time-ms inf true", "--cycle-time-ms is 'inf'; expected a number from 0 to 10000"),
        ("-np 2 --log-level loud true", "--log-level is 'loud'; expected one of trace, debug, info"),
        (
            "-np 2 --fusion-threshold 1.5M true",
            "--fusion-threshold is '1.5M'; expected a number of bytes from 0",
        ),
        ("-np 2 --fusion-threshold-mb many true", "--fusion-threshold-mb is 'many'; expected a number"),
        ("-np 2 --chunk-bytes 0.5M true", "--chunk-bytes is '0.5M'; expected a number of bytes from 4096 to 1048576"),
        ("-np 2 --chunk-bytes 2M true", "--chunk-bytes is '2M'; expected a number of bytes from 4096 to 1048576"),
        ("-np 2 --stores slow true", "--stores is 'slow'; expected one of auto, cached, streaming"),
        ("-np 2 --autotune-bayes-opt-max-samples 1001 true", "expected a whole number from 1 to 1000"),
        ("-np 2 --unheard-of true", "--unheard-of"),
        ("-np 4 -H localhost:2 true", "needs more slots than the 2"),
        ("-np 257 true", "257 ranks are too many: a job has 256 at most"),
        ("-H localhost:300 true", "300 ranks are too many"),
        ("-H :2 true", "is not 'name:slots'"),
        ("-H localhost:0 true", "is not 'name:slots'"),
    ],
)
def test_errors_say_what_is_wrong(line, message):
    with pytest.raises(LaunchError) as caught:
        parse(line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_slots_of_hosts_are_the_ranks():
    assert parse(["-H", "localhost:3", "true"]).size == 3
