"""Reduction of the gradients of one tape or optimizer, with its options and its local variables."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..collectives import objects
from ..collectives.compression import Scheme, resolve
from ..collectives.process_sets import Numbers
from ..errors import EngineError, WorldError
from ..errors.formatting import format_whole_exception
from ..frameworks.agreement import compares_gradients, in_groups, places_of, unique_names
from ..frameworks.options import ReductionOptions
from . import op
from .names import key_of, name_of, once_in_graph
from .reduce import reduce_gradients

# Number of an optimizer, and the variables' names in the common order of all ranks; the key is the set of these names.
_Numbers = dict[frozenset[str], tuple[int, list[str]]]

# Numbers of the tapes of a process set in a world. A tape lives for one step; the next tape for the same variables
# continues to count the same steps.
_tapes: weakref.WeakKeyDictionary[Numbers, _Numbers] = weakref.WeakKeyDictionary()


class GradientReduction:
    """Reduction of gradients with checked options; an invalid compression or invalid groups raise TypeError.

    Number and name prefix identify an optimizer's steps and operations. A tape has no number; the number of its steps
    then depends on the variables.
    """

    def __init__(
        self, options: ReductionOptions, scale_local: bool = True, number: int | None = None, prefix: str = "gradient."
    ) -> None:
        if isinstance(options.compression, Scheme):
            raise TypeError(
                f"{type(options.compression).__name__} is a scheme, which goes with engine.torch alone: give "
                "Compression.none, .fp16, .bf16, .fp8, .tuned, .tuned8, or a compressor"
            )
        resolve(options.compression, options.op)
        self.options = options
        self._scale_local = scale_local  # whether to divide local gradients by the number of ranks
        self._number = number
        self._prefix = prefix
        self._local: dict[int, Any] = {}  # local variables by key, kept alive so that the keys stay unique
        self._paused = False
        # Numbers of an optimizer, by the variables that it has reduced so far, for each world.
        self._numbers: weakref.WeakKeyDictionary[Numbers, _Numbers] = weakref.WeakKeyDictionary()
        self._groups = None if options.groups is None else _keys(options.groups)

    @property
    def active(self) -> bool:
        """Return whether gradients are reduced: this rank is in the process set, and reductions are not paused."""
        return not self._paused and self.options.process_set.included()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause reductions inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def register_local(self, variable: Any) -> None:
        """Exclude the gradient of a variable from reductions, as local to this rank."""
        self._local[key_of(variable)] = variable

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], generic_names: bool = False) -> list[Any]:
        """Reduce the gradients of variables; variables without a gradient keep None. Collective.

        For a new set of variables, the ranks first compare which of them have a gradient, and of which kind. They do so
        even while a function is traced. `generic_names` names the operations by the variables' positions, not by their
        names.

        Raises MismatchError if the ranks' variables or their gradients differ. While a function is traced it is a
        `tf.errors.FailedPreconditionError` with the same text.
        """
        if not self.active:
            return list(gradients)
        gradients = [self._prepare_gradient(*each) for each in zip(gradients, variables, strict=True)]
        names = [str(place) for place in range(len(variables))] if generic_names else _name_sources(variables)
        number, order = self._agree_on_order(names, gradients, variables)
        shared = [k for k in order if key_of(variables[k]) not in self._local]
        reduced = reduce_gradients(
            [gradients[k] for k in shared],
            [once_in_graph(self._prefix + names[k]) for k in shared],
            self.options,
            prefix="",
            num_groups=self.options.num_groups,
            groups=self._locate_groups(variables, shared),
            optimizer=number,
        )
        results = (
            [self._scale_local_gradient(each) for each in gradients] if len(shared) < len(names) else list(gradients)
        )
        for k, result in zip(shared, reduced, strict=True):
            results[k] = result
        return results

    def _prepare_gradient(self, gradient: Any, variable: Any) -> Any:
        """Return a gradient with a static shape in a graph, since ranks divide gradients into groups by shape."""
        if self.options.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.Tensor) and not tf.executing_eagerly():
            gradient.set_shape(variable.shape)
        if gradient is None or isinstance(gradient, tf.Tensor | tf.IndexedSlices):
            return gradient
        raise TypeError(
            f"the gradient of {name_of(variable, 'a source')!r} is a {type(gradient).__qualname__}, which is not "
            "reduced: give the tensors that it consists of as sources"
        )

    def _locate_groups(self, variables: Sequence[Any], shared: Sequence[int]) -> list[list[int]] | None:
        """Return the groups as positions among the gradients that are reduced."""
        if self._groups is None:
            return None
        places = {key_of(variables[k]): place for place, k in enumerate(shared)}
        found = [[places[key] for key in group if key in places] for group in self._groups]
        return [group for group in found if group]

    def _agree_on_order(
        self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> tuple[int, list[int]]:
        """Return the number of the optimizer, and the common order of the variables on all ranks.

        A new set of variables is compared between ranks.
        """
        process_set = self.options.process_set
        numbers = (self._numbers if self._number is not None else _tapes).setdefault(process_set.numbers, {})
        key = frozenset(names)
        if key not in numbers:
            agreed = list(names)
            if compares_gradients():
                ends = in_groups(names, self._locate_groups(variables, range(len(variables))))
                described = {"the options": (str(self.options), 0)}
                for name, gradient, variable, end in zip(names, gradients, variables, ends, strict=True):
                    described[name] = self._describe(gradient, variable) + end, 0
                title = "the ranks reduce gradients of different variables, or in other ways"
                agreed = [name for name in self._compare_over_ranks(described, title) if name in key]
            number = process_set.numbers.next("optimizer") if self._number is None else self._number
            numbers[key] = number, agreed
        number, agreed = numbers[key]
        return number, places_of(agreed, names)

    def _compare_over_ranks(self, described: dict[str, tuple[str, int]], title: str) -> list[str]:
        try:
            return objects.compare_descriptions(described, title, f"{self._prefix}variables", self.options.process_set)
        except EngineError as error:
            if tf.executing_eagerly():
                raise
            # Tracing replaces exceptions unless their class is one of Python's or TensorFlow's.
            told = format_whole_exception(error)
            kind = tf.errors.AbortedError if isinstance(error, WorldError) else tf.errors.FailedPreconditionError
            raise kind(None, None, told) from error

    def _describe(self, gradient: Any, variable: Any) -> str:
        if key_of(variable) in self._local:
            return "a variable of its own"
        text = f"{tf.as_dtype(variable.dtype).base_dtype.name}{list(variable.shape)}"
        if gradient is None:
            return f"{text} without a gradient"
        return f"{text} with a sparse gradient" if isinstance(gradient, tf.IndexedSlices) else text

    def _scale_local_gradient(self, gradient: Any) -> Any:
        """Divide a local gradient by the number of ranks, as an average would, if `scale_local` is set."""
        if gradient is None or not self._scale_local:
            return gradient
        ranks = op.read_rank_and_size(self.options.process_set.call_number)[1]
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


def _name_sources(variables: Sequence[Any]) -> list[str]:
    return unique_names(name_of(each, f"source {place}") for place, each in enumerate(variables))


def _keys(groups: Any) -> list[list[int]]:
    """Check groups of variables, and convert them to groups of keys."""
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise TypeError(
            f"groups is a list of lists of variables, whose gradients travel together, not {groups!r}; give num_groups "
            "for a number of groups"
        )
    keys = [[key_of(each) for each in group] for group in groups]
    if len({key for group in keys for key in group}) < sum(map(len, keys)):
        raise ValueError("groups has a variable twice, whose gradient would be reduced twice")
    return keys
