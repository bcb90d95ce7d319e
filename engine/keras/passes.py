"""Accumulation of gradients on this rank over several passes, before a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


class Passes:
    """Accumulator of gradients in variables of Keras, on all backends.

    If a step has one pass there are no variables, and each pass is a step.
    """

    def __init__(self, count: int, average: bool, dense: Callable[[Any], Any]) -> None:
        # Sums in the order of the trained variables, then the number of passes that they contain
        self.variables: list[Any] = []
        self._count = count  # number of passes in a step
        self._average = average  # whether to divide the sums by the number of passes
        self._dense = dense  # converts a sparse gradient to a dense one, and returns any other unchanged

    def create_variables(self, trained: Sequence[Any]) -> None:
        """Create the variables, if they are needed and do not exist yet."""
        if self._count == 1 or self.variables:
            return
        for each in trained:
            dtype, path = keras.backend.standardize_dtype(each.dtype), str(getattr(each, "path", None) or each.name)
            made = keras.Variable("zeros", tuple(each.shape), dtype, False, name=f"{path.replace('/', '_')}_sum")
            self.variables.append(made)
        self.variables.append(keras.Variable("zeros", (), "int32", False, name="passes"))

    def add_pass(self, gradients: list[Any], trained: Sequence[Any], step: Callable[[Sequence[Any]], None]) -> None:
        """Add the gradients of a pass, and call `step` with the sums if it was the last.

        `trained` are the variables of the gradients: all that the optimizer trains.
        """
        if self._count == 1:
            step(gradients)
            return
        *sums, passed = self.variables
        if len(sums) != len(trained):
            raise ValueError(
                f"backward_passes_per_step={self._count} adds up the gradients of all {len(sums)} variables of the "
                f"optimizer, but apply() was given those of {len(trained)}"
            )
        for each, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                each.assign_add(self._dense(gradient))
        passed.assign_add(1)

        def finish_step() -> None:
            found = [each.value for each in sums]
            step([None if old is None else new for old, new in zip(gradients, self._scale_sums(found), strict=True)])
            for each in (*sums, passed):
                each.assign(keras.ops.zeros_like(each))

        keras.ops.cond(keras.ops.equal(passed, self._count), finish_step, lambda: None)

    def stateless_add_pass(
        self,
        state: list[Any],
        gradients: list[Any],
        trained: list[Any],
        step: Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]],
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Add the gradients of a pass like `add_pass`, but without side effects on variables.

        `state` has the values of the optimizer's variables; the last ones are those of `variables`. `step` takes the
        values of the optimizer's own variables and the sums. It returns new values of `trained` and of the optimizer's
        own variables; this method those of `trained` and of `state`.
        """
        if self._count == 1:
            return step(state, gradients)
        rest = len(state) - len(self.variables)
        own, sums, passed = state[:rest], state[rest:-1], state[-1] + 1
        sums = [old if new is None else old + new for old, new in zip(sums, gradients, strict=True)]

        def finish_step() -> tuple[Any, ...]:
            mean = self._scale_sums(sums)
            given = [None if old is None else new for old, new in zip(gradients, mean, strict=True)]
            values, after = step(own, given)
            zeros = [keras.ops.zeros_like(each) for each in (*sums, passed)]
            return list(values), [*after, *zeros]

        return keras.ops.cond(
            keras.ops.equal(passed, self._count), finish_step, lambda: (trained, [*own, *sums, passed])
        )

    def _scale_sums(self, sums: Sequence[Any]) -> list[Any]:
        return [each / self._count for each in sums] if self._average else list(sums)
