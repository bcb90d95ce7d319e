"""Write the types of the functions that engine/frameworks/surface.py makes, or check that they are written.

python tools/write_stubs.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine.frameworks import surface

ROOT = Path(__file__).parents[1]
STUBS = {"engine/torch/ops.pyi": "torch.Tensor"}  # and the class of the tensors


def main(check: bool) -> int:
    """Write each stub; with `check` tell of those that would change."""
    stale = False
    for name, tensor in STUBS.items():
        ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", name, "-"]
        text = subprocess.run(
            ruff, input=surface.stub(tensor), cwd=ROOT, text=True, capture_output=True, check=True
        ).stdout
        if not check:
            (ROOT / name).write_text(text)
        elif (ROOT / name).read_text() != text:
            print(f"{name} is not what the table of functions gives: python tools/write_stubs.py")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
