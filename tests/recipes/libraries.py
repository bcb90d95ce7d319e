"""Compares the programs of docs/how-to/libraries.md on two ranks with the libraries alone in one process.

Half of the samples are mostly padding, the last window of each epoch is cut short, gradients are clipped, and each
program ends with the loss of an evaluation. `make recipes` installs what they need.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "libraries.md").read_text(encoding="utf-8")
BEGINNING = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
PROGRAMS = dict(re.findall(r"^## ([^\n]*)\n+```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMAND = re.search(r"^```sh\n(enginerun [^\n]*)\n```", PAGE, re.MULTILINE)
PROGRAMS["lightning.pytorch"] = PROGRAMS["Lightning"].replace("pytorch_lightning", "lightning.pytorch")

# Ranks add the same float32 numbers in another order: losses agree to some 1e-6. Relative to the change of the
# parameters, AdamW amplifies that rounding where a gradient is nearly 0, as for the biases of attention's keys.
LOSS = 1e-5
WAY = 0.001

END = """
if "--twice" in __import__("sys").argv:
    trainer.train(resume_from_checkpoint="checkpoints/checkpoint-6")
    loss = trainer.evaluate()["eval_loss"]
assert not any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in model.modules())
named = getattr(model, "body", model).named_parameters()
torch.save((loss, {name: each.detach() for name, each in named}), f"result.{hvd.rank()}")
"""
START = 'torch.save({name: each.detach() for name, each in model.named_parameters()}, f"start.{hvd.rank()}")\n'

# Replacements that make a program run in one process, without the engine's helper.
PLAIN = {
    "hvd.libraries.export_place()": "pass",
    "hvd.libraries.Trainer(": "__import__('transformers').Trainer(",
    'report_to="none",': 'report_to="none", use_cpu=True,',
    "hvd.libraries.Accelerator(": "__import__('accelerate').Accelerator(cpu=True, ",
    "hvd.libraries.lightning_strategy()": "'auto', accelerator='cpu'",
    "hvd.libraries.global_mean(": "torch.div(",
}
# Lightning shuffles in another order in one process than over ranks, so the single process gets the ranks' order.
SHUFFLED = "size(), shuffle=True)", "size(), sampler=torch.utils.data.DistributedSampler(training, 1, 0))"
# Errors that must be detected: the mean over a rank's own tokens; a Trainer that takes itself for alone.
WRONG = {"hvd.libraries.global_mean(": "torch.div("}
ALONE = PLAIN | {
    "train_dataset=training": "train_dataset=training[hvd.rank() :: hvd.size()], optimizers=(hvd.DistributedOptimizer("
    "torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), backward_passes_per_step=2), None)"
}


def change(program: str, changes: dict[str, str]) -> str:
    """Replace each key of `changes` by its value."""
    for old, new in changes.items():
        program = program.replace(old, new)
    return program


def run(program: str, ranks: int, *options: str, arguments: tuple[str, ...] = ()) -> list[tuple[float, Any, Any]]:
    """Run a program; return its losses, and its parameters before and after, by rank; RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "train.py")
        script.write_text(program + END, encoding="utf-8")
        launcher = ["-m", "engine.launch", "-np", str(ranks), *options, sys.executable] if ranks > 1 else []
        command = [sys.executable, *launcher, str(script), *arguments]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        results = [torch.load(Path(directory, f"result.{rank}")) for rank in range(ranks)]
        starts = [torch.load(Path(directory, f"start.{rank}")) for rank in range(ranks)]
        return [(loss, start, end) for (loss, end), start in zip(results, starts, strict=True)]


def distance(own: tuple[float, Any, Any], right: tuple[float, Any, Any]) -> tuple[float, float]:
    """Difference of the losses, and distance of the parameters relative to their change in training."""
    loss, _, parameters = own
    right_loss, start, right_parameters = right
    apart = sum(float((parameters[name] - each).pow(2).sum()) for name, each in right_parameters.items())
    way = sum(float((start[name] - each).pow(2).sum()) for name, each in right_parameters.items())
    return abs(loss - right_loss), (apart / way) ** 0.5


def check(name: str, program: str) -> list[str]:
    """Run a program and its wrong form; return the faults."""
    program = BEGINNING + START + program
    plain = change(program, PLAIN | (dict([SHUFFLED]) if "ightning" in name else {}))
    right = run(plain, 1)[0]
    found = []
    results = run(program, 2)
    if name == "Hugging Face Trainer":
        results += run(program, 2, "--no-torchrun-variables", arguments=("--twice",))
    for number, result in enumerate(results):
        apart = distance(result, right)
        print(f"{name}, rank {number % 2}: loss {result[0]:.5f}, {apart[0]:.1e} and {apart[1]:.1e} off", flush=True)
        if apart[0] > LOSS or apart[1] > WAY:
            found.append(f"{name}: rank {number % 2} has not the result of one process")
    alone = "libraries.Trainer(" in program
    wrong = distance(run(change(program, ALONE if alone else WRONG), 2, *["--no-torchrun-variables"] * alone)[0], right)
    print(f"{name}, wrong on purpose: {wrong[0]:.1e} and {wrong[1]:.1e} off", flush=True)
    if wrong[0] < 3 * LOSS or wrong[1] < 3 * WAY:
        found.append(f"{name}: the tolerance does not tell a wrong result")
    return found


def main() -> int:
    """Run each program, and print the failures."""
    assert COMMAND is not None and COMMAND[1].split() == ["enginerun", "-np", "2", "python", "train.py"]
    assert len(PROGRAMS) == 4
    failed = []
    for name, program in PROGRAMS.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        try:
            failed += check(name, program)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(f"{name}: {error}")
    print("\n".join(failed) if failed else "The programs of docs/how-to/libraries.md give the results of one process")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
