"""Every framework that scripts of Horovod may use: one row each, whether it has a binding or not.

It needs neither a framework nor the native engine: the launcher reads it, too.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Framework(NamedTuple):
    """One framework.

    Attributes
    ----------
    package : str
        That its users import; its binding has the same name, below `engine`, as Horovod's has below `horovod`.
    title : str
        As it is written.
    bound : bool
        Whether there is a binding.
    optimizers : str
        Where the optimizers come from that `DistributedOptimizer` takes.
    modules : str
        Modules of Horovod's binding that scripts import names from.
    absent : str
        Why there is no binding, if that is not for lack of time.
    """

    package: str
    title: str
    bound: bool = False
    optimizers: str = ""
    modules: str = ""
    absent: str = ""


FRAMEWORKS = (
    Framework(
        "torch",
        "PyTorch",
        bound=True,
        optimizers="torch.optim",
        modules="compression functions mpi_ops optimizer sync_batch_norm",
    ),
    Framework("tensorflow", "TensorFlow"),
    Framework("keras", "Keras"),
    Framework("mxnet", "MXNet", absent="MXNet is no longer developed, and there is no binding for it"),
)
BOUND = {each.package: each for each in FRAMEWORKS if each.bound}


def bound_to(kind: type) -> Framework | None:
    """The framework with a binding, if any, that a class belongs to by its name."""
    return BOUND.get(kind.__module__.partition(".")[0])


def binding_of(framework: Framework) -> ModuleType:
    """The binding of a framework, imported."""
    return import_module(f"..{framework.package}", __package__)
