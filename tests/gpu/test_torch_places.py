"""Tensors that the binding of torch makes are on the device of the tensors that they are made for; needs no GPU.

A tensor that is made without a device would be in host memory, beside others on the GPU.
"""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from engine.collectives.reduce_ops import Average  # noqa: E402
from engine.errors import MismatchError  # noqa: E402
from engine.torch import adapter, adasum, sparse  # noqa: E402
from engine.torch import sync_batch_norm as norm  # noqa: E402
from engine.torch.places import ALIGNMENT, GradientPlaces  # noqa: E402
from engine.torch.powersgd import PowerSGD  # noqa: E402

from ..standins import ROOT  # noqa: E402

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.rand, torch.frombuffer)


class Placed(TorchFunctionMode):
    """Refuses to make a tensor without an explicit device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in MAKERS or (kwargs or {}).get("device") is not None, f"{function.__name__} has no device"
        return function(*args, **(kwargs or {}))


@contextmanager
def placed() -> Iterator[None]:
    """Make tensors only on a named device in this block."""
    with Placed():
        yield


def test_a_tensor_without_a_device_is_seen() -> None:
    with placed(), pytest.raises(AssertionError, match="zeros has no device"):
        torch.zeros(3)


@pytest.mark.parametrize("entries", [0, 3])
def test_parts_of_sparse_tensors_and_their_sum(entries: int) -> None:
    whole = torch.sparse_coo_tensor(torch.arange(entries).view(1, -1), torch.ones(entries, 2), (5, 2))
    wrong = torch.sparse_coo_tensor(torch.full((1, 3), 7), torch.ones(3, 2), (5, 2), check_invariants=False)
    with placed():
        indices, values, shape, fault = sparse.extract_parts(whole, Average, "it")
        assert fault is None
        assert sparse.extract_parts(wrong, Average, "it")[3] is not None
        parts = [
            (each.reshape(-1).view(torch.uint8), (entries,), length) for each, length in ((indices, 8), (values, 8))
        ]
        total = sparse.add_up(parts, torch.float32, shape, Average)
    assert torch.equal(total.to_dense(), whole.to_dense())


@pytest.mark.parametrize("rows", [0, 4])
def test_gathered_tensors(rows: int) -> None:
    like = torch.arange(12, dtype=torch.float64).view(4, 3)
    with placed():
        got = adapter.TorchAdapter().make_gathered(like, like[:rows].reshape(-1).view(torch.uint8), rows)
        assert adapter.tensor_over(like.new_empty(0), like[:0]).shape == (0, 3)
    assert torch.equal(got, like[:rows])


@pytest.mark.parametrize("rows", [0, 4])
def test_statistics_of_a_batch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.tensor([[2.0, *[0.5] * 3, *[1.0] * 3]], dtype=torch.float64)
    monkeypatch.setattr(norm.collectives, "allgather", lambda row, *_: torch.cat([row, other]))
    batch = torch.arange(12, dtype=torch.float32).view(4, 3)[:rows]
    with placed():
        mean, square, count = norm._joint_statistics(batch, "layer", norm.global_process_set)
    assert (count, len(mean), len(square)) == (rows + 2, 3, 3)


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a GPU; only a copy of it is in host memory."""

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor).clone()


def deltas(parameters: list[Any]) -> adasum.Deltas:
    """Return the deltas of a step on two ranks, of which only one exists."""
    engine = SimpleNamespace(mark_step=lambda _: None, rank=0)
    process_set = SimpleNamespace(size=lambda: 2, included=lambda: True, engine=engine)
    options = SimpleNamespace(process_set=process_set, prescale=1.0, postscale=1.0)
    made = adasum.Deltas(options, "change", 0)  # type: ignore[arg-type]
    made._parameters |= {f"p{place}": parameter for place, parameter in enumerate(parameters)}
    made.before_step()
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_changes_of_parameters_on_a_gpu_are_combined_in_host_memory(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    there = torch.tensor([3.0, 4.0]).as_subclass(Elsewhere).requires_grad_()
    step = deltas([here, there])
    with torch.no_grad():
        here += 1
        there += 2

    def combine(changes: list[Any], *_: Any) -> None:
        assert [type(change) for change in changes] == [torch.Tensor, torch.Tensor]
        assert [change.tolist() for change in changes] == [[1.0, 1.0], [2.0, 2.0]]
        for change in changes:
            change *= 10
        if fails:
            raise MismatchError("other shapes")

    monkeypatch.setattr("engine.collectives.groups.grouped_allreduce_", combine)
    if fails:
        with pytest.raises(MismatchError):
            step.after_step()
    else:
        step.after_step()
    assert here.tolist() == ([1.0, 2.0] if fails else [11.0, 12.0])
    assert there.tolist() == ([3.0, 4.0] if fails else [23.0, 24.0])


def test_places_are_side_by_side_in_the_order_in_which_they_are_taken() -> None:
    shapes = [(3, 5), (4,), (2, 3, 1, 1), ()]
    parameters = [torch.zeros(shape, dtype=dtype) for dtype in (torch.float32, torch.float16) for shape in shapes]
    parameters[2] = parameters[2].contiguous(memory_format=torch.channels_last)
    with placed():
        places = GradientPlaces(parameters)
        taken = [places.assign_place(parameter) for parameter in parameters[::-1]][::-1]
    for parameter, place in zip(parameters, taken, strict=True):
        assert (place.shape, place.dtype, place.stride()) == (parameter.shape, parameter.dtype, parameter.stride())
        assert place.data_ptr() % ALIGNMENT == 0 and not place.any()
    for dtype in (torch.float32, torch.float16):
        kin = [place for place in taken if place.dtype == dtype][::-1]
        for place, following in itertools.pairwise(kin):
            nbytes = place.numel() * place.element_size()
            assert following.data_ptr() - place.data_ptr() == -(-nbytes // ALIGNMENT) * ALIGNMENT
    places.keep_for_current_stream()  # there is no current stream


@pytest.mark.slow
def test_optimizer_keeps_gradients_in_their_places() -> None:
    """The tensors claim to be on a GPU."""
    command = [sys.executable, "-P", "-m", "tests.gpu.torch_places_program"]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
    assert run.returncode == 0 and run.stdout.endswith("well\n"), run.stdout + run.stderr


ELSEWHERE = torch.device("meta")  # a torch without CUDA runs no operation on a tensor that claims to be on "cuda"


class OnDevice(torch.Tensor):
    """A tensor that torch takes for one on another device, and whose values only operations see.

    Like a CUDA tensor it has no `numpy`, and no operation combines it with one in host memory, except copies and single
    elements.
    """

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        about = {"strides": values.stride(), "dtype": values.dtype, "device": ELSEWHERE}
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, **about)
        made.values = values.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        copies = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        stays = torch.device(options.pop("device", None) or ELSEWHERE) == ELSEWHERE
        given = torch.utils._pytree.tree_leaves((args, options))
        beside = [each for each in given if isinstance(each, torch.Tensor) and not isinstance(each, cls) and each.dim()]
        if beside and not copies:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")
        args, options = torch.utils._pytree.tree_map_only(cls, lambda each: each.values, (args, options))
        if "device" in (kwargs or {}):
            options["device"] = "cpu"
        wrap = cls if stays else (lambda values: values)
        return torch.utils._pytree.tree_map_only(torch.Tensor, wrap, function(*args, **options))


class Moving(TorchFunctionMode):
    """Brings host tensors to the device that does not exist."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = function is torch.Tensor.to and args[1] == ELSEWHERE and not isinstance(args[0], OnDevice)
        return OnDevice(args[0]) if moves else function(*args, **(kwargs or {}))


def test_a_tensor_that_torch_believes_to_be_elsewhere_behaves_as_on_a_gpu() -> None:
    there = OnDevice(torch.ones(2, 3))
    assert there.device == ELSEWHERE and torch.equal((there + 1).cpu(), torch.full((2, 3), 2.0))
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        there[:, torch.tensor([True, False, True])] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2, 3)
    with Moving():
        assert isinstance(torch.zeros(2).to(there.device), OnDevice)


def reduce_alone(scheme: PowerSGD, gradient: Any, seen: list[Any]) -> Any:
    """Return a scheme's result for a gradient in a world of one, and record the tensors that travel."""
    steps = scheme.reduce("weight", gradient)
    sent = next(steps)
    while True:
        seen.append(sent)
        try:
            sent = steps.send(sent + 0)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_powersgd_on_another_device_gives_the_bits_of_host_memory(kind: torch.dtype) -> None:
    """The bits stay equal after loading a checkpoint from host memory, and with columns that have to be refilled."""
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(6, 5, 2, generator=generator).to(kind) for _ in range(3)]
    gradients.insert(1, torch.zeros(6, 5, 2, dtype=kind))
    gradients.insert(2, torch.ones(6, 5, 2, dtype=kind))
    schemes = [PowerSGD(rank=3, start_iter=0, min_compression_rate=0) for _ in range(2)]
    for number, gradient in enumerate(gradients):
        seen: list[Any] = []
        want = reduce_alone(schemes[0], gradient, [])
        with Moving():
            got = reduce_alone(schemes[1], OnDevice(gradient), seen)
        assert len(seen) == 2 and all(isinstance(each, OnDevice) for each in (*seen, got)), number
        assert torch.equal(got.cpu(), want), number
        if number == 3:
            for scheme in schemes:
                state = scheme.state_dict()
                assert all(right.is_cpu for right, _ in state["factors"].values())
                scheme.load_state_dict(state)


MAKERS_BY_DEVICE = (
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "rand",
    "randn",
    "randint",
    "eye",
)


def test_no_tensor_is_made_where_the_program_makes_its_own() -> None:
    """A tensor made without a device would be there after `torch.set_default_device("cuda")`."""
    makers = {f"torch.{name}" for name in (*MAKERS_BY_DEVICE, "randperm", "linspace", "asarray", "scalar_tensor")}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "engine").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in makers
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]
    assert found == []
