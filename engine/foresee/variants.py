"""Recorded steps as another job would make them: with another compression, or with local steps. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..frameworks.fragments import split_parameters
from .model import Network, Prediction, Rules, Step, Tensor, predict

COMPRESSIONS = ("none", "fp16", "bf16", "fp8")
PERIODS = 10
"""Synchronisations of a parameter in a prediction with a delay, where one may still travel when the next begins."""
# Bytes of an element, if a compression may shorten it.
_FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Bytes of an element that travels compressed.
_TRAVELLING = {"fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class LocalSteps:
    """Options of `OuterOptimizer` that decide when its synchronisations travel."""

    every: int  # inner steps between two synchronisations of a parameter
    fragments: int = 1  # from 1 to `every`
    delay: int = 0  # inner steps between a synchronisation's begin and its outer step, less than `every`


def does_compress(compression: str, dtype: str) -> bool:
    """Return whether tensors of a dtype travel compressed (`wire_compresses` of engine_ext/shared/layout.h)."""
    if compression == "fp8":
        return dtype in _FLOATS
    return compression != "none" and dtype in ("float32", "float64")


def compress_tensor(tensor: Tensor, compression: str) -> Tensor:
    """Return a tensor as it travels with another compression than its own; fp8 takes allreduces alone."""
    if tensor.dtype not in _FLOATS or tensor.kind not in ("allreduce", "reducescatter"):
        return tensor
    applies = does_compress(compression, tensor.dtype) and (compression != "fp8" or tensor.kind == "allreduce")
    chosen = compression if applies else "none"
    own = _FLOATS[tensor.dtype]
    elements = tensor.nbytes / _TRAVELLING.get(tensor.compression, own)
    return replace(tensor, nbytes=elements * _TRAVELLING.get(chosen, own), compression=chosen)


def compress_step(step: Step, compression: str) -> Step:
    """Return a step whose tensors travel with another compression."""
    return replace(step, tensors=tuple(compress_tensor(tensor, compression) for tensor in step.tensors))


def find_gradients(step: Step) -> list[Tensor]:
    """Return the tensors that stand for parameters: floating ones of allreduces."""
    return [tensor for tensor in step.tensors if tensor.kind == "allreduce" and tensor.dtype in _FLOATS]


def unroll_local_steps(step: Step, local: LocalSteps, compression: str) -> tuple[Step, int]:
    """Return a training with local steps as one long step, and the number of inner steps in it.

    Its inner steps last as long as the recorded one, and only outer gradients travel: those of a fragment begin when an
    inner step ends, and the program needs them `delay` inner steps later. They are float32, or float64 for such
    parameters.
    """
    parameters = [_make_outer_gradient(tensor, compression) for tensor in find_gradients(step)]
    sizes = {str(number): round(tensor.nbytes) for number, tensor in enumerate(parameters)}
    # The first fragment's offset of 0 is the end of a period.
    first, *others = split_parameters(sizes, local.fragments, local.every)
    periods = PERIODS if local.delay else 1
    count = periods * local.every
    tensors: list[Tensor] = []
    waits: list[tuple[float, float]] = []
    for fragment, number in [
        (fragment, period * local.every + (fragment.offset or local.every))
        for period in range(periods)
        for fragment in (*others, first)
    ]:
        begun, due = number * step.seconds, (number + local.delay) * step.seconds
        members = [parameters[int(name)] for name in fragment.names]
        tensors += [replace(each, ready=begun, started=begun, ended=begun, due=due) for each in members]
        waits.append((due, due))
    return Step((count + local.delay) * step.seconds, tuple(tensors), tuple(waits)), count


def _make_outer_gradient(gradient: Tensor, compression: str) -> Tensor:
    """Return the outer gradient of the parameter that a gradient is of."""
    plain = compress_tensor(gradient, "none")
    dtype = "float64" if plain.dtype == "float64" else "float32"
    nbytes = plain.nbytes * _FLOATS[dtype] / _FLOATS[plain.dtype]
    return compress_tensor(replace(plain, dtype=dtype, nbytes=nbytes), compression)


def predict_local_steps(
    step: Step, local: LocalSteps, compression: str, rules: Rules, hosts: int, network: Network, ranks: int = 1
) -> Prediction:
    """Predict an inner step of a training with local steps: means over its steps. Arguments are those of `predict`."""
    unrolled, count = unroll_local_steps(step, local, compression)
    foreseen = predict(unrolled, rules, hosts, network, ranks)
    added = foreseen.seconds - unrolled.seconds
    return Prediction(hosts, step.seconds + added / count, foreseen.busy / count, foreseen.nbytes / count)


def average_steps(steps: Sequence[Step]) -> Step:
    """Return the first of some steps, with the mean of their durations."""
    return replace(steps[0], seconds=sum(step.seconds for step in steps) / len(steps))
