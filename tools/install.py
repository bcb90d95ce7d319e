"""Run pip and show how far it is: `python tools/install.py TITLE ARGUMENT ...`, with what follows `pip install`.

pip tells either nothing or hundreds of lines, and a build takes a minute. All that it writes goes to a file instead,
whose end is shown if it fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

LOG = Path(__file__).parents[1] / "build" / "install.log"
SHOWN = 40  # lines of a failure
BACK = "\r\033[K"  # to the beginning of an emptied line
PERIOD = 0.2  # seconds between two looks
QUIET_SECONDS = 5.0  # between two lines where there is no terminal to write over one
STEPS = {
    re.compile(r".*WARNING: Retrying .*host='(?P<what>[^']+)'"): "asking {what} again, which does not answer",
    re.compile(r"\s*(?:Collecting|Processing) (?P<what>[^\s(]+)"): "finding {what}",
    re.compile(r"\s*Downloading (?P<what>\S+ \(.*\))"): "downloading {what}",
    re.compile(r"\s*Building (?:editable|wheel) for (?P<what>\S+)"): "building {what}",
    re.compile(r"\s*\[(?P<what>\d+/\d+)\] "): "building file {what}",
    re.compile(r"\s*Installing collected packages: (?P<what>.*)"): "unpacking {what}",
}


def read_step(line: str) -> str:
    """Return what pip has begun by a line of its output, or an empty text."""
    for pattern, text in STEPS.items():
        if found := pattern.match(line):
            what = found["what"]
            if text.startswith("unpacking"):
                what = f"{what.count(',') + 1} packages"
            elif text.startswith("building file"):
                what = what.replace("/", " of ")
            elif text.startswith("finding"):
                what = what.rpartition("/")[2]
            return text.format(what=what)
    return ""


class InstallationProgress:
    """Latest step of an installation, and the line that shows it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.step = "starting pip"
        self._terminal = sys.stdout.isatty()
        self._began = self._spoken = time.monotonic()
        print(title, flush=True)

    def follow_output(self, output: IO[str], log: IO[str]) -> None:
        """Copy pip's output to a log, and take its steps from it."""
        for line in output:
            log.write(line)
            self.step = read_step(line) or self.step

    def show_step(self) -> None:
        """Bring the line up to date; without a terminal, write one now and then."""
        now = time.monotonic()
        text = f"  {now - self._began:3.0f} s  {self.step}"
        if self._terminal:
            print(BACK + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif now - self._spoken >= QUIET_SECONDS:
            print(text, flush=True)
            self._spoken = now

    def end_line(self, text: str) -> None:
        """Write the last line."""
        back = BACK if self._terminal else ""
        print(f"{back}  {time.monotonic() - self._began:3.0f} s  {text}", flush=True)


def install_packages(title: str, arguments: list[str], log: Path = LOG) -> int:
    """Install with pip; return its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-v", "install", "--progress-bar", "off"]
    progress = InstallationProgress(title)
    with open(log, "w", encoding="utf-8", buffering=1) as file:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        reader = threading.Thread(target=progress.follow_output, args=(process.stdout, file))
        reader.start()
        try:
            while process.poll() is None:
                progress.show_step()
                time.sleep(PERIOD)
        except KeyboardInterrupt:
            process.wait()  # the terminal has told it, too
        reader.join()
    if process.returncode:
        progress.end_line(f"failed: {progress.step}")
        lines = log.read_text(encoding="utf-8").splitlines()
        print("\n".join(lines[-SHOWN:]), f"\npip failed with exit code {process.returncode}; all it wrote is in {log}")
    else:
        progress.end_line("done")
    return process.returncode


if __name__ == "__main__":
    sys.exit(install_packages(sys.argv[1], sys.argv[2:]))
