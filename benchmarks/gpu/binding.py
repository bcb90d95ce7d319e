"""Part `binding`: results of PyTorch's operations on a GPU, compared with those in host memory.

`python -m benchmarks.gpu.binding DIRECTORY HERE SECONDS` is a rank; `binding_cases.py` has its cases.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.part import Task

PATIENCE = {"ENGINE_STALL_WARNING": "5", "ENGINE_STALL_LIMIT": "15"}
OK, OVER = "ok", "the time was over"
AGAIN = ("allreduce of", "optimizer", "as halves", "groups", "values")
"""Prefixes of cases that are repeated with sums in rank order."""


def measure_part(task: Task) -> dict[str, Any]:
    """Run the cases with one rank, and with two if possible.

    Returns `worlds`: for each number of ranks, `where` they were, and `cases` with `OK`, `OVER` or an error for each;
    or `skipped`.
    """
    found: dict[str, Any] = {"worlds": {}, "problems": []}
    for size, where, variables in ranks.list_worlds(task.here, (2, 1), found["worlds"]):
        seconds = task.left * (0.6 if size == 2 else 0.9)
        with tempfile.TemporaryDirectory() as scratch:
            (known := Path(scratch, "here.json")).write_text(json.dumps(task.here), encoding="utf-8")
            arguments = [scratch, str(known), str(0.8 * seconds)]
            failed = ""
            try:
                with ranks.Ranks("benchmarks.gpu.binding", size, arguments, variables | PATIENCE) as job:
                    job.end(seconds)
            except ranks.RankProcessError as error:
                failed = f"{size} ranks: {error}"
            files = sorted(Path(scratch).glob("[0-9].json"))
            told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        found["worlds"][str(size)] = {"where": where, "cases": told[0] if told else {}}
        for rank, cases in enumerate(told):
            bad = [
                f"{size} ranks, rank {rank}, {name}: {said}" for name, said in cases.items() if said not in (OK, OVER)
            ]
            found["problems"] += bad
            if OVER in cases.values():
                found["unfinished"] = f"not all cases were tried by {size} ranks: {OVER}"
        found["problems"] += [failed] if failed else []
        task.tell(found)
    return found


def run_case(act: Callable[[], None]) -> str:
    """Run a case and return its result as a text."""
    try:
        act()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return OK


def run(where: Path, device: str, seconds: float) -> None:
    """Run all cases in a world, and then sums in rank order in the next one."""
    import torch

    import engine
    from benchmarks.gpu.binding_cases import BindingRank

    rank, end = int(os.environ["RANK"]), time.monotonic() + seconds
    told: dict[str, str] = {}
    for ordered in (False, True):
        if ordered:
            os.environ["ENGINE_JOB"] += "-ordered"
        engine.init(**({"device_sums": "ordered"} if ordered else {}))
        me = BindingRank(device)
        for name, act in me.list_cases():
            if ordered and not name.startswith(AGAIN):
                continue
            over = engine.allreduce(torch.tensor([time.monotonic() > end]), op=engine.Max, name="over").item()
            case = f"{name}{', ordered sums' if ordered else ''}"
            begun = time.monotonic()
            told[case] = OVER if over else run_case(act)
            print(f"{case}: {told[case]} ({time.monotonic() - begun:.2f} s)", flush=True)
            (where / f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
            if over:
                break
        engine.shutdown()


def main() -> None:
    """Run as the rank that the command line describes. Without a GPU, compare the host with itself, for tests."""
    where, known, seconds = sys.argv[1:]
    here = json.loads(Path(known).read_text(encoding="utf-8"))
    device = "cpu"
    if here["cards"]:
        import torch

        device = f"cuda:{ranks.get_ordinal(int(os.environ['RANK']), here)}"
        torch.cuda.set_device(device)
    run(Path(where), device, float(seconds))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
