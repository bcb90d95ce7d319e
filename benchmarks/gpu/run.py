"""Runs of `python -m benchmarks gpu`, the first measurements on a machine with a GPU, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.common import environment, paths, progress, records
from benchmarks.common.processes import RankError
from benchmarks.gpu import here as places
from benchmarks.gpu.driver import KERNELS
from benchmarks.gpu.parts import PARTS, GpuPart

LOOK = 90.0  # seconds in which the driver must describe the machine
GRACE = 0.85  # share of a part's limit after which it should end by itself
LEAST = 5.0  # minimum seconds for a part to do anything
REAP = 5.0  # seconds to wait for a killed process; one that hangs in a driver may stay longer
LAST_LINES = 60


@dataclass(frozen=True)
class GpuSettings:
    """Parts to measure, and their duration."""

    only: tuple[str, ...] = ()  # names of parts; empty: all
    minutes: float = 8.0  # all parts together; each gets its share, and what earlier ones have left
    quick: bool = False  # whether to use few samples and small sizes

    def check(self) -> None:
        """Raise ValueError for parts that do not exist, and for a time that is not positive."""
        if unknown := [name for name in self.only if name not in PARTS]:
            raise ValueError(f"--only: there is no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
        if not self.minutes > 0:
            raise ValueError("--minutes: a positive number")


class NoGpuError(RankError):
    """Error if there is no GPU: nothing is measured or written."""


def run(settings: GpuSettings, console: Console, merge: bool = False) -> Path:
    """Measure, and write `out/gpu.json` after each part; on the stand-in, `out/gpu-stand-in.json`.

    Parts of the last run that are not measured now are kept with `merge`. Raises `NoGpuError`.
    """
    settings.check()
    importlib.import_module("engine.native")  # updates a build in place here, where no time limit applies
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as scratch:
        here = _describe_machine(Path(scratch))
        console.print(Text(places.describe(here), style="bold yellow" if here["stand_in"] else "bold"))
        before = environment.record()
        record = "gpu-stand-in" if here["stand_in"] else "gpu"
        kept = dict((records.read(record) or {"parts": {}})["parts"]) if merge else {}
        if here["stand_in"]:
            _provide_kernels(here)
        chosen = {name: part for name, part in PARTS.items() if name in (settings.only or PARTS)}
        end = began + 60 * settings.minutes
        with progress.show_progress(console, "GPU", len(chosen)) as advance:
            for number, (name, part) in enumerate(chosen.items()):
                limit = get_share(end - time.monotonic(), [each.weight for each in list(chosen.values())[number:]])
                found = run_part_in_process(name, part, here, limit, settings.quick, Path(scratch))
                found |= {"command": before["command"], "date": before["date"], "revision": before["revision"]}
                kept[name] = found
                _print_part(console, name, part, found)
                advance(name)
                results = {"here": here, "parts": {each: kept[each] for each in PARTS if each in kept}}
                path = records.write(
                    record, asdict(settings), before, results | {"seconds": round(time.monotonic() - began, 1)}
                )
    return path


def get_share(left: float, weights: Sequence[float]) -> float:
    """Return the seconds for the first of several parts.

    >>> get_share(100.0, [1.0, 3.0])
    25.0
    """
    return left * weights[0] / sum(weights)


def _describe_machine(scratch: Path) -> dict[str, Any]:
    """Describe the machine, in a process of its own."""
    file = scratch / "here.json"
    status, said = run_in_process([sys.executable, "-m", "benchmarks.gpu.here", str(file)], LOOK, scratch / "look.log")
    if not file.exists():
        raise NoGpuError(
            f"no GPU: the driver could not be asked what there is: it {_describe_status(status)}\n{_get_tail(said)}"
        )
    here: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "none" in here:
        raise NoGpuError(here["none"])
    return here


def _provide_kernels(here: dict[str, Any]) -> None:
    """Give the stand-in the engine's kernels translated from PTX to C, because it cannot compile them."""
    if KERNELS in os.environ or not here.get("cuda_library"):
        return
    from tests.standins import kernels

    where = paths.get_output_path("build/stand-in/kernels.c").parent
    os.environ[KERNELS] = str(kernels.build(where, Path(here["cuda_library"]).parent))


def run_part_in_process(
    name: str, part: GpuPart, here: dict[str, Any], limit: float, quick: bool, scratch: Path
) -> dict[str, Any]:
    """Measure one part within `limit` seconds: its `outcome`, `why`, `seconds`, and its results."""
    began = time.monotonic()
    if why := part.find_lack(here) or ("the time was over" if limit < LEAST else ""):
        return {"outcome": "skipped", "why": why, "seconds": 0.0}
    file, known = scratch / f"{name}.json", scratch / "here.json"
    known.write_text(json.dumps(here), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.module, "--out", str(file), "--here", str(known)]
    command += ["--seconds", str(GRACE * limit), *(["--quick"] if quick else [])]
    status, said = run_in_process(command, limit, paths.get_output_path(f"logs/gpu-{name}.log"))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if status is None:
        found |= {"outcome": "hung", "why": f"it has not ended within {limit:.0f} s, and was killed", "said": said}
    elif status != 0 or found.get("outcome") in (None, "unfinished"):
        last = said.splitlines()[-1] if said else ""
        found |= {
            "outcome": "crashed",
            "why": f"it {_describe_status(status)}{': ' if last else ''}{last}",
            "said": said,
        }
    return found | {"seconds": round(time.monotonic() - began, 1), "limit": round(limit, 1)}


def run_in_process(command: Sequence[str], limit: float, log: Path) -> tuple[int | None, str]:
    """Run a command; return its status (None if it timed out and was killed with its children), and its last lines."""
    places_of_modules = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(paths.ROOT))))
    variables = {"PYTHONPATH": places_of_modules, "PYTHONSAFEPATH": "1"}
    variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
    with log.open("w+b") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ranks that it has left behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP)
        output.seek(0)
        return status, _get_tail(output.read().decode(errors="replace"))


def _get_tail(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-LAST_LINES:])


def _describe_status(status: int | None) -> str:
    """Describe how a process ended, as a clause after "it"."""
    if status is None:
        return "did not end in time, and was killed"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _print_part(console: Console, name: str, part: GpuPart, found: dict[str, Any]) -> None:
    """Print the result of a part at once; a driver that differs from the tests' assumptions gets a loud warning."""
    if name == "litmus" and found["outcome"] not in ("ok", "partial", "skipped"):
        console.rule(Text("THE DRIVER IS NOT AS THE TESTS TAKE IT TO BE", style="bold red"), style="red")
        for problem in found.get("problems") or [found["why"]]:
            console.print(Text(problem, style="bold red"), soft_wrap=True)
        console.rule(style="red")
    styles = {"ok": "green", "partial": "yellow", "skipped": "yellow"}
    why = f": {found['why']}" if found["why"] else ""
    line = f"{name:<10} {found['outcome']:<8} {found['seconds']:5.1f} s  {part.title}{why}"
    console.print(Text(line, style=styles.get(found["outcome"], "bold red")), soft_wrap=True)
