"""Steps of a timeline in the form that the model uses."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..config.config import Config
from ..text.bounded_reader import ReadError, get_number, get_text, get_whole
from ..trace.reading import Recording, TraceError
from ..trace.reading import Tensor as RecordedTensor
from .model import Rules, Step, Tensor

_OUTER = re.compile(r"outer\d*\.")  # names of outer gradients (engine/torch/outer_optimizer.py)


@dataclass(frozen=True)
class Recorded:
    """Data that the model needs from a job's timelines."""

    steps: tuple[Step, ...]  # those that are recorded in full
    rules: Rules  # last knobs of the recording
    ranks: int  # number of ranks of the recorded host
    rank: int  # rank whose recording is used
    entries: float  # mean number of schedule entries in a step
    of: int  # total number of steps, without the first one
    notes: tuple[str, ...]  # notes for the reader of a prediction
    on_gpu: bool = False  # whether tensors lie in the memory of GPUs


def choose_steps(recordings: Sequence[Recording]) -> Recorded:
    """Return the steps of the rank that waited least: the others waited for it, so its own work sets the pace.

    Raises TraceError if there is no step, or none with tensors, or if the recording is of several hosts.
    """
    world = [each for each in recordings if each.number == 0]
    hosts = max((each.about.get("hosts", 1) for each in world), default=1)
    if hosts > 1:
        raise TraceError(f"recorded on {hosts} hosts; foresee needs a recording of one host")
    with_steps = [each for each in world if len(each.steps) > 1]
    if not with_steps:
        raise TraceError(
            "the timelines have no steps after the first: record more of them, with a DistributedOptimizer"
        )
    # A step that began with the recording contains the start of the program.
    choice = [(each, found) for each in with_steps if (found := _choose_full_steps(each))]
    if not choice:
        raise TraceError(
            "the timelines have steps, and no tensors in them: give the files of all ranks, of a recording in which "
            "rank 0 took part"
        )
    recording, (steps, entries) = min(choice, key=lambda each: (_compute_mean_wait(each[1][0]), each[0].rank))
    notes = []
    if not recording.knobs:
        notes.append("the timeline does not tell its knobs: the defaults are assumed")
    if any(each.entries for each in recordings if each.number):
        notes.append("what process sets have moved is left out")
    if any(_OUTER.match(tensor.name) for tensor in recording.tensors.values()):
        notes.append("an OuterOptimizer has synchronised parameters: --local-steps foresees that, not the recording")
    return Recorded(
        steps=steps,
        rules=_read_rules(recording),
        ranks=len(recording.ranks),
        rank=recording.rank,
        entries=entries,
        of=len(recording.steps) - 1,
        notes=tuple(notes),
        on_gpu=any(entry.algorithm == "device" for entry in recording.entries.values()),
    )


def _read_rules(recording: Recording) -> Rules:
    usual = Config()
    names = ("fusion_threshold", "cycle_time_ms", "chunk_bytes", "between_hosts")
    knobs = {name: getattr(usual, name) for name in names} | recording.knobs
    try:
        return Rules(
            get_whole(knobs, "fusion_threshold"),
            get_number(knobs, "cycle_time_ms", 0, 1e9) / 1e3,
            get_whole(knobs, "chunk_bytes", 1),
            get_text(knobs, "between_hosts"),
        )
    except ReadError as error:
        raise TraceError(f"rank {recording.rank}'s timeline tells a knob that cannot be: {error}") from None


def _compute_mean_wait(steps: Sequence[Step]) -> float:
    """Return the mean seconds of a step in which the program waited."""
    return fmean(sum(ended - begun for begun, ended in step.waits) for step in steps)


def _choose_full_steps(recording: Recording) -> tuple[tuple[Step, ...], float] | None:
    """Return the steps with the most common number of tensors, and their mean number of entries; None if none has any.

    A long recording omits entries, so a step may have fewer tensors than it really had.
    """
    tensors = sorted((each for each in recording.tensors.values() if each.ended), key=lambda each: each.ready)
    members: list[list[RecordedTensor]] = []
    at = 0
    for begun, ended in recording.steps[1:]:
        while at < len(tensors) and tensors[at].ready < begun:
            at += 1
        first = at
        while at < len(tensors) and tensors[at].ready < ended:
            at += 1
        members.append(tensors[first:at])
    counts = Counter(len(each) for each in members if each)
    if not counts:
        return None
    usual = max(counts, key=lambda count: (counts[count], count))
    chosen = [(span, each) for span, each in zip(recording.steps[1:], members, strict=True) if len(each) == usual]
    steps = tuple(_step(recording, span, each) for span, each in chosen)
    return steps, fmean(len({tensor.entry for tensor in each}) for _, each in chosen)


def _step(recording: Recording, span: tuple[float, float], tensors: Sequence[RecordedTensor]) -> Step:
    begun, ended = span
    waits = sorted((max(0.0, a - begun), min(b, ended) - begun) for a, b in recording.waits if a < ended and b > begun)
    sums: Counter[int] = Counter()
    for each in tensors:
        sums[each.entry] += each.nbytes
    return Step(
        ended - begun, tuple(_make_tensor(recording, each, begun, sums[each.entry]) for each in tensors), tuple(waits)
    )


def _make_tensor(recording: Recording, tensor: RecordedTensor, begun: float, together: int) -> Tensor:
    """Return a tensor with its share of what its entry moved: compressed, or gathered from all ranks of the host.

    `together` is the sum of the bytes of the entry's tensors in the program's memory.
    """
    entry = recording.entries.get(tensor.entry)
    factor = entry.nbytes / together if entry is not None and together else 1.0
    share = tensor.nbytes / together if together else 1.0
    return Tensor(
        ready=tensor.ready - begun,
        started=tensor.started - begun,
        ended=tensor.ended - begun,
        nbytes=tensor.nbytes * factor,
        kind=tensor.kind,
        compression="none" if entry is None else entry.compression,
        dtype=(entry.dtype if entry is not None else "") or "float32",
        work=math.inf if entry is None or not entry.stages else share * sum(entry.stages.values()),
    )
