"""The examples of docs/spark.md run as printed, and print what the page says."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import engine

from .sessions import skip_without_spark

pytest.importorskip("torch", reason="needs torch")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spark.md").read_text()


PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


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


def test_the_example_runs(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the existing session, which its own call finds, and with its own `__main__`."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(PROGRAMS[0], "example.py", "exec"), {"__name__": "__main__"})
    *said, first, second = out.getvalue().splitlines()
    assert sorted(line.partition(" ")[0] for line in said) == ["[0]<stdout>:loss", "[1]<stdout>:loss"]
    assert first == second == "3.000 -1.000"


@pytest.mark.slow
def test_the_example_of_an_elastic_job_runs(tmp_path: Path) -> None:
    assert printed(PROGRAMS[1], tmp_path) == ["3.000 -1.000"] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "says"), [(2, "0.000 0.00 3.00"), (3, "0.00 0.00")])
def test_the_examples_of_estimators_run(tmp_path: Path, number: int, says: str) -> None:
    if "keras" in PROGRAMS[number]:
        pytest.importorskip("keras", reason="needs keras")
    assert f"It prints `{says}`" in PAGE
    assert printed(PROGRAMS[number], tmp_path) == [says]


def test_the_page_is_read_in_ten_minutes() -> None:
    assert len(PAGE.split()) < 2000
