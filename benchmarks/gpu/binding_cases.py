"""Cases of the part `binding`: each runs on a device and in host memory, through PyTorch.

Values are small whole numbers, so results do not depend on the order of additions. Where they are not whole, a case has
a tolerance.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
LARGE = 20_000_000  # number of float32 elements: more than a slab
DELAY = 20_000_000  # GPU cycles before a tensor has its values: some 10 ms
STEPS = 4
HALF = 2e-3  # tolerance of gradients that travel as halves
SAME = 1e-4  # tolerance of float32 gradients, which cuBLAS and the host compute differently
Case = tuple[str, Callable[[], None]]


class Wrong(AssertionError):
    """Error of a result that differs from the one in host memory."""


class BindingRank:
    """This process in an initialized world."""

    def __init__(self, device: str, peer: str = "cpu") -> None:
        import engine
        import engine.torch

        self.engine, self.hvd = engine, engine.torch
        self.rank, self.size = engine.rank(), engine.size()
        self.device, self.peer = device, peer

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def draw_values(self, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Return this rank's values."""
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        if dtype == torch.bool:
            return torch.randint(2, tuple(shape), generator=generator).bool()
        low = 0 if dtype == torch.uint8 else -4
        return torch.randint(low, 5, tuple(shape), generator=generator).to(dtype)

    def occupy_stream(self) -> None:
        """Occupy the current stream for a while."""
        if self.device != "cpu":
            torch.cuda._sleep(DELAY)

    def compare_devices(self, act: Callable[[str], Any], off: float = 0.0) -> None:
        """Act on the device and in host memory, and compare the results.

        Raises `Wrong` if they are not equal or, if `off` is not 0, differ by more than that.
        """
        got = [each.detach().clone().cpu() for each in _flatten_results(act(self.device))]
        wanted = [each.detach().clone().cpu() for each in _flatten_results(act(self.peer))]
        if len(got) != len(wanted):
            raise Wrong(f"{len(got)} results, and {len(wanted)} in the host's memory")
        for number, (mine, right) in enumerate(zip(got, wanted, strict=True)):
            if mine.shape != right.shape or mine.dtype != right.dtype:
                kinds = f"{tuple(mine.shape)} {mine.dtype}, and {tuple(right.shape)} {right.dtype}"
                raise Wrong(f"result {number} is {kinds} in the host's memory")
            if not off and not torch.equal(mine, right):
                places = (mine != right).reshape(-1).nonzero().reshape(-1)
                first = int(places[0])
                values = f"{mine.reshape(-1)[first].item()}, not {right.reshape(-1)[first].item()}"
                raise Wrong(f"result {number}: {len(places)} of {mine.numel()} differ, first [{first}]: {values}")
            if off and mine.numel():
                by = float((mine.double() - right.double()).abs().max() / right.double().abs().max().clamp_min(1e-12))
                if not by <= off:
                    raise Wrong(f"result {number} differs by {by:.3g} of its size, more than {off:g}")

    # ---- operations --------------------------------------------------------------------------------------------------

    def check_reduction(self, dtype: torch.dtype, op: int, shape: Sequence[int], **more: Any) -> None:
        """Reduce a tensor, and also a non-contiguous one."""

        def run_on(device: str) -> list[torch.Tensor]:
            tensor = self.draw_values(shape, dtype).to(device)
            given = [tensor, tensor.T] if tensor.dim() == 2 else [tensor]
            return [self.hvd.allreduce(each, op=op, **more) for each in given]

        self.compare_devices(run_on)

    def check_in_place(self) -> None:
        """Reduce and broadcast in place."""

        def run_on(device: str) -> list[torch.Tensor]:
            one, two = (self.draw_values((33, 7), torch.float32, seed).to(device) for seed in (1, 2))
            self.hvd.allreduce_(one, op=self.engine.Sum)
            self.hvd.broadcast_(two, self.size - 1)
            return [one, two]

        self.compare_devices(run_on)

    def check_many(self) -> None:
        """Start many operations, in another order on each rank."""

        def run_on(device: str) -> list[torch.Tensor]:
            numbers = range(300)
            tensors = {number: self.draw_values((number % 97,), torch.float32, number).to(device) for number in numbers}
            order = sorted(numbers, key=lambda number: (number * 7919 + self.rank * 31) % 300)
            handles = {
                number: self.hvd.allreduce_async(tensors[number], op=self.engine.Sum, name=f"{device}.many.{number}")
                for number in order
            }
            return [self.hvd.synchronize(handles[number]) for number in numbers]

        self.compare_devices(run_on)

    def check_groups(self) -> None:
        """Reduce groups of several dtypes."""

        def run_on(device: str) -> list[torch.Tensor]:
            tensors = [self.draw_values((50 + each,), torch.float32, each).to(device) for each in range(5)]
            tensors += [self.draw_values((20,), torch.int64, 9).to(device)]
            sums = self.hvd.grouped_allreduce(tensors, op=self.engine.Sum)
            rows = [self.draw_values((self.size * 3, 2), torch.float32, each).to(device) for each in range(3)]
            scattered = self.hvd.grouped_reducescatter(rows, op=self.engine.Sum)
            gathered = self.hvd.grouped_allgather(rows)
            return [*sums, *scattered, *gathered]

        self.compare_devices(run_on)

    def check_exchanges(self, dtype: torch.dtype) -> None:
        """Gather, scatter and exchange rows, whose number differs by rank."""

        def run_on(device: str) -> list[torch.Tensor]:
            mine = self.draw_values((3 + 2 * self.rank, 4), dtype, 3).to(device)
            gathered = self.hvd.allgather(mine)
            splits = torch.tensor([1 + (self.rank + other) % 3 for other in range(self.size)])
            given = self.draw_values((int(splits.sum()), 5), dtype, 4).to(device)
            exchanged, counts = self.hvd.alltoall(given, splits)
            plain = self.hvd.alltoall(self.draw_values((2 * self.size, 3), dtype, 5).to(device))
            root = self.hvd.broadcast(self.draw_values((17,), dtype, 6).to(device), self.size - 1)
            results = [gathered, exchanged, counts, plain, root]
            if dtype != torch.bool:
                rows = self.draw_values((2 * self.size + 1, 3), dtype, 7).to(device)
                results.append(self.hvd.reducescatter(rows, op=self.engine.Sum))
            return results

        self.compare_devices(run_on)

    def check_compression(self) -> None:
        """Reduce tensors that travel as halves."""

        def run_on(device: str) -> list[torch.Tensor]:
            tensor = self.draw_values((1000,), torch.float32, 8).to(device)
            schemes = (self.engine.Compression.fp16, self.engine.Compression.bf16)
            return [self.hvd.allreduce(tensor, compression=scheme, op=self.engine.Sum) for scheme in schemes]

        self.compare_devices(run_on)

    def check_objects(self) -> None:
        """Broadcast objects and optimizer states with tensors on a GPU."""

        def run_on(device: str) -> list[torch.Tensor]:
            given = {"a": self.draw_values((5,), torch.float32, 11).to(device)} if self.rank == self.size - 1 else None
            got = self.hvd.broadcast_object(given, self.size - 1)
            torch.manual_seed(self.rank)
            model = torch.nn.Linear(4, 3).to(device)
            optimizer = torch.optim.Adam(model.parameters())
            if self.rank == 0:
                model(torch.ones(2, 4, device=device)).sum().backward()
                optimizer.step()
            self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            state = [value for each in optimizer.state.values() for value in each.values()]
            return [got["a"], *model.parameters(), *state]

        self.compare_devices(run_on, SAME)

    def check_sparse(self) -> None:
        """Reduce sparse tensors with different entries on some ranks."""

        def run_on(device: str) -> list[torch.Tensor]:
            places = torch.tensor([[0, 2, 5 + self.rank], [1, 1, 0]])
            tensor = torch.sparse_coo_tensor(places, self.draw_values((3,), torch.float32, 12), (9, 3)).to(device)
            return [self.hvd.sparse_allreduce(tensor, op=self.engine.Sum).to_dense()]

        self.compare_devices(run_on)

    def check_gradients(self) -> None:
        """Differentiate through operations."""

        def run_on(device: str) -> list[torch.Tensor]:
            leaf = self.draw_values((4, 3), torch.float32, 13).to(device).requires_grad_()
            total = self.hvd.allreduce(leaf * 2, op=self.engine.Sum).sum() + self.hvd.allgather(leaf).sum()
            total.backward()
            return [leaf.grad]

        self.compare_devices(run_on)

    def check_batch_norm(self) -> None:
        """Normalize with SyncBatchNorm."""

        def run_on(device: str) -> list[torch.Tensor]:
            layer = self.hvd.SyncBatchNorm(3).to(device)
            x = self.draw_values((4 + self.rank, 3, 5), torch.float32, 14).to(device).requires_grad_()
            y = layer(x)
            (y * y * y).sum().backward()
            return [y, x.grad, layer.weight.grad, layer.running_mean, layer.running_var]

        self.compare_devices(run_on, 1e-4)

    def check_join(self) -> None:
        """Join while rank 0 has more operations."""

        def run_on(device: str) -> list[torch.Tensor]:
            results = []
            for turn in range(3 if self.rank == 0 else 1):
                tensor = self.draw_values((10,), torch.float32, 15).to(device)
                results.append(self.hvd.allreduce(tensor, op=self.engine.Sum, name=f"{device}.join.{turn}"))
            self.hvd.join()
            return results

        self.compare_devices(run_on)

    def check_process_sets(self) -> None:
        """Reduce in a process set of each rank alone, and in that of all ranks."""
        sets = [self.engine.global_process_set]
        sets += [self.hvd.add_process_set([rank]) for rank in range(self.size) if self.size > 1]

        def run_on(device: str) -> list[torch.Tensor]:
            tensor = self.draw_values((100,), torch.float32, 16).to(device)
            mine = [each for each in sets if each.included()]
            return [self.hvd.allreduce(tensor, op=self.engine.Sum, process_set=each) for each in mine]

        self.compare_devices(run_on)
        for each in sets[1:]:
            self.hvd.remove_process_set(each)

    # ---- streams -----------------------------------------------------------------------------------------------------

    def check_late_values(self) -> None:
        """Reduce tensors whose values arrive late, and which are overwritten as soon as the result is enqueued."""

        def run_on(device: str) -> list[torch.Tensor]:
            results = []
            for turn in range(5):
                tensor = torch.full((1 << 20,), -99.0, device=device)
                values = self.draw_values((1 << 20,), torch.float32, 20 + turn).to(
                    device
                )  # a copy from the host waits for it
                self.occupy_stream()
                tensor.copy_(values)
                result = self.hvd.allreduce(tensor, op=self.engine.Sum, name=f"{device}.late")
                tensor.fill_(1e6)
                results.append(result * 2)
            return results

        self.compare_devices(run_on)

    def check_streams(self) -> None:
        """Work on streams of its own, where the results are used, too."""
        if self.device == "cpu":
            return
        values = [self.draw_values((1 << 18,), torch.float32, 30 + each) for each in range(4)]
        got = []
        for value in values:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor, there = torch.full_like(value, -99.0, device=self.device), value.to(self.device)
                self.occupy_stream()
                tensor.copy_(there)
                got.append(self.hvd.allreduce(tensor, op=self.engine.Sum) + 1)
                stream.synchronize()
        wanted = [self.hvd.allreduce(value, op=self.engine.Sum) + 1 for value in values]
        self.compare_devices(lambda device: got if device == self.device else wanted)

    def check_memory_reuse(self) -> None:
        """Check that memory returned to the allocator during a reduction is not reused too early."""

        def run_on(device: str) -> list[torch.Tensor]:
            results = []
            for turn in range(30):
                tensor = self.draw_values((1 << 16,), torch.float32, 40 + turn).to(device)
                handle = self.hvd.allreduce_async(tensor, op=self.engine.Sum, name=f"{device}.reused")
                del tensor
                torch.full((1 << 16,), 1e6, device=device)
                results.append(self.hvd.synchronize(handle))
            return results

        self.compare_devices(run_on)

    def check_threads(self) -> None:
        """Reduce in threads with streams of their own."""
        if self.device == "cpu":
            return
        problems: list[str] = []

        def reduce_in_thread(number: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for turn in range(20):
                        value = self.draw_values((1000,), torch.float32, number * 100 + turn)
                        given = value.to(self.device)
                        got = self.hvd.allreduce(given, op=self.engine.Sum, name=f"thread.{number}").cpu()
                        wanted = self.hvd.allreduce(value, op=self.engine.Sum, name=f"host.{number}")
                        if not torch.equal(got, wanted):
                            raise Wrong(f"thread {number}, turn {turn}: the sum is wrong")
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")

        started = [threading.Thread(target=reduce_in_thread, args=(number,)) for number in range(4)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        if problems:
            raise Wrong(problems[0])

    def check_refused_capture(self) -> None:
        """Check that a collective within a capture is refused, but not one beside another thread's capture."""
        if self.device == "cpu":
            return
        from engine.errors import EngineError

        tensor, refused = self.draw_values((1000,), torch.float32, 50).to(self.device), ""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            try:
                self.hvd.allreduce(tensor, op=self.engine.Sum)
            except EngineError as error:
                refused = str(error)
            tensor * 2
        if not refused:
            raise Wrong("it was not refused")
        self.compare_devices(lambda device: self.hvd.allreduce(self.draw_values((9,), torch.float32, 51).to(device)))

    def check_capture_beside(self) -> None:
        """Capture in a thread while collectives are in flight."""
        if self.device == "cpu":
            return
        tensor, problems = self.draw_values((1 << 16,), torch.float32, 52).to(self.device), []
        static = torch.ones(1 << 16, device=self.device)
        self.synchronize()

        def capture_graphs() -> None:
            try:
                for _ in range(10):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                        out = static * 2
                        time.sleep(0.01)
                        out += 1
                    graph.replay()
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=capture_graphs)
        thread.start()
        turn = 0
        while self.hvd.allreduce(torch.tensor([thread.is_alive()]), op=self.engine.Max, name="captures").item():
            self.hvd.allreduce(tensor, op=self.engine.Sum, name="beside")
            self.hvd.allgather(tensor[:100], name="gathered beside")
            turn += 1
        thread.join()
        self.synchronize()
        if problems:
            raise Wrong(problems[0])

    # ---- optimizers --------------------------------------------------------------------------------------------------

    def check_training(self, off: float = SAME, kept: bool = False, mixed: bool = False, **more: Any) -> None:
        """Train a model, on the device and in host memory."""
        torch.manual_seed(3)
        plain = torch.nn.Sequential(
            torch.nn.Linear(20, 300),
            torch.nn.Tanh(),
            torch.nn.Linear(300, 300),
            torch.nn.Tanh(),
            torch.nn.Linear(300, 5),
        )
        case = f"{sorted(more)}{kept}{mixed}"

        def run_on(device: str) -> list[torch.Tensor]:
            model = copy.deepcopy(plain).double() if off == 0 else copy.deepcopy(plain)
            model.to(device)
            if mixed:
                model[4].to("cpu")
            named = [(f"{device}.{case}.{name}", value) for name, value in model.named_parameters()]
            optimizer = self.hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, **more)
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=not kept)
                for number in range(more.get("backward_passes_per_step", 1)):
                    x = self.draw_values((8, 20), torch.float32, 60 + 7 * step + number).to(device) / 4
                    y = model[:4](x).to("cpu" if mixed else device)
                    (model[4](y) ** 2).mean().backward()
                optimizer.step()
            return list(model.parameters())

        self.compare_devices(run_on, off)

    def check_embedding(self) -> None:
        """Train an embedding with sparse gradients."""

        def run_on(device: str) -> list[torch.Tensor]:
            torch.manual_seed(4)
            model = torch.nn.Embedding(50, 4, sparse=True).to(device)
            named = [(f"{device}.embedding.{name}", value) for name, value in model.named_parameters()]
            optimizer = self.hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)
            for step in range(STEPS):
                optimizer.zero_grad()
                model((self.draw_values((6,), torch.int64, 80 + step) + 4 + step).to(device)).sum().backward()
                optimizer.step()
            return list(model.parameters())

        self.compare_devices(run_on, SAME)

    def check_frozen_training(self, replayed: bool, **more: Any) -> None:
        """Train frozen, and replay the step; compare with unfrozen training in host memory."""
        torch.manual_seed(5)
        plain = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
        if self.device == "cpu":
            return

        def run_on(device: str) -> list[torch.Tensor]:
            model = copy.deepcopy(plain).to(device)
            case = f"{device}.frozen.{replayed}.{sorted(more)}"
            named = [(f"{case}.{name}", value) for name, value in model.named_parameters()]
            optimizer = self.hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, **more)
            x = torch.zeros(8, 20, device=device)
            given = [self.draw_values((8, 20), torch.float32, 90 + step) / 4 for step in range(3 + 1 + 6)]

            def step() -> None:
                optimizer.zero_grad(set_to_none=False)
                (model(x) ** 2).mean().backward()
                optimizer.step()

            def run_eager(values: torch.Tensor) -> None:
                x.copy_(values)
                step()

            if device == self.peer:
                for values in given:
                    run_eager(values)
                return list(model.parameters())
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for values in given[:3]:
                    run_eager(values)
                optimizer.zero_grad(set_to_none=False)
                optimizer.freeze()
                run_eager(given[3])
            torch.cuda.current_stream().wait_stream(stream)
            if replayed:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
                for values in given[4:]:
                    x.copy_(values)
                    graph.replay()
                torch.cuda.synchronize()
                results = [each.detach().clone() for each in model.parameters()]
                del graph
            else:
                for values in given[4:]:
                    run_eager(values)
                results = [each.detach().clone() for each in model.parameters()]
            optimizer.unfreeze()
            return results

        self.compare_devices(run_on, HALF if more else SAME)

    def list_cases(self) -> Iterator[Case]:
        """Yield all cases with their names."""
        sum_, average = self.engine.Sum, self.engine.Average
        ops = {"Sum": sum_, "Min": self.engine.Min, "Max": self.engine.Max, "Product": self.engine.Product}
        for dtype in (*FLOATS, *WHOLE, torch.bool):
            for name, op in ops.items():
                yield f"allreduce of {dtype}, {name}", partial(self.check_reduction, dtype, op, (31, 17))
        for dtype in FLOATS:
            yield f"allreduce of {dtype}, Average", partial(self.check_reduction, dtype, average, (31, 17))
        for shape in ((0,), (1,), (), (LARGE,)):
            yield f"allreduce of {shape}", partial(self.check_reduction, torch.float32, sum_, shape)
        factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
        yield "allreduce with factors", partial(self.check_reduction, torch.float32, sum_, (1000,), **factors)
        yield "in place", self.check_in_place
        yield "300 at a time, in another order on each rank", self.check_many
        yield "groups", self.check_groups
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            yield f"rows of {dtype}", partial(self.check_exchanges, dtype)
        yield "as halves", self.check_compression
        yield "objects and states", self.check_objects
        yield "sparse", self.check_sparse
        yield "gradients through operations", self.check_gradients
        yield "SyncBatchNorm", self.check_batch_norm
        yield "join", self.check_join
        yield "process sets", self.check_process_sets
        yield "values that are there late", self.check_late_values
        yield "streams", self.check_streams
        yield "memory used again", self.check_memory_reuse
        yield "threads", self.check_threads
        yield "a capture refused", self.check_refused_capture
        yield "a capture beside", self.check_capture_beside
        yield "optimizer", self.check_training
        yield "optimizer, kept gradients", partial(self.check_training, kept=True)
        yield "optimizer, side by side", partial(self.check_training, gradient_as_bucket_view=True)
        yield "optimizer, side by side and kept", partial(self.check_training, kept=True, gradient_as_bucket_view=True)
        yield "optimizer, as halves", partial(self.check_training, HALF, compression=self.engine.Compression.fp16)
        yield "optimizer, two passes a step", partial(self.check_training, backward_passes_per_step=2)
        yield "optimizer, Adasum", partial(self.check_training, op=self.engine.Adasum)
        yield "optimizer, part of the model on the host", partial(self.check_training, mixed=True)
        yield "optimizer, sparse", self.check_embedding
        yield "frozen", partial(self.check_frozen_training, False)
        yield "frozen and replayed", partial(self.check_frozen_training, True)
        yield (
            "frozen and replayed, as halves",
            partial(self.check_frozen_training, True, compression=self.engine.Compression.fp16),
        )
        yield (
            "frozen and replayed, side by side",
            partial(self.check_frozen_training, True, gradient_as_bucket_view=True),
        )


def _flatten_results(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [each if isinstance(each, torch.Tensor) else torch.as_tensor(each) for each in results]
