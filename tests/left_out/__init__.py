"""Packages that a program of a test need not import, though its framework does where they are installed.

TensorFlow imports JAX, and Keras scikit-learn, matplotlib and pandas, if they are there. Of the seconds of processor
that `import keras` takes that is nearly half. Both frameworks do without, as with users who have not installed them;
tests of several frameworks in one process leave none of them out.
"""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).parent
EXTRAS = ("matplotlib", "pandas", "sklearn")
NAMES = ("jax", *EXTRAS)


def leaving_out(*names: str) -> dict[str, str]:
    """Variables under which a Python finds none of the packages.

    Parameters
    ----------
    *names : str
        Some of `NAMES`.
    """
    assert set(names) <= set(NAMES)
    return {"PYTHONPATH": os.pathsep.join(str(_HERE / name) for name in names)}
