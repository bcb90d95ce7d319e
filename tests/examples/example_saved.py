"""Run the example in the variable EXAMPLE with this program's options, and save the parameters of its model.

Lightning starts further ranks with the command line of the first, so that this must have no words of its own.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    model = runpy.run_path(os.environ["EXAMPLE"], run_name="__main__")["model"]
    parameters = [each.detach().numpy().ravel() for each in model.parameters()]
    path = Path(os.environ["HERE"], f"parameters-{os.environ.get('LOCAL_RANK', 0)}")
    part = path.with_suffix(".part")
    part.write_bytes(np.concatenate(parameters).tobytes())
    part.rename(path)
