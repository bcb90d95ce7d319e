"""Run the example in the variable EXAMPLE with this program's options, and save the parameters of its model.

Lightning starts further ranks with the command line of the first: this has no words of its own, and keeps `sys.argv`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    example = Path(os.environ["EXAMPLE"])
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(example)}
    exec(compile(example.read_text(encoding="utf-8"), str(example), "exec"), names)
    parameters = [each.detach().numpy().ravel() for each in names["model"].parameters()]
    path = Path(os.environ["HERE"], f"parameters-{os.environ.get('LOCAL_RANK', 0)}")
    part = path.with_suffix(".part")
    part.write_bytes(np.concatenate(parameters).tobytes())
    part.rename(path)
