"""Compatibility switch: with it, `import horovod.torch` gives `engine.torch` in unchanged scripts.

The same holds for `horovod.tensorflow`, `horovod.tensorflow.keras`, `horovod.keras` and `horovod.mxnet`.

    enginerun -np 4 --horovod python train.py        # in every process of the job
    python -m engine.compat train.py                 # in this process, and in those that it starts

No package of that name is on any path, and without the switch nothing changes. `modules` has the names and the
finder; `startup` is a directory that enables it in each Python that has it on its path (`engine.host.python_startup`).
"""

from __future__ import annotations

from .modules import install

__all__ = ["install"]
