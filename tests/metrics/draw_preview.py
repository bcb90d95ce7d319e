"""`python -m tests.metrics.draw_preview` draws the pictures of docs/images from the history that the tests use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .prometheus_server import ROOT, Server, find
from .synthetic_run import MINUTES, NAME, history

START = 1_700_000_000.0


def main() -> int:
    programs = find()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "history.om").write_text(history(START))
        programs.tool("tsdb", "create-blocks-from", "openmetrics", directory / "history.om", directory / "data")
        with Server(programs, directory) as server:
            end = START + 60 * MINUTES - 5
            command = [
                sys.executable,
                "-P",
                "-m",
                "grafana.preview",
                server.url,
                NAME,
                f"--end={end}",
                "--about=made up",
                *sys.argv[1:],
            ]
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
