"""Spans of steps: a trace for each step, with a span for each rank and below it one for each collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, set_span_in_context

from .records import StepRecord

LATE = 2  # collections for which a step waits for ranks that have not ended it
KEPT = 256  # steps that wait at most


class _EndedSpans(SpanProcessor):
    """Keeper of the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.spans.append(span)


class StepSpans:
    """Maker of spans from records of steps. Ranks' records of a step may come in two collections."""

    def __init__(self, resource: Resource, run: str, version: str) -> None:
        self._run = run
        self._ended = _EndedSpans()
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._ended)
        self._tracer = self._provider.get_tracer("enginerun", version)
        self._waiting: dict[int, list[StepRecord]] = {}  # by the step's number
        self._ages: dict[int, int] = {}

    def add(self, records: Sequence[StepRecord], ranks: int) -> list[list[StepRecord]]:
        """Add records of a collection; return the steps that all `ranks` have ended, or that wait for too long."""
        for record in records:
            self._waiting.setdefault(record.number, []).append(record)
            self._ages.setdefault(record.number, 0)
        done = []
        for number in sorted(self._waiting):
            self._ages[number] += 1
            if len(self._waiting[number]) >= ranks or self._ages[number] > LATE or len(self._waiting) > KEPT:
                done.append(self._waiting.pop(number))
                del self._ages[number]
        return done

    def make_spans(self, steps: Sequence[list[StepRecord]], most: int) -> list[ReadableSpan]:
        """Make at most `most` spans, of the newest steps; older ones are left out as a whole.

        If the newest step alone would have more, it has no spans of collectives.
        """
        chosen: list[list[StepRecord]] = []
        for step in reversed(steps):
            if not chosen and _count_spans(step) > most:
                step = [replace(record, collectives=[]) for record in step]
            most -= _count_spans(step)
            if most < 0:
                break
            chosen.append(step)
        for step in reversed(chosen):
            self._trace_step(step)
        spans, self._ended.spans = self._ended.spans, []
        return spans

    def _trace_step(self, step: list[StepRecord]) -> None:
        begun, ended = min(record.begun for record in step), max(record.ended for record in step)
        root = self._tracer.start_span(
            "step",
            start_time=begun,
            attributes={"run": self._run, "step": step[0].number, "ranks": len(step)},
        )
        for record in sorted(step, key=lambda record: record.rank):
            self._trace_rank(root, record)
        root.end(ended)

    def _trace_rank(self, root: Span, record: StepRecord) -> None:
        attributes: dict[str, str | int | float] = {"run": self._run, "rank": str(record.rank), "step": record.number}
        if record.blocked is not None and record.exposed is not None:
            attributes |= {"blocked_seconds": record.blocked, "exposed_seconds": record.exposed}
        span = self._tracer.start_span(
            f"rank {record.rank}",
            context=set_span_in_context(root),
            start_time=record.begun,
            attributes=attributes,
        )
        below = set_span_in_context(span)
        for each in record.collectives:
            about: dict[str, str | int] = {"rank": str(record.rank), "algorithm": each.algorithm, "bytes": each.nbytes}
            child = self._tracer.start_span(each.operation, context=below, start_time=each.begun, attributes=about)
            child.end(each.ended)
        span.end(record.ended)


def _count_spans(step: Sequence[StepRecord]) -> int:
    return 1 + sum(1 + len(record.collectives) for record in step)
