"""A real Prometheus for tests: Debian's package, unpacked but not installed, or one on PATH.

`python -m tests.metrics.prometheus_server` fetches it (`make prometheus`) and prints its path.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from ..waiting import NotWithin, until

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "prometheus"
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class Unavailable(Exception):
    """There is no Prometheus, and none can be fetched."""


@dataclass(frozen=True)
class Programs:
    """Paths of the executables."""

    prometheus: Path
    promtool: Path

    def tool(self, *arguments: str | Path, given: str = "", succeeds: bool = True) -> str:
        """Run promtool; return its output."""
        done = subprocess.run(
            [self.promtool, *arguments],
            input=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
        )  # fmt: skip
        if succeeds:
            assert done.returncode == 0, f"promtool {' '.join(map(str, arguments))}:\n{done.stdout}"
        return done.stdout


def find() -> Programs:
    """Find Prometheus, or fetch it; raise `Unavailable` if neither works."""
    on_path = [shutil.which(name) for name in ("prometheus", "promtool")]
    if all(on_path):
        return Programs(*(Path(str(path)) for path in on_path))
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the holder's own work has deadlines
        programs = Programs(CACHE / "usr/bin/prometheus", CACHE / "usr/bin/promtool")
        if not _works(programs):
            _fetch()
        if not _works(programs):
            raise Unavailable("Debian's package of Prometheus was unpacked, and does not run on this machine")
    return programs


def _works(programs: Programs) -> bool:
    try:
        for program in (programs.prometheus, programs.promtool):
            subprocess.run([program, "--version"], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _fetch() -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Unavailable("no prometheus and promtool on PATH, and no apt-get to fetch them with")
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        try:
            got = subprocess.run(
                ["apt-get", "download", "-qq", "prometheus"], cwd=directory, capture_output=True, text=True, timeout=300
            )
            packages = list(Path(directory).glob("prometheus_*.deb"))
            if got.returncode or not packages:
                last = got.stderr.strip().rpartition("\n")[2]
                raise Unavailable(f"apt-get download prometheus: {last or 'nothing came'}")
            subprocess.run(["dpkg", "-x", packages[0], CACHE], check=True, capture_output=True, timeout=120)
        except subprocess.SubprocessError as error:
            raise Unavailable(f"Prometheus could not be fetched: {error}") from error


class Server:
    """A Prometheus that runs as long as a `with` block; `config` is the content of prometheus.yml."""

    def __init__(self, programs: Programs, directory: Path, config: str = "{}") -> None:
        self.directory = directory  # holds its data, which may be there already, and its log
        self.log = directory / "prometheus.log"
        (directory / "prometheus.yml").write_text(config)
        self._command = [
            programs.prometheus,
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--storage.tsdb.retention.time=100y",
            "--web.listen-address=127.0.0.1:0",
        ]
        self.url = ""

    def __enter__(self) -> Server:
        with self.log.open("w") as log:
            self._process = subprocess.Popen(self._command, cwd=self.directory, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def _wait(self, seconds: float = 60) -> None:
        def ready() -> bool:
            assert self._process.poll() is None, f"Prometheus has ended:\n{self.log.read_text()}"
            if found := LISTENING.search(self.log.read_text()):
                self.url = f"http://{found[1]}"
                try:
                    with urlopen(f"{self.url}/-/ready", timeout=5):
                        return True
                except (HTTPError, URLError):
                    pass  # it reads its data first
            return False

        try:
            until(ready, "Prometheus is ready", seconds, pause=0.05)
        except NotWithin as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def api(self, path: str, **parameters: Any) -> Any:
        """Data of an answer of the HTTP API."""
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expr: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query."""
        moment = {} if at is None else {"time": at}
        return [
            (series["metric"], float(series["value"][1]))
            for series in self.api("query", query=expr, **moment)["result"]
        ]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[tuple[dict[str, str], list[float]]]:
        """Labels and values of each series of a range query."""
        answer = self.api("query_range", query=expr, start=start, end=end, step=step)
        return [(series["metric"], [float(value) for _, value in series["values"]]) for series in answer["result"]]

    def wait_for(self, expr: str, seconds: float) -> list[tuple[dict[str, str], float]]:
        """Wait for a non-empty answer of an instant query."""
        return until(lambda: self.query(expr), f"series for {expr}", seconds, pause=0.1)


def main(arguments: Sequence[str]) -> int:
    try:
        programs = find()
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(programs.prometheus)
    print(programs.promtool)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
