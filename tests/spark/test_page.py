"""The example of docs/spark.md runs as it is printed, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine

from .sessions import skip_without_spark

pytest.importorskip("torch", reason="needs torch")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spark.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    skip_without_spark()
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(program)
    env = os.environ | {"PYTHONPATH": str(Path(engine.__file__).parents[1]), "SPARK_LOCAL_IP": "127.0.0.1"}
    env["PYSPARK_PYTHON"] = sys.executable
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    *said, first, second = done.stdout.splitlines()
    assert sorted(line.partition(" ")[0] for line in said) == ["[0]<stdout>:loss", "[1]<stdout>:loss"]
    assert first == second == "3.000 -1.000"


def test_the_page_is_read_in_ten_minutes() -> None:
    assert len(PAGE.split()) < 2000
