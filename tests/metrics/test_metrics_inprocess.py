"""Without our launcher, local rank 0 serves the metrics of all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.host.machine import free_port

PRELUDE = """
import json, os, pathlib, sys, time, urllib.request
import numpy as np
import engine
from engine.errors import ConfigError
def scrape(run):
    [group] = json.loads(pathlib.Path("sd", run + ".json").read_text())
    with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
"""


def start(home: Path, program: str, rank: int = 0, size: int = 1, port: int = 0) -> subprocess.Popen[str]:
    """Start a rank as torchrun would."""
    (home / "train.py").write_text(PRELUDE + program)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "HOROVOD_"))}
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    env = clean | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "train.py"], cwd=home, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(home: Path, program: str, size: int = 1) -> list[str]:
    """Run ranks; return the output of each."""
    port = free_port()
    ranks = [start(home, program, rank, size, port) for rank in range(size)]
    try:
        outputs = [each.communicate(timeout=100) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert [each.returncode for each in ranks] == [0] * size, outputs
    return [out for out, _ in outputs]


def test_local_rank_0_serves_all_ranks_from_init_to_shutdown(tmp_path):
    first, second = run(
        tmp_path,
        """
engine.init(metrics_port=0, metrics_file_sd="sd", metrics_textfile="a.prom", run_name="run-1")
for _ in range(5):
    engine.allreduce(np.ones(1000, np.float32), name="a")
if engine.rank() == 0:
    print(os.listdir("sd"))
    pairs = scrape("run-1")
    for rank in range(2):
        print(pairs[f'engine_rank_up{{rank="{rank}",run="run-1"}}'], end=" ")
        print(float(pairs[f'engine_submissions_total{{rank="{rank}",run="run-1"}}']) >= 5, end=" ")
        print(pairs[f'engine_world_size{{rank="{rank}",run="run-1"}}'])
engine.barrier()
engine.shutdown()
if engine.is_initialized() is False and os.environ["RANK"] == "0":
    print(os.listdir("sd"))
    print([line for line in open("a.prom") if line.startswith("engine_job_active")])
""",
        2,
    )
    assert first.splitlines() == [
        "['run-1.json']",
        "1.0 True 2.0",
        "1.0 True 2.0",
        "[]",
        """['engine_job_active{run="run-1"} 0.0\\n']""",
    ]
    assert second == ""


@pytest.mark.slow
def test_a_run_is_named_for_its_script_and_rank_0(tmp_path):
    [out] = run(tmp_path, 'engine.init(metrics_file_sd="sd")\nprint(os.listdir("sd") == [f"train-{os.getpid()}.json"])')
    assert out == "True\n"


@pytest.mark.slow
def test_a_forked_child_neither_serves_nor_cleans_up(tmp_path):
    [out] = run(
        tmp_path,
        """
engine.init(metrics_port=0, metrics_file_sd="sd", run_name="r")
child = os.fork()
if child == 0:
    engine.shutdown()
    os._exit(0)
os.waitpid(child, 0)
print(scrape("r")['engine_job_active{run="r"}'])
engine.shutdown()
engine.init(metrics_port=0, metrics_file_sd="sd", run_name="r")
print(scrape("r")['engine_resets_total{rank="0",run="r"}'])
""",
    )
    assert out.splitlines() == ["1.0", "1.0"]
    assert list((tmp_path / "sd").iterdir()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('metrics_port=0, metrics_address="203.0.113.7"', "give an address of this host"),
        ('metrics_textfile="/no/a.prom"', "there is no directory '/no': make it"),
        ("metrics_port=70000", "metrics_port is 70000; expected none, or a whole number from 0 to 65535"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_init(tmp_path, settings, words):
    [out] = run(
        tmp_path,
        f"""
try:
    engine.init({settings})
except ConfigError as error:
    print(error, engine.is_initialized())
engine.init()
print(engine.size())
""",
    )
    first, second = out.splitlines()
    assert words in first
    assert first.endswith("False")
    assert second == "1"


def test_without_the_library_init_says_how_to_get_it(tmp_path):
    [out] = run(
        tmp_path,
        """
sys.modules["prometheus_client"] = None
try:
    engine.init(metrics_port=0)
except ConfigError as error:
    print(error)
""",
    )
    assert out == "metrics need prometheus_client: pip install '.[metrics]' in the source tree\n"
