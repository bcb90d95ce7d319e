"""Every framework that has a binding: one row each, by which all that depends on a framework finds it.

Whose tensor a tensor is, whose optimizer an optimizer is, which of Horovod's modules there are, what `--check-build`
shows: all of it is read from here. The table needs neither a framework nor the native engine.
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
    optimizers : str
        The class of the optimizers that `DistributedOptimizer` takes.
    others : str
        Further packages that its tensors and optimizers come from.
    modules : str or None
        Modules of Horovod's binding that scripts import names from; None if the compatibility switch knows none of it.
    """

    package: str
    title: str
    optimizers: str
    others: str = ""
    modules: str | None = None


# In the order in which they are asked whose an optimizer is: one of Keras has classes of its backend among its bases.
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
    """The framework with a binding, if any, that a class belongs to by the package it was defined in."""
    return _OF_PACKAGE.get(kind.__module__.partition(".")[0])


def framework_of(value: object) -> Framework | None:
    """The framework with a binding, if any, that the class of a value belongs to, or one of its bases."""
    found = {framework for kind in type(value).__mro__ if (framework := bound_to(kind)) is not None}
    return next((each for each in BOUND.values() if each in found), None)


def binding_of(framework: Framework) -> ModuleType:
    """The binding of a framework, imported."""
    return import_module(f"..{framework.package}", __package__)
