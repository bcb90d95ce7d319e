"""Programs of ranks for tests of the tuner with gradients on GPUs, which are stand-ins.

python -m tests.gpu.tuning_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import time

import numpy as np

import engine
from engine.native import gradients
from engine.session import runtime
from engine.tuning.knobs import OF_HOST_MEMORY

from .allreduce_programs import OPS, Binding, Parameter, compare, core, main, values
from .device_tensors import DeviceTensor
from .plane_programs import Rank

SECONDS = 45.0


def searches(me: Rank, log: str) -> None:
    """Train until a search is over: gradients are right under each setting, and knobs of host memory stay."""
    me.cuda.stand_hosts_are_one(1)
    few = {"autotune_warmup": 0, "autotune_steps": 2, "autotune_trials": 5, "autotune_cache": False}
    with me.world("searches", autotune=True, autotune_log=log, **few):
        parameters = [Parameter(1000 + k) for k in range(8)]
        group = gradients.GradientGroup(core(), Binding(parameters), OPS["sum"], number=1)
        hooks = [group.add(parameter, f"parameter {k}", None) for k, parameter in enumerate(parameters)]
        end, over, seen = time.monotonic() + SECONDS, np.zeros(1, np.float32), []
        while not over[0]:
            for hook, parameter in zip(hooks, parameters, strict=True):
                parameter.grad = DeviceTensor(values(me.rank, parameter.count, "float32"), late=0.1)
                hook(parameter)
            group.finish()
            for parameter in parameters:
                wanted = np.add.reduce([values(rank, parameter.count, "float32") for rank in range(me.size)])
                compare(parameter.grad.numpy(), wanted, f"{engine.knobs()}")
            if engine.knobs() not in seen:
                seen.append(engine.knobs())
            late = time.monotonic() > end
            over[0] = me.rank == 0 and (late or not runtime.owner.session.tuning.searching)  # type: ignore[union-attr]
            over = engine.allreduce(over, name="over", op=engine.Max)
        assert not late, f"the search is not over within {SECONDS} s"
    host = [{name: knobs[name] for name in OF_HOST_MEMORY & knobs.keys()} for knobs in seen]
    assert all(each == host[0] for each in host), host
    assert len(seen) > 1, "nothing was tried"


if __name__ == "__main__":
    main({"searches": searches})
