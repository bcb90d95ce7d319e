"""State of a wrapped optimizer of Keras, which reduces its gradients, and runs the checks of its first step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import keras
import numpy as np

from ..collectives import objects
from ..collectives.compression import Scheme, resolve
from ..collectives.process_sets import Numbers
from ..collectives.reduce_ops import Adasum, Max
from ..frameworks.agreement import Pairing, claim_name, compares_gradients, in_groups
from ..frameworks.first_step import FirstStep
from ..frameworks.options import ReductionOptions
from .names import names_of
from .passes import Passes

BACKENDS = ("tensorflow", "torch", "jax")
BROADCAST = (
    "fit() with engine.keras.callbacks.BroadcastGlobalVariablesCallback({root}) among its callbacks, or "
    "engine.keras.broadcast_global_variables({root}, model)"
)


class Local:
    """Variables that each rank trains by itself."""

    def __init__(self) -> None:
        self.layers: list[Any] = []  # layers whose variables are local; they need not be built yet
        self._variables: list[Any] = []

    def add(self, variable: Any) -> None:
        """Add a local variable."""
        self._variables.append(variable)

    def collect_ids(self) -> set[int]:
        """Return the ids of the existing local variables; layers have theirs once they are built."""
        return {id(each) for each in (*self._variables, *(own for layer in self.layers for own in layer.variables))}


class KerasWrapping:
    """State of one wrapping; further arguments are those of `ReductionOptions.from_arguments`."""

    def __init__(self, optimizer: Any, *, scale_local_gradients: bool = True, **options: Any) -> None:
        self.kind = type(optimizer)  # class of the optimizer before it was wrapped
        self.options = ReductionOptions.from_arguments(**options)
        self._optimizer = weakref.ref(optimizer)
        self._pairing = Pairing(self.options)
        _check(self.options)
        self.local = Local()
        self.inside = False  # whether the optimizer's own code is running, with gradients that were reduced already
        self._begun_in: Numbers | None = None
        # Whether to divide the gradients of local variables by the number of ranks
        self._scale_local = scale_local_gradients
        self._backend = _import_backend()
        self.number, self._prefix = -1, ""  # Claimed by the first reduction, since a wrapped optimizer may be unused.
        self.passes = Passes(self.options.passes, self.options.average_passes, self._backend.to_dense)

    @contextmanager
    def enter_optimizer(self) -> Iterator[None]:
        """Context in which the optimizer's own code runs: without the variables of passes, and without reductions."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients of a step over the ranks; they may be overwritten. Collective."""
        reduced = list(gradients)
        process_set = self.options.process_set
        if not process_set.included():
            return reduced  # This rank trains by itself.
        if not self.begun:
            self._start_in_world(gradients, variables)
        names = self._name_gradients(variables)
        order = self._pairing.agree_on_order(names, lambda: self._describe(names, gradients, variables))
        local = self.local.collect_ids()
        ordinary: list[int] = []
        overwriting: list[int] = []  # new values of float8 scales, not gradients, of which the maximum suits all ranks
        for index in order:
            gradient, variable = gradients[index], variables[index]
            if id(variable) in local:
                if self._scale_local and gradient is not None:
                    reduced[index] = self._backend.divide_gradient(gradient, process_set.size())
            else:
                (overwriting if getattr(variable, "overwrite_with_gradient", False) else ordinary).append(index)
        largest = replace(self.options, op=Max, prescale=1.0, postscale=1.0)
        for options, indices in (largest, overwriting), (self.options, ordinary):
            if any(gradients[index] is not None for index in indices):
                results = self._backend.reduce(
                    [gradients[index] for index in indices],
                    [names[index] for index in indices],
                    options,
                    self.number if options is self.options or not ordinary else -1,
                    self._locate_groups([variables[index] for index in indices]),
                )
                for index, result in zip(indices, results, strict=True):
                    reduced[index] = result
        return reduced

    def _locate_groups(self, variables: Sequence[Any]) -> list[list[int]] | None:
        """Return the user's groups as positions in `variables`; None if there are none."""
        if self.options.groups is None:
            return None
        places = {id(each): index for index, each in enumerate(variables)}
        return [[places[id(each)] for each in group if id(each) in places] for group in self.options.groups]

    def _name_gradients(self, variables: Sequence[Any]) -> list[str]:
        """Return names of the variables' gradients."""
        return [f"{self._prefix}.{name}" for name in names_of(variables)]

    @property
    def begun(self) -> bool:
        """Return whether the ranks of this world have compared their gradients and options."""
        return self._begun_in is self.options.process_set.numbers

    def _start_in_world(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Claim a number, and compare gradients, options and values of variables between ranks. Collective."""
        self.number, self._prefix = claim_name(self.options)
        names = self._name_gradients(variables)
        self._pairing.agree_on_order(names, lambda: self._describe(names, gradients, variables))
        if compares_gradients() and self.options.check_parameters:
            first = FirstStep(self._prefix + ".", self.options.process_set, BROADCAST)
            values = {name: self._backend.read_value(each) for name, each in zip(names, variables, strict=True)}
            first.send_checksums({name: view_bytes(value) for name, value in values.items() if value is not None})
            first.finish()
        self._begun_in = self.options.process_set.numbers

    def _describe(self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]) -> objects.Described:
        """Describe the variables by name, and the optimizer's settings, for the comparison between ranks."""
        local = self.local.collect_ids()
        described = {}
        ends = in_groups(names, self._locate_groups(variables))
        for name, gradient, variable, end in zip(names, gradients, variables, ends, strict=True):
            text = f"{keras.backend.standardize_dtype(variable.dtype)}{list(variable.shape)}"
            how = " that is local" if id(variable) in local else " without a gradient" if gradient is None else ""
            described[name] = text + how + end, 0
        optimizer = self._optimizer()
        return described if optimizer is None else described | _settings_of(optimizer)


def _settings_of(optimizer: Any, prefix: str = "optimizer.") -> objects.Described:
    """Describe the settings of an optimizer that are not variables, such as momentum, clipping and schedule.

    Variables, such as a learning rate without a schedule, are broadcast with the others.
    """
    found: objects.Described = {}
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    parameters = {each for make in makers for each in inspect.signature(make).parameters}
    for name, value in vars(optimizer).items():
        plain = value if isinstance(value, list | tuple) else [value]
        if (
            name in parameters
            and name != "name"
            and all(isinstance(each, bool | int | float | str | None) for each in plain)
        ):
            found[prefix + name] = repr(value), 0
    schedule = getattr(optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        found |= _settings_of(schedule, f"{prefix}learning_rate.")
    inner = getattr(optimizer, "inner_optimizer", None)
    return found if inner is None else found | _settings_of(inner, f"{prefix}inner_optimizer.")


def view_bytes(value: Any) -> np.ndarray[Any, Any]:
    """Return the bytes of an array of any dtype."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _check(options: ReductionOptions) -> None:
    """Raise ValueError for options that only other bindings support."""
    if options.op is Adasum:
        raise ValueError("op=Adasum combines what whole steps change, which Keras does not expose: use op=Average")
    if isinstance(options.compression, Scheme):
        raise ValueError(
            f"{type(options.compression).__name__} is for engine.torch: with Keras use Compression.fp16, bf16, "
            "fp8, tuned or tuned8"
        )
    resolve(options.compression, options.op)


def _import_backend() -> Any:
    """Import the module that reduces gradients of the backend that Keras uses; no other is imported."""
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise ValueError(
            f"Keras runs on the backend {backend!r}, for which this version reduces no gradients: set KERAS_BACKEND to "
            f"{' or '.join(BACKENDS)} before Keras is imported"
        )
    return import_module(f".reduce_{backend}", __package__)
