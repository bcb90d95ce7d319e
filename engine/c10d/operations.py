"""Collectives of torch's process groups over one native engine, with torch's names, arguments and order of results.

A result goes straight into the given tensor if that is contiguous and the engine has such an operation; else it is
copied when the operation is done, by a thread of the engine if nobody waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..collectives.failures import announce_failure
from ..collectives.reduce_ops import Op
from ..errors import EngineError
from ..native import core, handles
from ..torch import sparse
from ..torch.adapter import TorchAdapter, flat_over
from .profiling import EVENTS, begin_event, end_event, end_event_with, flags
from .reductions import as_reals, find_bitwise, read_reduction, reduce_bitwise
from .work import EngineWork, Finish, Operation, expect_host, translate_error


class _HostAdapter(TorchAdapter):
    """Adapter that refuses tensors on other devices than the CPU: torch would wait for results on a stream."""

    def as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        expect_host(tensor)
        return super().as_input(tensor)


_adapter = _HostAdapter()


class Submission:
    """Context in which an operation is submitted: what fails here is told to the other ranks, and translated."""

    __slots__ = ("_engine", "_event", "_kind")

    def __init__(self, engine: core.Engine, kind: str, event: str) -> None:
        self._engine, self._kind, self._event = engine, kind, event

    def __enter__(self) -> None:
        if flags._is_profiler_enabled:
            begin_event(self._event or EVENTS[self._kind])

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        end_event()
        if isinstance(error, Exception):
            announce_failure(self._engine, self._kind, None, error)
        if isinstance(error, EngineError):
            raise translate_error(error) from error


class GroupOperations:
    """Collectives of a group, for `ProcessGroup` and `Backend` subclasses alike."""

    engine: core.Engine  # engine of the group's ranks

    def make_work(
        self,
        operations: Sequence[Operation],
        tensors: Sequence[torch.Tensor],
        finish: Finish | None = None,
        waits: bool = False,
        earlier: Sequence[EngineWork] = (),
    ) -> EngineWork:
        """Return the work of operations that have been submitted; `waits`: the caller waits for it at once."""
        work = EngineWork(operations, tensors, finish, earlier=earlier)
        self.keep_work(work)
        if finish is not None and not waits:
            work.watch_end()
        if flags._is_profiler_enabled:
            end_event_with(work)
        return work

    def keep_work(self, work: EngineWork) -> None:
        """Note a work in flight; for groups that end works themselves."""

    def list_works(self) -> list[EngineWork]:
        """Return the works of collectives that may be in flight."""
        return []

    def open_submission(self, kind: str, event: str = "") -> Submission:
        """Return a context in which an operation is submitted; `event`: what a profiler calls another than its kind."""
        return Submission(self.engine, kind, event)

    # ---- reductions

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None, event: str = "") -> EngineWork:
        reduction, waits = _reduction_of(opts)
        with self.open_submission("allreduce", event):
            parts = [self._reduce(tensor, reduction, waits and len(tensors) == 1) for tensor in tensors]
        return self.make_work([handle for handle, _ in parts], tensors, _all_of(finish for _, finish in parts), waits)

    def _reduce(self, tensor: torch.Tensor, reduction: Any, blocking: bool) -> tuple[handles.Handle, Finish | None]:
        bitwise = find_bitwise(reduction)
        if bitwise is not None:
            return self._reduce_bitwise(tensor, bitwise)
        op, factor = read_reduction(reduction)
        if tensor.layout is not torch.strided:
            return self._reduce_sparse(tensor, op, factor)
        target = as_reals(tensor.detach(), op)
        source = _adapter.as_input(target)
        handle = self.engine.allreduce(source, source, None, op, factor, 1.0, blocking)
        return handle, None if _lie_together(source, target) else lambda: target.copy_(source)

    def _reduce_bitwise(
        self, tensor: torch.Tensor, function: Callable[..., Any]
    ) -> tuple[handles.Handle, Finish | None]:
        if tensor.dtype.is_floating_point or tensor.is_complex():
            raise ValueError(f"engine: a bitwise reduction takes integers, and not {tensor.dtype}")
        gathered = tensor.new_empty((self.engine.size, tensor.numel()))
        source = _adapter.as_input(tensor.detach()).reshape(-1)
        handle = self.engine.allgather(source, None, False, None, gathered.view(-1))
        return handle, lambda: reduce_bitwise(function, tuple(gathered), tensor.detach())

    def _reduce_sparse(self, tensor: torch.Tensor, op: Op, factor: float) -> tuple[handles.Handle, Finish | None]:
        expect_host(tensor)
        started = sparse.start(self.engine, tensor.detach(), None, op, factor)

        def finish() -> None:
            with torch.no_grad():  # what `detach` returns has entries of its own
                tensor.copy_(started.wait())

        return started._native, finish

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> EngineWork:
        reduction, blocking = _reduction_of(opts)
        plain = all(each.layout is torch.strided and each.is_contiguous() and not each.is_complex() for each in tensors)
        if not tensors or not plain or find_bitwise(reduction) is not None:
            return self.allreduce(tensors, opts)
        with self.open_submission("allreduce"):
            op, factor = read_reduction(reduction)
            sources = [_adapter.as_input(each.detach()) for each in tensors]
            handle = self.engine.allreduce_group(sources, sources, None, op, factor, 1.0, blocking)
        return self.make_work([handle], tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> EngineWork:
        root = 0 if opts is None else opts.rootRank
        if self.engine.rank == root:
            return self.allreduce(tensors, opts, "reduce")
        return self.allreduce([each.detach().clone() for each in tensors], opts, "reduce")

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> EngineWork:
        reduction, waits = _reduction_of(opts)
        with self.open_submission("reducescatter"):
            handle, finish = self._scatter_sum(output, source.detach().reshape(-1), reduction, waits)
        return self.make_work([handle], [output], finish, waits)

    def _scatter_sum(
        self, output: torch.Tensor, flat: torch.Tensor, reduction: Any, blocking: bool
    ) -> tuple[handles.Handle, Finish | None]:
        """Reduce `flat`, equal parts for all ranks one after another, and store this rank's part in `output`."""
        if flat.numel() != output.numel() * self.engine.size or flat.dtype != output.dtype:
            raise ValueError(
                f"engine: the input of a reduce-scatter has {flat.numel()} elements of {flat.dtype}; expected "
                f"{self.engine.size} times the output's {output.numel()} of {output.dtype}"
            )
        bitwise = find_bitwise(reduction)
        if bitwise is not None:
            return self._scatter_bitwise(output, flat, bitwise)
        op, factor = read_reduction(reduction)
        source, target = as_reals(flat, op), output.detach()
        reals = torch.view_as_real(target) if target.is_complex() else target
        source = _adapter.as_input(source).reshape(-1)
        direct = reals.is_contiguous() and not _share_memory(source, reals)
        result = reals.view(-1) if direct else reals.new_empty(reals.numel())
        handle = self.engine.reducescatter(source, result, None, op, factor, 1.0, blocking)
        return handle, None if direct else lambda: reals.copy_(result.view(reals.shape))

    def _scatter_bitwise(
        self, output: torch.Tensor, flat: torch.Tensor, function: Callable[..., Any]
    ) -> tuple[handles.Handle, Finish | None]:
        size, rank = self.engine.size, self.engine.rank
        gathered = output.new_empty((size, size, output.numel()))
        handle = self.engine.allgather(_adapter.as_input(flat), None, False, None, gathered.view(-1))
        return handle, lambda: reduce_bitwise(function, tuple(gathered[:, rank]), output.detach())

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> EngineWork:
        reduction, waits = _reduction_of(opts)
        blocking = waits and len(outputs) == 1
        operations, finishes = [], []
        with self.open_submission("reducescatter"):
            for output, parts in zip(outputs, inputs, strict=True):
                self._expect_one_each(parts)
                flat = _join(parts)
                if len({part.numel() for part in parts}) == 1:
                    handle, finish = self._scatter_sum(output, flat, reduction, blocking)
                else:
                    handle, finish = self._scatter_unevenly(output, flat, parts, reduction)
                operations.append(handle)
                finishes.append(finish)
        return self.make_work(operations, outputs, _all_of(finishes), waits)

    def _scatter_unevenly(
        self, output: torch.Tensor, flat: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Any
    ) -> tuple[handles.Handle, Finish | None]:
        """Reduce parts of different sizes on all ranks, and store this rank's in `output`."""
        handle, first = self._reduce(flat, reduction, False)
        begin = sum(part.numel() for part in parts[: self.engine.rank])

        def finish() -> None:
            if first is not None:
                first()
            output.detach().copy_(flat[begin : begin + output.numel()].view(output.shape))

        return handle, finish

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> EngineWork:
        reduction, _ = _reduction_of(opts)
        with self.open_submission("reducescatter"):
            started = [
                self._scatter_sum(output, source.detach().reshape(-1), reduction, False)
                for output, source in zip(outputs, inputs, strict=True)
            ]
        return self.make_work([handle for handle, _ in started], outputs, _all_of(finish for _, finish in started))

    # ---- moving

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> EngineWork:
        root, waits = 0 if opts is None else opts.rootRank, _waits_for(opts)
        with self.open_submission("broadcast"):
            started = [self._broadcast(tensor, root, waits and len(tensors) == 1) for tensor in tensors]
        return self.make_work([handle for handle, _ in started], tensors, _all_of(each for _, each in started), waits)

    def _broadcast(self, tensor: torch.Tensor, root: int, blocking: bool) -> tuple[handles.Handle, Finish | None]:
        target = tensor.detach()
        source = _adapter.as_input(target)
        handle = self.engine.broadcast(source, source, None, self.engine.numbers[root], blocking)
        if _lie_together(source, target) or root == self.engine.rank:
            return handle, None
        return handle, lambda: target.copy_(source)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> EngineWork:
        operations, finishes, waits = [], [], _waits_for(opts)
        with self.open_submission("allgather"):
            for parts, source in zip(outputs, inputs, strict=True):
                self._expect_one_each(parts)
                handle = self.engine.allgather(_as_flat(source), None, waits and len(outputs) == 1)
                operations.append(handle)
                finishes.append(_store_gathered(handle, source.dtype, parts))
        return self.make_work(operations, list(itertools.chain(*outputs)), _all_of(finishes), waits)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> EngineWork:
        """`outputs[rank][k]` gets that rank's `inputs[k]`."""
        for parts in outputs:
            if len(parts) != len(inputs) or any(
                a.shape != b.shape or a.dtype != b.dtype for a, b in zip(parts, inputs, strict=True)
            ):
                raise ValueError("engine: each rank's outputs of allgather_coalesced are like the inputs")
        return self.allgather([[parts[k] for parts in outputs] for k in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> EngineWork:
        waits = _waits_for(opts)
        with self.open_submission("allgather"):
            handle, finish = self._gather_into(output, source, waits)
        return self.make_work([handle], [output], finish, waits)

    def _gather_into(
        self, output: torch.Tensor, source: torch.Tensor, blocking: bool = False
    ) -> tuple[handles.Handle, Finish | None]:
        if output.numel() != source.numel() * self.engine.size or output.dtype != source.dtype:
            raise ValueError(
                f"engine: the output of an all-gather has {output.numel()} elements of {output.dtype}; expected "
                f"{self.engine.size} times the input's {source.numel()} of {source.dtype}"
            )
        target, flat = output.detach(), _as_flat(source)
        if not target.is_contiguous():
            handle = self.engine.allgather(flat, None, blocking)
            return handle, _store_gathered(handle, source.dtype, [target])
        place = target.view(-1)[flat.numel() * self.engine.rank :]
        if _share_memory(flat, target) and flat.data_ptr() != place.data_ptr():
            flat = flat.clone()
        return self.engine.allgather(flat, None, blocking, None, target.view(-1)), None

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> EngineWork:
        with self.open_submission("allgather"):
            started = [self._gather_into(*pair) for pair in zip(outputs, inputs, strict=True)]
        return self.make_work([handle for handle, _ in started], outputs, _all_of(finish for _, finish in started))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> EngineWork:
        waits = _waits_for(opts)
        with self.open_submission("alltoall"):
            rows, target = _adapter.as_rows(source.detach()), output.detach()
            splits = list(input_splits) or self._equal_splits(rows)
            if target.is_contiguous() and not _share_memory(rows, target) and target.numel():
                handle = self.engine.alltoall(rows, splits, None, waits, None, target)
                finish = _expect_given(handle, target)
            else:
                handle = self.engine.alltoall(rows, splits, None, waits)
                finish = _store_gathered(handle, source.dtype, [target])
        return self.make_work([handle], [output], finish, waits)

    def _equal_splits(self, rows: torch.Tensor) -> list[int]:
        each, rest = divmod(len(rows), self.engine.size)
        if rest:
            raise ValueError(f"engine: {len(rows)} rows cannot be divided equally among {self.engine.size} ranks")
        return [each] * self.engine.size

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> EngineWork:
        waits = _waits_for(opts)
        with self.open_submission("alltoall"):
            self._expect_one_each(inputs)
            self._expect_one_each(outputs)
            handle = self.engine.alltoall(_join(inputs), [each.numel() for each in inputs], None, waits)
        return self.make_work([handle], outputs, _store_gathered(handle, inputs[0].dtype, outputs), waits)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> EngineWork:
        root, waits = 0 if opts is None else opts.rootRank, _waits_for(opts)
        flat = _as_flat(inputs[0])
        splits = [flat.numel() if rank == root else 0 for rank in range(self.engine.size)]
        parts = outputs[0] if self.engine.rank == root else []
        with self.open_submission("alltoall", "gather"):
            handle = self.engine.alltoall(flat, splits, None, waits)
        return self.make_work([handle], parts, _store_gathered(handle, flat.dtype, parts) if parts else None, waits)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> EngineWork:
        root, output, waits = 0 if opts is None else opts.rootRank, outputs[0], _waits_for(opts)
        with self.open_submission("alltoall", "scatter"):
            if self.engine.rank == root:
                self._expect_one_each(inputs[0])
                flat, splits = _join(inputs[0]), [each.numel() for each in inputs[0]]
            else:
                flat, splits = output.new_empty(0), [0] * self.engine.size
            handle = self.engine.alltoall(flat, splits, None, waits)
        return self.make_work([handle], outputs, _store_gathered(handle, output.dtype, outputs), waits)

    def barrier(self, opts: Any = None) -> EngineWork:
        """Wait for all ranks, and until the results of this rank's earlier collectives lie in their tensors."""
        earlier = [work for work in self.list_works() if work.result()]  # other barriers have none
        waits = _waits_for(opts)
        with self.open_submission("barrier"):
            handle = self.engine.barrier(None, waits)
        return self.make_work([handle], [], None, waits, earlier)

    def _expect_one_each(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.engine.size:
            raise ValueError(
                f"engine: a list of tensors has one for each of {self.engine.size} ranks, not {len(tensors)}"
            )

    # ---- torch's former names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction_of(opts: Any) -> tuple[Any, bool]:
    """Return the reduction that options name, and whether the caller is going to wait at once."""
    if opts is None:
        return dist.ReduceOp.SUM, False
    if isinstance(opts, c10d.ReduceOp | c10d.ReduceOp.RedOpType):
        return opts, False
    return opts.reduceOp, _waits_for(opts)


def _waits_for(opts: Any) -> bool:
    """Return whether the caller waits for the work at once."""
    return not getattr(opts, "asyncOp", True)


def _all_of(finishes: Any) -> Finish | None:
    """Return one function that calls all of those that are not None."""
    found = [each for each in finishes if each is not None]
    if len(found) < 2:
        return found[0] if found else None

    def finish() -> None:
        for each in found:
            each()

    return finish


def _as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in row-major order, without a copy if they lie so."""
    return _adapter.as_input(tensor.detach()).reshape(-1)


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of several tensors, one tensor after another."""
    return _adapter.as_input(torch.cat([each.detach().reshape(-1) for each in tensors]))


def _store_gathered(handle: handles.Handle, dtype: torch.dtype, targets: Sequence[torch.Tensor]) -> Finish:
    """Return a function that stores what an operation has gathered in `targets`, one after another."""

    def finish() -> None:
        data, _ = handle.gathered
        flat = flat_over(data, dtype)
        wanted = sum(each.numel() for each in targets)
        if flat.numel() != wanted:
            raise ValueError(f"engine: the ranks have sent {flat.numel()} elements, and the outputs have {wanted}")
        at = 0
        for each in targets:
            each.detach().copy_(flat[at : at + each.numel()].view(each.shape))
            at += each.numel()

    return finish


def _expect_given(handle: handles.Handle, target: torch.Tensor) -> Finish:
    """Return a function that raises if the result did not fit into the tensor that was given for it."""

    def finish() -> None:
        data, _ = handle.gathered
        if data is not None:
            raise ValueError(
                f"engine: the ranks have sent {data.nbytes // target.element_size()} elements, and the output has "
                f"{target.numel()}"
            )

    return finish


def _lie_together(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr()


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    a, b = first.data_ptr(), second.data_ptr()
    return a < b + second.numel() * second.element_size() and b < a + first.numel() * first.element_size()
