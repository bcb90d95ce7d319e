"""The examples of docs/how-to/spark*.md run as printed, and print what the page says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import engine

from ..documents import DOCS, read_programs
from .sessions import skip_without_spark

pytest.importorskip("torch", reason="needs torch")

PROGRAMS = {name: read_programs(f"how-to/{name}.md") for name in ("spark", "spark-elastic", "spark-estimators")}


def printed(program: str, tmp_path: Path) -> list[str]:
    """The lines that a program prints."""
    skip_without_spark()
    (tmp_path / "example.py").write_text(program)
    env = os.environ | {"PYTHONPATH": str(Path(engine.__file__).parents[1]), "SPARK_LOCAL_IP": "127.0.0.1"}
    env["PYSPARK_PYTHON"] = sys.executable
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_example_runs(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the existing session, which its own call finds, and with its own `__main__`."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(PROGRAMS["spark"][0], "example.py", "exec"), {"__name__": "__main__"})
    *said, first, second = out.getvalue().splitlines()
    assert sorted(line.partition(" ")[0] for line in said) == ["[0]<stdout>:loss", "[1]<stdout>:loss"]
    assert first == second == "3.000 -1.000"


@pytest.mark.slow
def test_the_example_of_an_elastic_job_runs(tmp_path: Path) -> None:
    assert printed(PROGRAMS["spark-elastic"][0], tmp_path) == ["3.000 -1.000"] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "says"), [(0, "0.000 0.00 3.00"), (1, "0.00 0.00")])
def test_the_examples_of_estimators_run(tmp_path: Path, number: int, says: str) -> None:
    program = PROGRAMS["spark-estimators"][number]
    if "keras" in program:
        pytest.importorskip("keras", reason="needs keras")
    assert f"It prints `{says}`" in (DOCS / "how-to/spark-estimators.md").read_text()
    assert printed(program, tmp_path) == [says]
