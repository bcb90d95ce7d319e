"""Trains with libraries over torch.distributed on gloo and on the engine, and compares the parameters of the ranks.

They are equal to the bit: on two ranks, and on a mesh of two times two, each sum has two terms.
Words on the command line choose programs: `backends.py trainer "deepspeed_zero 2"`. `make recipes` installs what they
need.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PROGRAMS = Path(__file__).parent / "programs"
EXTENSIONS = Path(sys.prefix) / "extensions"  # DeepSpeed compiles one of its own at the first use
SECONDS = 400.0  # of a job; the first one of DeepSpeed compiles


@dataclass(frozen=True)
class Program:
    """A program that is run on both backends."""

    file: str  # name in `programs`
    library: str  # package whose version is shown
    words: tuple[str, ...] = ()  # words of its command line
    ranks: int = 2

    @property
    def name(self) -> str:
        """Name of the program in the table."""
        return " ".join((self.file, *self.words))


ALL = (
    Program("accelerate_model", "accelerate"),
    Program("lightning_model", "lightning"),
    Program("trainer", "transformers"),
    Program("trl_tuning", "trl"),
    Program("deepspeed_zero", "deepspeed", ("1",)),
    Program("deepspeed_zero", "deepspeed", ("2",)),
    Program("torchtitan_llama", "torchtitan", ("1",)),
    Program("torchtitan_llama", "torchtitan", ("2",), ranks=4),
)
Results = list[dict[str, Any]]


def run(program: Program, backend: str) -> tuple[Results, dict[str, torch.Tensor]]:
    """Run a program; return what each rank has saved, and the parameters before the training.

    Raises RuntimeError if the program has failed, or not ended in time.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)]
    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*launcher, str(PROGRAMS / f"{program.file}.py"), backend, directory, *program.words],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = f"exit code {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"not ended within {SECONDS:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{program.name} on {backend}: {ended}\n{output.read()[-6000:]}")
        results = [torch.load(Path(directory, f"result.{rank}")) for rank in range(program.ranks)]
        return results, torch.load(Path(directory, "start.0"))


def measure_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return the distance of all parameters."""
    assert before.keys() == after.keys()
    return sum(float((after[name] - each).pow(2).sum()) for name, each in before.items()) ** 0.5


def compare(program: Program) -> tuple[list[str], list[str]]:
    """Run a program on both backends; return a row of the table, and the faults."""
    gloo, start = run(program, "gloo")
    own, _ = run(program, "engine")
    change = measure_change(start, gloo[0]["parameters"])
    faults = []
    if [each["backend"] for each in gloo + own] != ["gloo"] * program.ranks + ["engine"] * program.ranks:
        faults.append("ranks trained on another backend")
    if not all(each["module"].startswith(("engine.", "enginerun.")) for each in own):
        faults.append(f"the default group is one of {own[0]['module']}")
    apart = max(measure_change(a["parameters"], b["parameters"]) for a, b in zip(gloo, own, strict=True))
    among = max(measure_change(own[0]["parameters"], each["parameters"]) for each in own)
    if not 0.01 < change < 1e4:
        faults.append(f"the parameters have changed by {change}")
    if among:
        faults.append(f"the ranks' parameters are {among} apart")
    if apart:
        faults.append(f"the parameters are {apart / change:.1e} of their change away from gloo's")
    count = sum(each.numel() for each in start.values())
    result = "wrong" if faults else "equal to the bit"
    row = [program.name, version(program.library), str(program.ranks), f"{count:,}", f"{change:.3f}", result]
    return row, [f"{program.name}: {each}" for each in faults]


def main() -> int:
    """Compare all programs, or the named ones; print the table and the faults."""
    table = Table("program", "version", "ranks", "parameters", "they move by", "engine beside gloo")
    failed = []
    for program in ALL:
        if len(sys.argv) > 1 and not {program.file, program.name} & set(sys.argv[1:]):
            continue
        try:
            row, faults = compare(program)
        except RuntimeError as error:
            row, faults = [program.name, version(program.library), str(program.ranks), "", "", "failed"], [str(error)]
        print(", ".join(row), flush=True)
        table.add_row(*row)
        failed += faults
    Console(width=120).print(table)
    print("\n".join(failed), end="\n" if failed else "")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
