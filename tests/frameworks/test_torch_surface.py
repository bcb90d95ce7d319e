"""Names and parameters that scripts written for Horovod rely on."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import engine
import engine.torch as hvd
from engine.errors import UnsupportedTensorError
from engine.torch import autograd

REQUIRED = inspect.Parameter.empty
TENSOR = [("tensor", REQUIRED)]
TENSORS = [("tensors", REQUIRED)]
AVERAGE, NAME = [("average", None)], [("name", None)]
SET = [("process_set", hvd.global_process_set)]
SCALES = [("prescale_factor", 1.0), ("postscale_factor", 1.0)]
TAIL = [("op", None), *SCALES, *SET]
AVERAGE_OP = [("op", hvd.Average), *SET, *SCALES]
ROOT = [("root_rank", REQUIRED)]
SURFACE: dict[str, list[tuple[str, Any]]] = {
    "allreduce": [*TENSOR, *AVERAGE, *NAME, ("compression", hvd.Compression.none), *TAIL],
    "allreduce_": [*TENSOR, *AVERAGE, *NAME, *TAIL],
    "allreduce_async": [*TENSOR, *AVERAGE, *NAME, *TAIL],
    "allreduce_async_": [*TENSOR, *AVERAGE, *NAME, *TAIL],
    "allgather": [*TENSOR, *NAME, *SET],
    "allgather_async": [*TENSOR, *NAME, *SET],
    "broadcast": [*TENSOR, *ROOT, *NAME, *SET],
    "broadcast_": [*TENSOR, *ROOT, *NAME, *SET],
    "broadcast_async": [*TENSOR, *ROOT, *NAME, *SET],
    "broadcast_async_": [*TENSOR, *ROOT, *NAME, *SET],
    "poll": [("handle", REQUIRED)],
    "synchronize": [("handle", REQUIRED)],
    "broadcast_parameters": [("params", REQUIRED), *ROOT, *SET],
    "broadcast_optimizer_state": [("optimizer", REQUIRED), *ROOT, ("model", None), *SET],
    "broadcast_object": [("obj", REQUIRED), ("root_rank", 0), *NAME, *SET],
    "allgather_object": [("obj", REQUIRED), *NAME, *SET],
    "alltoall": [*TENSOR, ("splits", None), *NAME, *SET],
    "alltoall_async": [*TENSOR, ("splits", None), *NAME, *SET],
    "reducescatter": [*TENSOR, *NAME, ("compression", hvd.Compression.none), *AVERAGE_OP],
    "reducescatter_async": [*TENSOR, *NAME, *AVERAGE_OP],
    "grouped_allreduce": [*TENSORS, *AVERAGE, *NAME, ("compression", hvd.Compression.none), *TAIL],
    "grouped_allreduce_": [*TENSORS, *AVERAGE, *NAME, *TAIL],
    "grouped_allreduce_async": [*TENSORS, *AVERAGE, *NAME, *TAIL],
    "grouped_allreduce_async_": [*TENSORS, *AVERAGE, *NAME, *TAIL],
    "grouped_allgather": [*TENSORS, *NAME, *SET],
    "grouped_allgather_async": [*TENSORS, *NAME, *SET],
    "grouped_reducescatter": [*TENSORS, *NAME, ("compression", hvd.Compression.none), *AVERAGE_OP],
    "grouped_reducescatter_async": [*TENSORS, *NAME, *AVERAGE_OP],
    "sparse_allreduce": [*TENSOR, *NAME, ("op", None), *SET],
    "sparse_allreduce_async": [*TENSOR, *NAME, ("op", None), *SET],
    "DistributedOptimizer": [
        ("optimizer", REQUIRED),
        ("named_parameters", None),
        ("compression", hvd.Compression.none),
        ("backward_passes_per_step", 1),
        ("op", hvd.Average),
        ("gradient_predivide_factor", 1.0),
        ("num_groups", 0),
        ("groups", None),
        ("sparse_as_dense", False),
        *SET,
    ],
    "join": [("device", -1), *SET],
    "barrier": SET,
    "add_process_set": [("process_set", REQUIRED)],
    "remove_process_set": [("process_set", REQUIRED)],
    "SyncBatchNorm": [
        ("num_features", REQUIRED),
        ("eps", 1e-5),
        ("momentum", 0.1),
        ("affine", True),
        ("track_running_stats", True),
    ],
    "init": [("comm", None), ("process_sets", None)],
    "shutdown": [],
    "is_initialized": [],
}
NUMBERS = "size local_size cross_size rank local_rank cross_rank is_homogeneous".split()
BUILT = "mpi_threads_supported mpi_enabled gloo_enabled mpi_built gloo_built nccl_built ddl_built ccl_built".split()
BUILT += ["cuda_built", "rocm_built"]


@pytest.mark.parametrize("name", SURFACE)
def test_parameters_come_in_the_order_that_scripts_use(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    positional = [
        (each.name, each.default) for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == SURFACE[name]


@pytest.mark.parametrize("name", [*NUMBERS, *BUILT])
def test_questions_take_no_argument(name: str) -> None:
    assert not inspect.signature(getattr(hvd, name)).parameters


@pytest.mark.parametrize("name", BUILT)
def test_what_is_not_built_says_so(name: str) -> None:
    assert getattr(engine, name) is getattr(hvd, name)
    there = {"cuda_built": True, "mpi_built": importlib.util.find_spec("mpi4py") is not None}
    if name != "nccl_built":
        assert getattr(hvd, name)() is there.get(name, False)


def test_nccl_is_there_if_its_library_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "nccl.c"
    for version, told in ((22807, 22807), (21703, 0)):
        source.write_text(f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}")
        library = tmp_path / f"nccl{version}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setenv("ENGINE_NCCL_LIBRARY", str(library))
        assert hvd.nccl_built() == told
    monkeypatch.setenv("ENGINE_NCCL_LIBRARY", str(tmp_path / "none.so"))
    assert hvd.nccl_built() == 0


def test_operations_and_exceptions() -> None:
    assert {hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum} == set(engine.Op)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for compressor in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        assert issubclass(compressor, hvd.Compressor)


def test_compressors_work_by_hand_without_an_engine() -> None:
    import numpy as np
    import torch

    assert not engine.is_initialized()
    halves = {hvd.Compression.none: torch.float32, hvd.Compression.fp16: torch.float16}
    for compressor, dtype in {**halves, hvd.Compression.bf16: torch.bfloat16}.items():
        leaf = torch.arange(3.0, requires_grad=True)
        sent, context = compressor.compress(leaf)
        assert sent.dtype is dtype
        back = compressor.decompress(sent, context)
        assert back.dtype is torch.float32 and back.tolist() == [0, 1, 2]
        back.sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [1, 1, 1], "gradients flow through the casts"
        whole = torch.arange(3)
        assert compressor.compress(whole)[0] is whole
        assert compressor.decompress(*compressor.compress(whole)) is whole
    sent, context = engine.Compression.fp16.compress(np.arange(3.0))
    assert sent.dtype == np.float16 and engine.Compression.fp16.decompress(sent, context).dtype == np.float64
    with pytest.raises(UnsupportedTensorError, match="NumPy has no bfloat16"):
        engine.Compression.bf16.compress(np.arange(3.0))


def test_errors_are_caught_by_the_clauses_that_scripts_have() -> None:
    import torch

    with pytest.raises(ValueError, match=r"engine.init\(\)"):
        hvd.rank()
    engine.init()
    try:
        good, wrong = torch.ones(3), torch.ones(3, dtype=torch.complex64)
        for kinds, call in (
            ((ValueError,), lambda: hvd.allreduce(good, average=True, op=hvd.Sum)),
            ((ValueError,), lambda: hvd.allreduce(good, op=17)),
            ((ValueError, hvd.HorovodInternalError), lambda: hvd.broadcast(good, 5)),
            ((ValueError, hvd.HorovodInternalError), lambda: hvd.alltoall(good, splits=[4])),
            ((ValueError, hvd.HorovodInternalError), lambda: hvd.grouped_allreduce([])),
            ((ValueError, TypeError, hvd.HorovodInternalError), lambda: hvd.allreduce(wrong)),
            (
                (ValueError, NotImplementedError, hvd.HorovodInternalError),
                lambda: hvd.reducescatter(good, op=hvd.Adasum),
            ),
        ):
            for kind in kinds:
                with pytest.raises(kind):
                    call()
    finally:
        engine.shutdown()
    for kind in (engine.errors.WorldError, engine.errors.MismatchError, engine.errors.DuplicateNameError):
        assert issubclass(kind, hvd.HorovodInternalError)


def test_the_setting_of_gradients_holds_where_no_block_chooses() -> None:
    """Other tests check its effect among ranks; on a single rank both gradients are the same."""
    for wanted in (True, False):
        hvd.init(mathematical_gradients=wanted)
        try:
            assert autograd.are_mathematical() == wanted
            with hvd.mathematical_gradients(not wanted):
                assert autograd.are_mathematical() != wanted
            assert autograd.are_mathematical() == wanted
        finally:
            hvd.shutdown()


@pytest.mark.parametrize("wrong", [{"process_sets": [[0], [0]]}, {"comm": [0, 1]}])
def test_of_a_call_of_init_that_fails_nothing_is_left(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, engine.errors.EngineError)):
        hvd.init(**wrong)
    assert not engine.is_initialized()
    hvd.init()
    try:
        assert hvd.size() == 1
    finally:
        engine.shutdown()


def test_a_parameter_that_cannot_be_reduced_is_named() -> None:
    import torch

    engine.init()
    try:
        for dtype in (torch.complex64, torch.float8_e5m2):
            parameter = torch.nn.Parameter(torch.ones(2).to(dtype))
            with pytest.raises(UnsupportedTensorError, match=r"body.weight' .*which broadcast, allgather"):
                hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("body.weight", parameter)])
    finally:
        engine.shutdown()


def test_every_public_name_exists() -> None:
    for module in (engine, hvd):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None or name == "none", name
            assert name in dir(module)


def test_wrapped_optimizers_have_what_scripts_call() -> None:
    import torch

    engine.init()
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
        for name, expected in {
            "synchronize": [],
            "skip_synchronize": [],
            "no_sync": [],
            "step": ["closure"],
            "zero_grad": ["set_to_none"],
        }.items():
            assert list(inspect.signature(getattr(optimizer, name)).parameters) == expected
    finally:
        engine.shutdown()


def test_an_optimizer_outlives_its_engine_when_it_is_wrapped_again() -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    batch = torch.ones(3, 2)
    engine.init()
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=True)
    model(batch).sum().backward()
    engine.shutdown()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[3.0, 3.0]]
    optimizer.step()
    with pytest.raises(engine.errors.NotInitializedError, match=r"unwrap\(\) a distributed optimizer"):
        model(batch).sum().backward()
    engine.init()
    try:
        optimizer = engine.DistributedOptimizer(optimizer.unwrap())
        optimizer.zero_grad()
        model(batch).sum().backward()
        assert model.weight.grad.tolist() == [[3.0, 3.0]]
    finally:
        engine.shutdown()


def test_every_function_says_what_it_does() -> None:
    for module in (engine, hvd):
        for name in module.__all__:
            assert (getattr(module, name).__doc__ or "").strip(), f"{module.__name__}.{name}"
