"""Optimizers of MXNet, and a trainer of gluon, that reduce gradients over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet
from mxnet import gluon

from ..collectives import groups, objects
from ..collectives.compression import Compression, Scheme
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average
from ..errors import EngineError
from ..frameworks.agreement import Pairing, claim_name, expect_agreement, unique_names
from ..frameworks.first_step import FirstStep
from ..frameworks.optimizer import derive_class, expect_unwrapped
from ..frameworks.options import ReductionOptions
from ..text import logs

BROADCAST = "engine.mxnet.broadcast_parameters(net.collect_params(), root_rank={root})"


class OptimizerReduction:
    """Reduction of the gradients of one optimizer. Its construction is collective.

    It takes the arguments of `DistributedOptimizer`.
    """

    def __init__(self, **given: Any) -> None:
        self.options = options = ReductionOptions.from_arguments(**given)
        if options.op is Adasum or isinstance(options.compression, Scheme):
            what = "op=Adasum" if options.op is Adasum else type(options.compression).__name__
            raise ValueError(f"the binding of MXNet has no {what}: leave it out, or train with engine.torch")
        self.included = options.process_set.included()  # if False, this rank trains by itself
        self.number, self.prefix = claim_name(options)
        self._pairing = Pairing(options)
        self._marking: str | None = None  # name of the first call in a step
        if self.included:
            expect_agreement(options, {})

    def reduce(self, gradients: Sequence[Any], names: Sequence[str]) -> None:
        """Reduce gradients in place, as one group, once MXNet has computed them. Collective.

        Ranks compare names, dtypes and shapes when the names occur for the first time, and use the same order.
        """
        if not self.included or not gradients:
            return
        options = self.options
        names = unique_names(names)
        described = dict(zip(names, gradients, strict=True))
        order = self._pairing.agree_on_order(
            names, lambda: {name: (objects.describe(name, each), 0) for name, each in described.items()}
        )
        name = f"{names[order[0]]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        groups.grouped_allreduce_(
            [gradients[place] for place in order],
            options.op,
            f"{self.prefix}.{name}",
            options.prescale,
            options.postscale,
            options.process_set,
            options.compression,
        )
        self._marking = self._marking or name
        if name == self._marking:
            options.process_set.engine.mark_step(self.number)


class DistributedMethods:
    """Methods that wrapping adds to the class of an optimizer of MXNet."""

    _engine: OptimizerReduction
    _kind: type
    _reduced = False  # True inside `update_multi_precision`, which may call `update`

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> Any:
        """Reduce gradients over all ranks, and update weights like the optimizer's own method."""
        if not self._reduced:
            self._reduce(index, grad)
        return super().update(index, weight, grad, state)  # type: ignore[misc]

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> Any:
        """Reduce gradients over all ranks, and update weights like the optimizer's own method."""
        self._reduce(index, grad)
        self._reduced = True
        try:
            return super().update_multi_precision(index, weight, grad, state)  # type: ignore[misc]
        finally:
            self._reduced = False

    def _reduce(self, index: Any, grad: Any) -> None:
        """Reduce the gradients of one call, which has one gradient or a list of them."""
        several = isinstance(index, list | tuple)
        known = self.idx2name  # type: ignore[attr-defined]
        names = [str(known.get(each, each)) for each in (index if several else [index])]
        self._engine.reduce(list(grad) if several else [grad], names)

    def unwrap(self) -> Any:
        """Restore the optimizer's own class. Returns the optimizer."""
        self.__class__ = self._kind
        del self._engine
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copied or unpickled optimizer is a plain one.
        state = {name: value for name, value in vars(self).items() if name != "_engine"}
        return object.__new__, (self._kind,), state


def DistributedOptimizer(
    optimizer: Any,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: Any = Compression.none,
    op: int = Average,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before it uses them. Collective.

    With gluon use `DistributedTrainer`, which reduces all gradients of a step at once. This function is for the
    `Module` API and for loops that call an updater; each call of the optimizer's `update` is collective.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        Optimizer to wrap. It stays the same object; its class becomes a subclass of the same name.
    gradient_predivide_factor : float
        Divisor of the ranks' gradients before they are added, with `Average`; the sum is divided by the world size over
        this factor.
    num_groups : int
        Accepted for existing scripts, and without effect: gradients of one call are sent together.
    process_set : ProcessSet
        Process set whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`, or a compressor of one's own.
    op : Op
        `Average`, `Sum`, `Min`, `Max` or `Product`.

    Returns
    -------
    mxnet.optimizer.Optimizer
        `optimizer`, with `unwrap()`. A copy or a pickle of it is a plain optimizer.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer.
    ValueError
        A number is out of range, `op` is Adasum, or the optimizer is wrapped already.
    MismatchError
        The ranks' options differ.
    """
    if isinstance(optimizer, gluon.Trainer):
        raise TypeError("DistributedOptimizer takes an mxnet.optimizer.Optimizer; for gluon use DistributedTrainer")
    if not isinstance(optimizer, mxnet.optimizer.Optimizer):
        raise TypeError(f"expected an mxnet.optimizer.Optimizer, not {type(optimizer).__qualname__}")
    expect_unwrapped(optimizer, DistributedMethods)
    engine = OptimizerReduction(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        process_set=process_set,
    )
    kind = type(optimizer)
    optimizer.__class__ = derive_class(DistributedMethods, kind, {"_kind": kind})
    optimizer._engine = engine
    return optimizer


class DistributedTrainer(gluon.Trainer):
    """gluon's `Trainer`, with gradients that are reduced over all ranks in each `step` or `allreduce_grads`.

    Its construction is collective. The batch size that is passed to `step` is that of this rank, since gradients are
    averaged over ranks.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Parameters on one context in main memory, with dense values and gradients.
    optimizer : str or mxnet.optimizer.Optimizer
        Plain optimizer, or its name. A wrapped one is unwrapped, with a warning.
    optimizer_params : dict, optional
        Arguments of an optimizer that is given by its name.
    compression, gradient_predivide_factor, num_groups, process_set, op
        Same as for `DistributedOptimizer`.
    prefix : str, optional
        Accepted for existing scripts, and without effect: trainers are distinguished by their order.
    check_parameters : bool
        Whether to compare the ranks' parameters in the first step, once, and log a warning if they differ.

    Raises
    ------
    EngineError
        Parameters are on several contexts, or sparse.
    ValueError, MismatchError
        Same as for `DistributedOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        op: int = Average,
        check_parameters: bool = True,
    ) -> None:
        if isinstance(optimizer, DistributedMethods):
            logs.logger.warning("DistributedTrainer reduces the gradients itself: its optimizer has been unwrapped")
            optimizer.unwrap()
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if len(self._contexts) > 1:
            raise EngineError(f"parameters on {self._contexts}: a rank has one context here; start more ranks instead")
        if self._contains_sparse_weight or self._contains_sparse_grad:
            raise EngineError("DistributedTrainer takes dense parameters with dense gradients: leave out sparse_grad")
        self._reduction = OptimizerReduction(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            process_set=process_set,
        )
        self._first: FirstStep | None = None
        self._begun = not (check_parameters and self._reduction.included)

    def _allreduce_grads(self) -> None:
        """Reduce all gradients as one group. gluon calls this in `step` and in `allreduce_grads`."""
        trained = [each for each in self._params if each.grad_req != "null"]
        if not self._begun:
            self._begun = True
            self._first = FirstStep(f"{self._reduction.prefix}.", self._reduction.options.process_set, BROADCAST)
            self._first.send_checksums({each.name: each.list_data()[0] for each in trained})
        self._reduction.reduce([each.list_grad()[0] for each in trained], [each.name for each in trained])
        if self._first is not None and self._first.tell():
            self._first = None
