"""Write the type stubs of the functions that engine/frameworks/surface.py generates, or check that they are current.

python tools/write_stubs.py [--check]
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from engine.frameworks import surface

ROOT = Path(__file__).parents[1]
STUBS = {  # files, with the class of the tensors
    "engine/jax/ops.pyi": "jax.Array",
    "engine/mxnet/ops.pyi": "mxnet.nd.NDArray",
    "engine/tensorflow/collectives.pyi": "tensorflow.Tensor",
    "engine/torch/ops.pyi": "torch.Tensor",
}


def main(check: bool) -> int:
    """Write each stub; with `check`, report those that would change instead."""
    stale = False
    for name, tensor in STUBS.items():
        ruff = [str(Path(sys.executable).with_name("ruff")), "format", "--stdin-filename", name, "-"]
        stub = surface.render_stub(tensor, read_orders(ROOT / name.removesuffix("i")))
        text = subprocess.run(ruff, input=stub, cwd=ROOT, text=True, capture_output=True, check=True).stdout
        if not check:
            (ROOT / name).write_text(text)
        elif (ROOT / name).read_text() != text:
            print(f"{name} is not what the table of functions gives: python tools/write_stubs.py")
            stale = True
    return int(stale)


def read_orders(module: Path) -> dict[str, str]:
    """Return the argument orders of a binding: its constant `ORDERS`, read without importing it, or Horovod's."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ORDERS":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    return surface.ORDERS


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
