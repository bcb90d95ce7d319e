"""Two ranks train as one process does: proves it for a CNN and a GPT, and shows what it costs and gains.

Each model is trained by one process on whole batches, by two ranks on half of each batch, and, for comparison, by one
process with two threads and by two ranks that forget to average their gradients. Fails, with exit code 1, if the loss
curves of the first two differ by more than the tolerance, or if that would prove nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from common import QUIET_SECONDS, many, stop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "output"
LAUNCH = (sys.executable, "-m", "engine.launch", "-np", "2", "--")
TOLERANCE = 0.005  # of a loss, in nats: the order of float32 additions may do this, and forgetting to average does more
SKIPPED = 3  # first steps of a run that its pace is not taken from
console = Console(highlight=False)


@dataclass
class Run:
    """One training, and its numbers by step."""

    name: str
    steps: int
    ranks: int = 1
    threads: int = 1
    averaged: bool = True
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def read(self, file: IO[str]) -> None:
        """Take over what the training has written since the last call."""
        while (line := file.readline()).endswith("\n"):
            numbers = json.loads(line)
            self.losses.append(numbers["loss"])
            self.seconds.append(numbers["seconds"])
            self.waited.append(numbers["waited"])

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds[SKIPPED:])

    @property
    def waiting(self) -> float:
        """Share of the time in which rank 0 waited for communication, or for the rank that it communicates with."""
        return sum(self.waited[SKIPPED:]) / sum(self.seconds[SKIPPED:])

    def apart(self, other: Run) -> float:
        """The largest difference between two losses of the same step."""
        return max(abs(mine - theirs) for mine, theirs in zip(self.losses, other.losses, strict=False))


class Model:
    """One example program and the runs it is put through."""

    def __init__(self, name: str, steps: int, batch: int) -> None:
        self.name, self.batch = name, batch
        self.one = Run("1 process", steps)
        self.two = Run("2 ranks", steps, ranks=2)
        self.threads = Run("1 process, 2 threads", steps // 4, threads=2)
        self.apart = Run("2 ranks, not averaged", steps // 3, ranks=2, averaged=False)
        self.runs = self.one, self.two, self.threads, self.apart

    def command(self, run: Run, log: Path) -> list[str]:
        """How to start a run."""
        launch = LAUNCH if run.ranks == 2 else ()
        more = () if run.averaged else ("--no-wrap",)
        numbers = "--steps", str(run.steps), "--batch", str(self.batch), "--log", str(log)
        return [*launch, sys.executable, str(HERE / f"{self.name}.py"), *numbers, *more]


def train(model: Model, run: Run) -> Iterator[None]:
    """Carry a run out; comes back now and then."""
    stem = OUTPUT / f"{model.name}-{model.runs.index(run)}"
    log, said = stem.with_suffix(".jsonl"), stem.with_suffix(".txt")
    log.write_text("")
    environment = os.environ | {"OMP_NUM_THREADS": str(run.threads)}
    with open(said, "w") as out, open(log) as file:
        process = subprocess.Popen(model.command(run, log), env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                run.read(file)
                yield
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        run.read(file)
    if process.returncode or len(run.losses) != run.steps:
        console.print("".join(said.read_text().splitlines(keepends=True)[-30:]), markup=False)
        stop(f"{model.name}, {run.name}: ended with exit code {process.returncode}; all it wrote is in {said}")
    yield


def train_all(models: list[Model]) -> None:
    """Carry all runs out, showing how they get on."""
    names = TextColumn("{task.description:<29}")
    columns = names, BarColumn(16), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn()
    bars = Progress(*columns, console=console)
    if console.is_terminal:
        bars.start()
    try:
        for model in models:
            for run in model.runs:
                task = bars.add_task(f"{model.name}: {run.name}", total=run.steps, text="starting")
                spoken = time.monotonic()
                for _ in train(model, run):
                    spoken = show(bars, task, run, spoken)
                if not console.is_terminal:
                    print(f"{model.name}, {run.name}: done, loss {run.losses[-1]:.4f}", flush=True)
    finally:
        if console.is_terminal:
            bars.stop()


def show(bars: Progress, task: TaskID, run: Run, spoken: float) -> float:
    """Bring a bar up to date; where no bar can be drawn, say a line once in a while. Returns when it last did."""
    if not run.losses:
        return spoken
    text = f"loss {run.losses[-1]:.4f}"
    bars.update(task, completed=len(run.losses), text=text)
    if not console.is_terminal and time.monotonic() - spoken > QUIET_SECONDS:
        doing = "its processes end" if len(run.losses) == run.steps else f"step {len(run.losses)}/{run.steps}, {text}"
        print(f"{bars.tasks[task].description}: {doing}", flush=True)
        return time.monotonic()
    return spoken


def say(*lines: str) -> None:
    """Show lines as they are, however narrow the terminal is."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def table(models: list[Model]) -> Table:
    """Paces and shares of all runs."""
    shown = Table(title="Measured just now, one run after the other")
    for name in ("model", "trained by"):
        shown.add_column(name, no_wrap=True)
    for name in ("samples/s", "speed", "waiting", "loss differs by"):
        shown.add_column(name, justify="right")
    for model in models:
        for run in model.runs:
            speed = f"{model.one.step_seconds / run.step_seconds:.2f} x"
            waiting = f"{run.waiting:.1%}" if run.ranks > 1 and run.averaged else "-"
            difference = "-" if run is model.one else f"{run.apart(model.one):.1e}"
            pace = f"{model.batch / run.step_seconds:.1f}"
            shown.add_row(model.name, run.name, pace, speed, waiting, difference, end_section=run is model.apart)
    return shown


def judge(model: Model) -> list[str]:
    """What is wrong with the proof for a model; says what is right."""
    first, last = model.one.losses[0], statistics.mean(model.one.losses[-10:])
    same, without = model.two.apart(model.one), model.apart.apart(model.one)
    checks = {
        f"the loss falls, from {first:.2f} to {last:.2f}": last < 0.75 * first,
        f"two ranks' curve is one process's: {same:.1e} apart at most, tolerance {TOLERANCE}": same <= TOLERANCE,
        f"without averaging it would not be: {without:.1e} apart": without > 2 * TOLERANCE,
    }
    for text, right in checks.items():
        console.print(f"  {'[green]yes[/]' if right else '[bold red]NO [/]'} {model.name}: {text}", soft_wrap=True)
    return [text for text, right in checks.items() if not right]


def plot(models: list[Model], path: Path) -> bool:
    """Draw the loss curves; False if there is nothing to draw with."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 4.2), layout="constrained")
    for model, axis in zip(models, axes, strict=True):
        styles = {"linewidth": 5, "color": "#b8cce4"}, {"linewidth": 1.2, "color": "#c0392b"}
        for run, style in zip((model.one, model.two), styles, strict=True):
            axis.plot(range(1, run.steps + 1), run.losses, label=run.name, **style)
        axis.plot(range(1, model.apart.steps + 1), model.apart.losses, ":", color="#888888", label=model.apart.name)
        axis.set(title=f"{model.name}: {model.batch} samples in a step", xlabel="step", ylabel="loss [nats]")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)
    return True


def main() -> None:
    """Train, compare, say what comes next."""
    began = time.monotonic()
    quick = sys.argv[1:] == ["--quick"]  # For the tests: enough to see that it works.
    models = [Model("digits", 60 if quick else 120, 100), Model("gpt", 24 if quick else 28, 16)]
    OUTPUT.mkdir(exist_ok=True)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    say(
        "Two models, each trained by one process on whole batches and by two ranks on half of each batch:",
        "the same start, the same data, gradients averaged by engine.DistributedOptimizer.",
        *(["There is one CPU for both ranks: expect no gain in speed."] if cores < 2 else []),
    )
    say("It takes about 70 seconds on two idle cores.")
    busy = f"load average {load:.1f} on {many(cores, 'CPU')}"
    doubt = [f"Other programs are at work ({busy}): mistrust the speeds, not the losses."] if load > cores / 2 else []
    say(*doubt)
    train_all(models)
    console.print()
    console.print(table(models))
    say(*doubt)
    say(
        "Processes and ranks have one thread each where nothing else is said; speed is by the median step, relative to",
        "the first row. Waiting is rank 0's share of time spent in the engine: for gradients to be reduced, or for the",
        "other rank to finish computing. The last column is the largest difference to the first row's losses.\n",
    )
    wrong = [text for model in models for text in judge(model)]
    picture = OUTPUT / "demo.png"
    if plot(models, picture):
        say(f"\nThe curves are drawn in {picture}")
    else:
        say("\nWith matplotlib installed the curves would be drawn, too.")
    if wrong:
        stop("the proof failed: " + "; ".join(wrong))
    say(
        f"Done in {time.monotonic() - began:.0f} s. Try next, from this directory:\n",
        "  source .venv/bin/activate",
        "  enginerun -np 4 python examples/digits.py                         # more ranks, the same curve",
        "  enginerun -np 2 python examples/gpt.py --steps 2000 --write 600   # minutes; then it writes Python",
        "  enginerun -np 2 python your_own.py                                # five lines to change: see README.md",
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted")
