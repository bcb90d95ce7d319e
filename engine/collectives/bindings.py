"""Table of all frameworks with a binding, one row each.

It maps tensors and optimizers to their frameworks, and lists Horovod's modules and the frameworks that `--check-build`
shows. It needs neither a framework nor the native engine.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Framework(NamedTuple):
    """One framework with a binding."""

    package: str  # package that users import; its binding has the same name below `engine`, as in `horovod`
    title: str  # name of the framework in texts
    optimizers: str  # class of the optimizers that `DistributedOptimizer` accepts
    others: str = ""  # further packages that define its tensors and optimizers
    # Modules of Horovod's binding from which scripts import names; None: not in the compatibility switch
    modules: str | None = None


# In the order of precedence for optimizers: those of Keras have classes of their backend among their bases.
FRAMEWORKS = (
    Framework("keras", "Keras", "keras.optimizers.Optimizer", modules=""),
    Framework(
        "tensorflow",
        "TensorFlow",
        "tf.compat.v1.train.Optimizer",
        modules="compression functions mpi_ops sync_batch_norm util",
    ),
    Framework(
        "torch", "PyTorch", "torch.optim.Optimizer", modules="compression functions mpi_ops optimizer sync_batch_norm"
    ),
    Framework("jax", "JAX", "optax.GradientTransformation", others="jaxlib optax"),
    Framework("mxnet", "MXNet", "mxnet.optimizer.Optimizer", modules="compression functions mpi_ops"),
)
BOUND = {each.package: each for each in FRAMEWORKS}
_OF_PACKAGE = {package: each for each in BOUND.values() for package in (each.package, *each.others.split())}


def bound_to(kind: type) -> Framework | None:
    """Return the framework with a binding, if any, whose package defines a class."""
    return _OF_PACKAGE.get(kind.__module__.partition(".")[0])


def framework_of(value: object) -> Framework | None:
    """Return the framework with a binding, if any, whose package defines the class of a value or one of its bases."""
    found = {framework for kind in type(value).__mro__ if (framework := bound_to(kind)) is not None}
    return next((each for each in BOUND.values() if each in found), None)


def binding_of(framework: Framework) -> ModuleType:
    """Import and return the binding of a framework."""
    return import_module(f"..{framework.package}", __package__)
