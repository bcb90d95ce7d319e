"""The compatibility switch: `import horovod.torch` gives `engine.torch`, in scripts that are not changed.

So do `horovod.tensorflow`, `horovod.tensorflow.keras`, `horovod.keras` and `horovod.mxnet` with their bindings.

    enginerun -np 4 --horovod python train.py        # in every process of the job
    python -m engine.compat train.py                 # in this process, and in those that it starts

There is no package of that name on any path, and without the switch nothing changes. `modules` has the names and the
finder, `switch` brings it into the processes that a command starts, `startup` is what it puts on their path.
"""

from __future__ import annotations

from .modules import install

__all__ = ["install"]
