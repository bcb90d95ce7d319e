"""Packages that a test's program need not import, though its framework imports them where they are installed.

TensorFlow imports JAX, and Keras imports scikit-learn, matplotlib and pandas, if they are there. They account for
nearly half of the processor time of `import keras`. Both frameworks work without them, as for users who have not
installed them; tests of several frameworks in one process leave none of them out.
"""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).parent
EXTRAS = ("matplotlib", "pandas", "sklearn")
NAMES = ("jax", *EXTRAS)


def leaving_out(*names: str) -> dict[str, str]:
    """Environment variables under which a Python finds none of the packages, which are some of `NAMES`."""
    assert set(names) <= set(NAMES)
    return {"PYTHONPATH": os.pathsep.join(str(_HERE / name) for name in names)}
