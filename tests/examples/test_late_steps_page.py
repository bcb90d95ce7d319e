"""The program of docs/how-to/late-steps.md runs as printed, and its summary has the line that the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..documents import DOCS, read_programs

pytest.importorskip("torch", reason="needs torch")


@pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not part of this copy")
def test_the_program_is_late_by_input_on_rank_1(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(read_programs("how-to/late-steps.md")[0])
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--summary", sys.executable, "late.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"late steps: .*\brank 1 (?:\d+ by \w+ \([^)]*\), )*(\d+) by input", done.stdout + done.stderr)
    assert found is not None and int(found[1]) >= 4, done.stderr
