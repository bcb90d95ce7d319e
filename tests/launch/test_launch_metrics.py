"""The launcher serves its ranks' metrics, and leaves no trace of the endpoint afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.launch import cli, metrics
from engine.launch.cli.options import load, parse
from engine.launch.errors import LaunchError
from engine.launch.process.reader_loop import ReaderLoop
from engine.metrics import page
from engine.metrics.export import endpoint

from ..waiting import measured, until
from .launch_jobs import Launcher

WAIT = "touch(f'up.{rank}'); wait_for('end')"


def target(launcher: Launcher, directory: str = "sd") -> str:
    """Address of the endpoint in the file for file_sd."""
    found: list[Path] = []
    until(lambda: found.extend((launcher.home / directory).glob("*.json")) or found, "a file for file_sd")
    [group] = json.loads(found[0].read_text())
    return str(group["targets"][0])


def scrape(where: str) -> dict[str, str]:
    """Scraped values, by the text before them."""
    with urllib.request.urlopen(f"http://{where}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


@pytest.mark.slow
def test_ranks_are_up_until_they_have_ended(launcher):
    process = launcher.start(
        *("-np", 2, "--grace-period", 60, "--metrics-port", 0, "--metrics-file-sd", "sd", "--run-name", "a b"),
        python="touch(f'up.{rank}')\nif rank: wait_for('die'); sys.exit(3)\nwait_for('end')",
    )
    launcher.wait_for("up.0", "up.1")
    where = target(launcher)
    assert os.listdir(launcher.home / "sd") == ["a_b.json"]
    assert where.startswith("127.0.0.1:")
    up = [f'engine_rank_up{{rank="{rank}",run="a_b"}}' for rank in (0, 1)]
    assert [scrape(where)[name] for name in up] == ["1.0", "1.0"]
    (launcher.home / "die").touch()
    until(lambda: scrape(where)[up[1]] == "0.0", "rank 1 down")
    assert scrape(where)[up[0]] == "1.0"
    assert scrape(where)['engine_job_active{run="a_b"}'] == "1.0"
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 3
    assert f"enginerun: metrics: http://{where}/metrics\n" in job.err
    assert os.listdir(launcher.home / "sd") == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where.split(":"), timeout=5)


@pytest.mark.parametrize(
    "end",
    [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL],
    ids=lambda end: end.name if end else "success",
)
def test_nothing_points_to_a_job_that_has_ended(launcher, end):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = launcher.start("-np", 2, "--metrics-file-sd", "sd", "--metrics-textfile", "a.prom", python=WAIT, **quiet)
    launcher.wait_for("up.0", "up.1")
    textfile = launcher.home / "a.prom"
    until(textfile.exists, "the textfile")
    scrape(target(launcher))
    if end is None:
        (launcher.home / "end").touch()
    else:
        process.send_signal(end)
    process.wait(60)
    until(lambda: os.listdir(launcher.home / "sd") == [], "no file for file_sd")
    if end == signal.SIGKILL:
        until(lambda: not textfile.exists(), "no textfile of a job that seems to run")
    else:
        lines = textfile.read_text().splitlines()
        assert [line.rsplit(" ")[-1] for line in lines if line.startswith("engine_job_active")] == ["0.0"]
        assert [line.rsplit(" ")[-1] for line in lines if line.startswith("engine_rank_up")] == ["0.0", "0.0"]


LINGERS = "a signal ends that"
FAIL = "touch(f'{os.getpid()}.pid'); touch(f'up.{rank}'); wait_for('die'); sys.exit(3)"


@pytest.mark.parametrize(("seconds", "then"), [("600", "scrape"), ("600", "SIGTERM"), ("0", "nothing")])
def test_who_has_scraped_a_job_may_see_it_fail(launcher, seconds, then):
    with (launcher.home / "err").open("wb") as err:
        arguments = ("-np", 2, "--metrics-file-sd", "sd", "--run-name", "it", "--metrics-linger", seconds)
        process = launcher.start(*arguments, python=FAIL, stdout=subprocess.DEVNULL, stderr=err)
    launcher.wait_for("up.0", "up.1")
    where = target(launcher)
    assert scrape(where)['engine_rank_up{rank="1",run="it"}'] == "1.0"
    pids = [path.stem for path in launcher.home.glob("*.pid")]
    (launcher.home / "die").touch()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all ranks are gone")
    if then == "scrape":
        last = scrape(where)
        assert [last[f'engine_rank_up{{rank="{rank}",run="it"}}'] for rank in (0, 1)] == ["0.0", "0.0"]
        scrape(where)  # further scrapes may come: the first has not ended it
    if then != "nothing":
        until(lambda: LINGERS in (launcher.home / "err").read_text(), "the launcher waits")
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3
    assert (LINGERS in (launcher.home / "err").read_text()) == (then != "nothing")
    assert os.listdir(launcher.home / "sd") == []


class Clock:
    """Fake of `time` and `select`: waiting advances the clock without taking time."""

    POLLIN = select.POLLIN

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def poll(self, milliseconds: float | None = None) -> Any:
        if milliseconds is None:
            return SimpleNamespace(register=lambda *_: None, poll=self.poll)
        self.now += milliseconds / 1e3
        return []


@pytest.mark.parametrize(("chosen", "seconds"), [((), 15), (("--metrics-linger", "100"), 100)])
def test_a_failure_can_be_scraped_for_as_long_as_said(monkeypatch, chosen, seconds):
    options, said, clock = parse(["-np", "1", "--metrics-port", "0", *chosen, "true"]), [], Clock()
    for name in ("time", "select"):
        monkeypatch.setattr(metrics, name, clock)
    with metrics.Metrics(options, load(options, {}), {}, said.append) as served, socket.socket() as wakeup:
        with closing(ReaderLoop()) as loop:
            served.start(loop)
        served.wait_for_scrape(wakeup)
        assert clock.now == 0  # nothing has scraped it
        scrape(said[0].removeprefix("metrics: http://").removesuffix("/metrics"))
        until(served._service.end, "the endpoint knows that its answer has gone")
        served.wait_for_scrape(wakeup)
    assert clock.now == pytest.approx(seconds)
    assert said[-1] == f"metrics: the failure can be scraped for {seconds} s; a signal ends that"


def test_a_job_that_could_not_start_leaves_the_file_of_its_namesake(launcher):
    arguments = ("--run-name", "it", "--output-dir", "od", "--metrics-file-sd", "sd")
    process = launcher.start("-np", 1, *arguments, python=WAIT)
    launcher.wait_for("up.0")
    where = target(launcher)
    refused = launcher.run("-np", 1, *arguments, "true")
    assert refused.code == 2 and "in use by another job" in refused.err
    assert target(launcher) == where
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0
    assert os.listdir(launcher.home / "sd") == []


def test_who_would_not_wait_for_the_end_does_not_wait_for_a_scrape(launcher):
    program = """
        if rank: wait_for('die'); sys.exit(3)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        touch('deaf'); wait_for('never')
    """
    lingers = ("--metrics-file-sd", "sd", "--metrics-linger", 600)  # longer than the test waits for the job
    process = launcher.start("-np", 2, "--grace-period", 60, *lingers, python=program)
    launcher.wait_for("deaf")
    where = target(launcher)
    scrape(where)
    (launcher.home / "die").touch()
    until(
        lambda: any(name.startswith("engine_rank_up") and value == "0.0" for name, value in scrape(where).items()),
        "down",
    )
    process.send_signal(signal.SIGINT)
    job = launcher.finish(process)
    assert job.code == 3 and LINGERS not in job.err


def test_one_program_after_the_other_counts_into_the_ranks_page(launcher):
    program = (
        "import subprocess, sys\n"
        "code = 'import engine, numpy; engine.init(); [engine.barrier() for _ in range(5)]'\n"
        "for _ in range(2): subprocess.run([sys.executable, '-c', code], check=True)\n"
        "touch('done'); wait_for('end')"
    )
    process = launcher.start("-np", 1, "--metrics-file-sd", "sd", "--run-name", "it", python=program)
    until(lambda: (launcher.home / "done").exists(), "two programs", 60)
    counted = scrape(target(launcher))
    assert counted['engine_collective_tensors_total{op="barrier",rank="0",run="it"}'] == "10.0"
    assert counted['engine_resets_total{rank="0",run="it"}'] == "1.0"
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0


def test_a_failure_that_nobody_looks_for_ends_at_once(launcher):
    job = launcher.run("-np", 1, "--metrics-port", 0, "--metrics-linger", 600, python="sys.exit(3)")
    assert job.code == 3 and LINGERS not in job.err


def test_a_stale_file_is_overwritten_and_another_jobs_is_left(launcher):
    file = launcher.home / "all.json"
    file.write_text("stale")
    process = launcher.start("-np", 1, "--metrics-file-sd", "all.json", python=WAIT)
    launcher.wait_for("up.0")
    until(lambda: "127.0.0.1" in file.read_text(), "the target")
    file.write_text("another job's")
    (launcher.home / "end").touch()
    assert launcher.finish(process).code == 0
    assert file.read_text() == "another job's"


def test_a_port_in_use_is_said_and_the_next_one_told(launcher):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = launcher.start("-np", 1, "-q", "--metrics-port", port, "--metrics-file-sd", "sd", python=WAIT)
        where = target(launcher)
        scrape(where)
        (launcher.home / "end").touch()
        job = launcher.finish(process)
    used = int(where.rpartition(":")[2])
    assert port < used <= port + 50
    assert job.err == f"enginerun: metrics: port {port} is in use, port {used} is used instead\n"


def test_the_launcher_acts_on_the_variables_and_ranks_do_not_see_them(launcher):
    launcher.environment |= {
        "ENGINE_METRICS_PORT": "0",
        "ENGINE_METRICS_ADDRESS": "127.0.0.2",
        "ENGINE_METRICS_FILE_SD": "sd",
        "ENGINE_RUN_NAME": "named",
        "ENGINE_COUNTERS": "/proc/1/fd/99",
    }
    process = launcher.start(
        "-np",
        2,
        python="""
            names = sorted(name for name in os.environ if "METRICS" in name or "COUNTERS" in name or "RUN_NAME" in name)
            page = os.environ["ENGINE_COUNTERS"]
            descriptor = os.open(page, os.O_RDWR)
            print(*names, os.environ["ENGINE_METRICS"], os.environ["ENGINE_RUN_NAME"], os.readlink(page).split()[0])
            print(os.fstat(descriptor).st_size, os.fstat(descriptor).st_ino)
            touch(f"up.{rank}"); wait_for("end")
        """,
    )
    assert target(launcher).startswith("127.0.0.2:")
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 0
    first, second = job.lines(0), job.lines(1)
    assert first[0] == "ENGINE_COUNTERS ENGINE_METRICS ENGINE_RUN_NAME 1 named /memfd:enginerun-counters"
    assert first[1].split()[0] == str(page.BYTES)
    assert first[1] != second[1]


@pytest.mark.parametrize("arguments", [["--no-metrics"], []])
def test_nothing_is_counted_where_it_is_not_wanted(launcher, arguments):
    launcher.environment |= {"ENGINE_METRICS_PORT": "0"} if arguments else {"ENGINE_METRICS": "0"}
    job = launcher.run(
        *("-np", 1, *arguments),
        python="print(os.environ.get('ENGINE_COUNTERS'), os.environ['ENGINE_METRICS'])",
    )
    assert job.lines(0)[0] == "None 0"
    assert "metrics" not in job.err


def test_an_idle_client_does_not_delay_the_end(launcher):
    def measure() -> None:
        for name in ("up.0", "end"):
            (launcher.home / name).unlink(missing_ok=True)
        process = launcher.start("-np", 1, "--metrics-file-sd", "sd", python=WAIT)
        launcher.wait_for("up.0")
        host, port = target(launcher).split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            began = time.monotonic()
            (launcher.home / "end").touch()
            assert launcher.finish(process).code == 0
            assert client.recv(1) == b""
            assert time.monotonic() - began < 8, "a request that has not come is waited for for 10 s"

    measured(measure)


def test_a_damaged_page_is_said_once_and_the_job_goes_on(launcher):
    process = launcher.start(
        *("-np", 2, "--metrics-file-sd", "sd", "--run-name", "r"),
        python="if rank: os.pwrite(os.open(os.environ['ENGINE_COUNTERS'], os.O_RDWR), b'GARBAGE!', 0)\n" + WAIT,
    )
    launcher.wait_for("up.0", "up.1")
    where = target(launcher)
    for _ in range(3):
        found = scrape(where)
    assert found['engine_unreadable_pages{run="r"}'] == "1.0"
    assert 'engine_rank_up{rank="1",run="r"}' not in found
    (launcher.home / "end").touch()
    job = launcher.finish(process)
    assert job.code == 0
    assert job.err.count("enginerun: metrics: rank 1 is left out, its page of counters begins with b'GARBAGE!'") == 1


def test_engine_run_serves_as_well(launcher):
    launcher.environment["ENGINE_METRICS_FILE_SD"] = "sd"
    script = launcher.home / "call.py"
    script.write_text(
        "import engine, os, sys\n"
        "from tests.waiting import until\n"
        "def look():\n"
        "    return until(lambda: os.listdir('sd'), 'a file'), 'ENGINE_COUNTERS' in os.environ\n"
        "if __name__ == '__main__':\n"
        "    sys.path.insert(0, os.getcwd()); import call\n"
        "    print(engine.run(call.look, np=1), os.listdir('sd'))\n"
    )
    (launcher.home / "sd").mkdir()
    command = [sys.executable, script]
    where = {"env": launcher.environment, "cwd": launcher.home}
    run = subprocess.run(command, **where, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[(['engine.run-"), run.stdout
    assert run.stdout.endswith(".json'], True)] []\n")


def test_serving_without_the_library_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert cli.main(["-np", "1", "--metrics-port", "0", "true"]) == 2
    assert capsys.readouterr().err == (
        "enginerun: error: metrics need prometheus_client: pip install '.[metrics]' in the source tree\n"
    )


def test_an_endpoint_that_the_system_allows_no_thread_ends_the_job_with_a_reason(monkeypatch, capsys):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(endpoint.Endpoint, "start", refuse)
    assert cli.main(["-np", "1", "--metrics-port", "0", "true"]) == 2
    assert "error: cannot start a thread that exports metrics; there are too many" in capsys.readouterr().err


def test_counting_needs_no_library(launcher):
    missing = "import sys; sys.modules['prometheus_client'] = None; "
    code = missing + "from engine.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-np", "1", "sh", "-c", 'test -n "$ENGINE_COUNTERS"']
    run = subprocess.run(command, env=launcher.environment, cwd=launcher.home, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics-port", "x"], "--metrics-port is 'x'; expected none, or a whole number from 0 to 65535"),
        (["--metrics-port", "65536"], "--metrics-port is '65536'; expected"),
        (["--metrics-port=-1"], "--metrics-port is '-1'; expected"),
        (["--metrics-address", " "], "--metrics-address is ''; expected a text that is not blank"),
        (["--run-name", ""], "--run-name is ''; expected auto, or a text"),
        (["--no-metrics", "--metrics-file-sd", "a"], "--no-metrics leaves nothing for --metrics-file-sd: drop one"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(LaunchError, match=words):
        parse(["-np", "1", *arguments, "true"])


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ([], {"ENGINE_METRICS_PORT": "x"}, "ENGINE_METRICS_PORT is 'x'; expected none, or a whole number"),
        ([], {"ENGINE_METRICS": "maybe"}, "ENGINE_METRICS is 'maybe'; expected 1 or 0"),
        (["--metrics-address", "0.0.0.0"], {}, "nothing is served there; give --metrics-port as well"),
        (["--metrics-port", "0", "--metrics-address", "203.0.113.7"], {}, "give an address of this host"),
        (["--metrics-file-sd", "/proc/x"], {}, "file_sd in '/proc/x'"),
        (["--metrics-textfile", "/no/a.prom"], {}, "there is no directory '/no': make it"),
    ],
)
def test_what_cannot_be_served_keeps_the_job_from_starting(launcher, arguments, variables, words):
    launcher.environment |= variables
    job = launcher.run("-np", 1, *arguments, python="touch('ran')")
    assert job.code == 2
    assert words in job.err
    assert not (launcher.home / "ran").exists()
    assert launcher.kept() == []


LINK = "tcp://10.96.1.2:9400"  # what Kubernetes sets for a Service called engine-metrics


@pytest.mark.parametrize(
    ("arguments", "value", "said"), [((), LINK, True), (("--quiet",), LINK, False), (("--no-metrics",), "x", False)]
)
def test_a_port_that_nobody_has_chosen_or_asked_for_is_no_error(launcher, arguments, value, said):
    launcher.environment["ENGINE_METRICS_PORT"] = value
    job = launcher.run("-np", 1, *arguments, python="print(os.environ.get('ENGINE_METRICS_PORT'))")
    assert job.code == 0, job.err
    assert job.lines(0) == ["None"]
    assert (f"ENGINE_METRICS_PORT={value} is set by Kubernetes for a Service" in job.err) == said
