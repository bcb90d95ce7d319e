"""Runs the programs of docs/libraries.md on two ranks, as they are printed. `make recipes` installs what they need."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "libraries.md").read_text(encoding="utf-8")
BEGINNING = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
PROGRAMS = dict(re.findall(r"^## ([^\n]*)\n+```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMAND = re.search(r"^```\n(enginerun [^\n]*)\n```", PAGE, re.MULTILINE)
# What must be true at the end: the ranks agree, though their data did not, and the model has learnt.
END = """
assert not any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
hvd.check_consistency({name: each.detach() for name, each in model.named_parameters()})
with torch.no_grad():
    loss = mse_loss(getattr(model, "body", model)(x), y).item()
assert loss < 0.5 * y.var().item(), loss
print(f"rank {hvd.rank()}: loss {loss:.3f} of {y.var().item():.3f}")
"""


def main() -> int:
    """Run each program, and say which fails."""
    assert COMMAND is not None and PROGRAMS
    _, *options = COMMAND[1].split()
    failed = []
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, options[-1])
            script.write_text(BEGINNING + program + END, encoding="utf-8")
            command = [sys.executable, "-m", "engine.launch", *options[:-2], sys.executable, str(script)]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=150, check=False)
        said = re.findall(r"rank \d+: loss [^\n]*", done.stdout)
        print(f"{name}: {'; '.join(said) if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
        if done.returncode or len(said) != 2:
            failed.append(name)
            print(done.stdout[-2000:], done.stderr[-6000:], flush=True)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(PROGRAMS)} programs work")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
