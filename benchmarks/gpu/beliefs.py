"""Assumptions behind the design of the GPU plane, each beside its measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.tables import format_duration

Parts = Mapping[str, Mapping[str, Any]]
TENSORS = 2000


@dataclass(frozen=True)
class Belief:
    """Assumption: its subject, the assumed value, and a function of the parts' results, or a text why there is none."""

    what: str
    believed: str
    found: Callable[[Parts], str] | str

    def format_measured(self, parts: Parts, mark: str = "") -> str:
        """Return what is known of it; `mark` precedes a measured value."""
        return self.found if isinstance(self.found, str) else mark + self.found(parts)


def get_result(parts: Parts, part: str) -> Mapping[str, Any] | str:
    """Return the results of a part, or a text why there are none."""
    found = parts.get(part)
    if found is None:
        return "not run"
    if found["outcome"] == "skipped":
        return f"skipped: {found['why']}"
    return found


def get_cost(parts: Parts, group: str, name: str) -> float | str:
    """Return the median of a row of `costs`, in a group whose title begins so; or a text why there is none."""
    found = get_result(parts, "costs")
    if isinstance(found, str):
        return found
    for title, rows in found.get("groups", {}).items():
        if title.startswith(group):
            if isinstance(rows, str):
                return f"skipped: {rows}"
            return next((float(row["median"]) for row in rows if row["name"] == name), "not measured")
    return f"not measured: {found['why'] or 'the part did not come to it'}"


def _format_cost(group: str, name: str, times: int = 1) -> Callable[[Parts], str]:
    def format_measured(parts: Parts) -> str:
        found = get_cost(parts, group, name)
        return found if isinstance(found, str) else format_duration(times * found)

    return format_measured


def _compare_entry(parts: Parts) -> str:
    """Compare a call of a non-blocking communicator with one of a blocking communicator, for two ranks and for one."""
    what = "non-blocking: allreduce of 1 KiB, until it is enqueued, looked at all the time"
    told = []
    for size in ("2 ranks", "1 rank"):
        found, peer = (
            get_cost(parts, f"NCCL, {size}", what),
            get_cost(parts, f"NCCL, {size}", "blocking: allreduce of 1 KiB"),
        )
        if isinstance(found, str) or isinstance(peer, str):
            told.append(f"{size}: {found if isinstance(found, str) else peer}")
        else:
            told.append(f"{size}: {format_duration(found)}, blocking {format_duration(peer)}")
    return "; ".join(told)


def _format_bandwidth(parts: Parts) -> str:
    found = get_result(parts, "bandwidth")
    if isinstance(found, str):
        return found
    if not found.get("rows"):
        return f"not measured: {found['why']}"
    worst = min(found["rows"], key=lambda row: row["share"])
    reached = sum(row["share"] >= (found["aim"] or 0) for row in found["rows"])
    return f"{reached} of {len(found['rows'])} cases; least {worst['share']:.2f}: {worst['what']}, {worst['direction']}"


def _format_steps(parts: Parts) -> str:
    found = get_result(parts, "steps")
    if isinstance(found, str):
        return found
    ratios = [f"{each['title']}: {each['ratio']['value']:.3f}" for each in found.get("workloads", {}).values()]
    return "ratio to DDP's step, " + "; ".join(ratios) if ratios else f"not measured: {found['why']}"


def _format_frozen(way: str) -> Callable[[Parts], str]:
    """Return the ratio of the time of 100 small tensors, until the device has done them, to that of entries."""

    def format_measured(parts: Parts) -> str:
        found = get_result(parts, "frozen")
        if isinstance(found, str):
            return found
        told = []
        for size, world in found.get("worlds", {}).items():
            ratio = f"{world['ratios'][way]['value']:.3f}" if "ratios" in world else f"skipped: {world['skipped']}"
            told.append(f"{size} rank{'s' if size != '1' else ''}: {ratio}")
        return "; ".join(told) or f"not measured: {found['why']}"

    return format_measured


def _format_replays(parts: Parts) -> str:
    found = get_result(parts, "frozen")
    if isinstance(found, str):
        return found
    workloads = found.get("workloads")
    if isinstance(workloads, str):
        return f"skipped: {workloads}"
    ratios = [
        f"{each['title']}: " + ", ".join(f"{pair} {ratio['value']:.3f}" for pair, ratio in each["ratios"].items())
        for each in (workloads or {}).values()
    ]
    return "; ".join(ratios) or f"not measured: {found['why']}"


def _format_freeze_cost(parts: Parts, name: str) -> str:
    """Return the cost of creating a frozen pass, in a world of two ranks."""
    found = get_result(parts, "frozen")
    if isinstance(found, str):
        return found
    world = found.get("worlds", {}).get("2", {"skipped": "not measured"})
    if "skipped" in world:
        return str(world["skipped"])
    return next(format_duration(row["median"]) for row in world["rows"] if row["name"] == name)


def _format_rest(parts: Parts) -> str:
    found = get_result(parts, "failure")
    if isinstance(found, str):
        return found
    lost = found.get("lost") or {"skipped": found["why"]}
    return f"skipped: {lost['skipped']}" if "skipped" in lost else format_duration(lost.get("rest"))


BELIEFS = (
    Belief(
        "DLPack's current_work_stream, from C",
        "some 10 ns",
        _format_cost("torch", "current_work_stream of DLPack's exchange table, from C"),
    ),
    Belief(
        "torch._C._cuda_getCurrentRawStream",
        "about 0.1 us",
        _format_cost("torch", "torch._C._cuda_getCurrentRawStream, from Python"),
    ),
    Belief("torch.cuda.current_stream", "1 to 2 us", _format_cost("torch", "torch.cuda.current_stream, from Python")),
    Belief("cuEventRecord in a hook", "about 1 us", _format_cost("driver", "cuEventRecord, stream idle")),
    Belief(
        f"a mark for each of {TENSORS} gradients",
        "2 ms a step",
        _format_cost("driver", "a mark, as a submission makes it", TENSORS),
    ),
    Belief(
        "a wake of the CUDA thread", "15 to 22 us", _format_cost("CUDA thread", "a ring of its door, until it runs")
    ),
    Belief("an entry's call of a communicator that does not block", "20 to 60 us; of one rank less", _compare_entry),
    Belief("pack and unpack, of a copy's bandwidth", "0.9 and more", _format_bandwidth),
    Belief("a step with the engine, in a world of one rank", "below DDP's", _format_steps),
    Belief(
        "100 small tensors in a frozen pass, to as many entries",
        "below 1: ranks agree on nothing",
        _format_frozen("frozen pass"),
    ),
    Belief("the same in a graph", "below 1: nothing is handed to the CUDA thread", _format_frozen("launch of a graph")),
    Belief(
        "the first freeze, which connects a communicator of its own",
        "once, so it may take seconds",
        lambda parts: _format_freeze_cost(parts, "the first freeze, which connects the ranks"),
    ),
    Belief(
        "frozen and replayed steps, in a world of one rank",
        "pay where launches cost more than communication",
        _format_replays,
    ),
    Belief("a rank's death, until the survivor's device is at rest", "2 s and less", _format_rest),
    Belief("fusion threshold of device tensors", "32 MiB", "needs several GPUs"),
    Belief(
        "TensorFlow's TF_GetStream is for pluggable devices alone",
        "so its tensors go by host memory",
        "no figure: a question to TensorFlow's sources; no binding gives the engine its device tensors",
    ),
    Belief(
        "JAX's call to foreign functions gives the stream",
        "so its arrays could be marked",
        "no figure: the binding of JAX gives the engine no device arrays yet",
    ),
)
