"""Opening a GPU: loading, which GPUs can work together, what is made and ended, and every way to fail.

The GPUs, the driver and NCCL are the stand-ins; ranks are real processes. Problems have numbers: 4 one thread, 8 lazy
loading, 15 capture, 16 fork, 17 errors of the driver, 19 death, 21 hang, 22 versions, 23 which GPU, 24 errors of NCCL.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.gpu import texts

from ..standins import LIBRARY, POLICIES, ROOT, build, compiled, environment, start
from ..waiting import until
from .jobs import Job, chosen
from .mutants import changed
from .plane_programs import CALLS

Start = Callable[..., Job]


@pytest.fixture
def start_ranks(libraries: Path, tmp_path: Path) -> Start:
    """Function that starts a program of plane_programs.py on ranks. Only the CUDA thread may use a communicator."""

    def begin(size: int, *program: str, **settings: object) -> Job:
        return Job(libraries, tmp_path, size, *program, module="plane_programs", **{"one_thread": 1, **settings})

    return begin


# ---- loading ---------------------------------------------------------------------------------------------------------

LOAD = """
import ctypes, os, sys
from pathlib import Path
import engine
from engine.gpu.libraries import load
try:
    found = load(*(Path(each) if each else None for each in sys.argv[1:3]))
    print(found.cuda, found.driver, found.nccl, found.nccl_version, found.addresses.count(0))
except engine.errors.DeviceError as error:
    print("refused:", error)
"""


@pytest.fixture(autouse=True)
def without_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any package that has NCCL, even if one is installed."""
    (tmp_path / "without/nvidia").mkdir(parents=True)
    (tmp_path / "without/nvidia/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "without"))


def loaded(libraries: Path, cuda: str = "", nccl: str = "", before: str = "", **more: str) -> str:
    """Return what loading finds, in a separate process."""
    env = {**environment(libraries), **more}
    run = subprocess.run([sys.executable, "-c", before + LOAD, cuda, nccl], text=True, capture_output=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def library(where: Path, name: str, source: str) -> Path:
    """Make a library with a few functions."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "source.c").write_text(source)
    return compiled(where / name, [where / "source.c"], *LIBRARY, "-fvisibility=default", f"-Wl,-soname,{name}")


def claims(version: int) -> str:
    """Return the source of an NCCL that only has a version."""
    return f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}"


def test_nothing_is_loaded_before_a_gpu_is_opened(libraries: Path) -> None:
    """A process without a GPU loads no library, and no module of the plane."""
    script = """if True:
        import engine, sys
        engine.init()
        print([name for name in sys.modules if "gpu" in name])
        print(open("/proc/self/maps").read())
    """
    run = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, env=environment(libraries))
    modules, _, maps = run.stdout.partition("\n")
    assert modules == "['engine.gpu', 'engine.gpu.device']"  # what opens a GPU, and is not the plane
    assert "core" in maps
    assert not [word for word in ("libcuda", "libnccl", "/cuda_thread.cpython") if word in maps]


def test_libraries_of_the_system(libraries: Path) -> None:
    assert loaded(libraries) == f"{libraries}/libcuda.so.1 12090 {libraries}/libnccl.so.2 22807 0"


@pytest.mark.slow
def test_libraries_by_name(libraries: Path, tmp_path: Path) -> None:
    """The settings precede everything else, even libraries that are already loaded."""
    old = build(tmp_path / "old", 21805)
    before = f"import ctypes; ctypes.CDLL({str(libraries / 'libnccl.so.2')!r})\n"
    found = loaded(tmp_path, str(libraries / "libcuda.so.1"), str(old / "libnccl.so.2"), before)
    assert found == f"{libraries}/libcuda.so.1 12090 {old}/libnccl.so.2 21805 3"


@pytest.mark.slow
def test_nccl_of_the_process_then_of_the_package_then_of_the_system(libraries: Path, tmp_path: Path) -> None:
    """torch may have loaded one: a process has a single NCCL."""
    package, torch = tmp_path / "site/nvidia/nccl/lib", build(tmp_path / "torch", 22203)
    build(package, 22703)
    for directory in (package.parent, package.parents[1]):
        (directory / "__init__.py").touch()
    site = {"PYTHONPATH": str(tmp_path / "site")}
    before = f"import ctypes; ctypes.CDLL({str(torch / 'libnccl.so.2')!r})\n"
    assert f"{torch}/libnccl.so.2 22203" in loaded(libraries, before=before, **site)
    assert f"{package}/libnccl.so.2 22703" in loaded(libraries, **site)
    assert f"{libraries}/libnccl.so.2 22807" in loaded(libraries)


def test_no_driver_and_no_nccl(libraries: Path, tmp_path: Path) -> None:
    """Problem 22: the error says what is missing, and how to fix it."""
    text = loaded(tmp_path, str(tmp_path / "none.so"))
    assert text.startswith("refused: the CUDA driver cannot be loaded")
    assert str(tmp_path / "none.so") in text and "ENGINE_CUDA_LIBRARY" in text and "--gpus all" in text
    text = loaded(tmp_path, str(libraries / "libcuda.so.1"), str(tmp_path / "none.so"))
    assert text.startswith("refused: NCCL cannot be loaded")
    assert "nvidia-nccl-cu12" in text and "ENGINE_NCCL_LIBRARY" in text


@pytest.mark.parametrize("version", [2708, 21403, 21705])
def test_nccl_that_is_too_old(version: int, libraries: Path, tmp_path: Path) -> None:
    """Problem 22."""
    made = library(tmp_path / "old", "libnccl.so.2", claims(version))
    text = loaded(libraries, nccl=str(made))
    wanted = {2708: "2.7.8", 21403: "2.14.3", 21705: "2.17.5"}[version]
    assert text.startswith(f"refused: {made}, NCCL {wanted}, is too old: 2.18.0 or newer is needed")


def test_libraries_without_a_function(libraries: Path, tmp_path: Path) -> None:
    """Problem 22: the error has the function's name, the file, and the version that would have it."""
    made = library(tmp_path / "nccl", "libnccl.so.2", claims(22807))
    text = loaded(libraries, nccl=str(made))
    assert text.startswith(f"refused: {made}, NCCL 2.28.7, lacks the function ncclGetUniqueId: it is damaged")
    made = library(tmp_path / "nothing", "libnccl.so.2", "int nothing;")
    assert "lacks the function ncclGetVersion" in loaded(libraries, nccl=str(made))
    source = "int cuDriverGetVersion(int *version) { *version = 11020; return 0; } int cuInit(int f) { return f; }"
    made = library(tmp_path / "cuda", "libcuda.so.1", source)
    text = loaded(libraries, cuda=str(made), nccl=str(libraries / "libnccl.so.2"))
    assert text.startswith(f"refused: {made}, the driver for CUDA 11.2, lacks the function cuDeviceGetCount: a driver")
    assert "11.4" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [21805, 22203, 22703, 23201])
def test_versions_of_nccl(version: int, tmp_path: Path) -> None:
    """Problem 22: functions of later versions are not required."""
    made = build(tmp_path / "libraries", version)
    Job(made, tmp_path, 2, "opens", module="plane_programs", one_thread=1).succeeds()


# ---- which GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_versions_of_nccl_are_refused(libraries: Path, tmp_path: Path) -> None:
    """Problem 22: NCCL is not asked before; the error has both ranks, versions and files."""
    old = build(tmp_path / "old", 21805)
    for text in Job([libraries, old], tmp_path, 2, "refused", module="plane_programs").succeeds():
        assert (
            f"rank 1 has NCCL 2.18.5 ({old}/libnccl.so.2), rank 0 has NCCL 2.28.7 ({libraries}/libnccl.so.2): install "
            "the same version"
        ) in text


def test_one_gpu_for_two_ranks_is_refused(start_ranks: Start) -> None:
    """Problem 23: the GPU has different numbers in the two processes, which see the GPUs in different orders."""
    for text in start_ranks(3, "refused", devices=["3,1", "2", "3"]).succeeds():
        assert "ranks 0, 2 have the same GPU 7374616e-642d-696e-2033-" in text
        assert "(stand-in 3, 0000:04:00.0), rank 0 as its device 0 of 2, rank 2 as its device 0 of 1: give each" in text
        assert text.count("have the same GPU") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("version", "asked", "program"),
    [(23007, "1", "accepted"), (22907, "1", "refused"), (23007, "0", "refused"), (23007, "", "refused")],
)
def test_one_gpu_for_two_ranks_where_nccl_is_told_so(version: int, asked: str, program: str, tmp_path: Path) -> None:
    """Problem 23: NCCL 2.30 accepts them, for tests, if the environment asks for it."""
    made = build(tmp_path / "nccl", version)
    more = {"NCCL_MULTI_RANK_GPU_ENABLE": asked} if asked else {}
    job = Job(made, tmp_path, 2, program, devices=["0", "0"], module="plane_programs", more=more, one_thread=1)
    for text in job.succeeds():
        assert ("have the same GPU" in text) == (program == "refused")


def test_gpus_in_other_orders(start_ranks: Start) -> None:
    """Problem 23: neither equal numbers nor several GPUs in a process are an obstacle."""
    texts = start_ranks(2, "accepted", "1", devices=["0,1,2", "1,0"]).succeeds()
    assert "2031-" in texts[0] and "2030-" in texts[1]


@pytest.mark.slow
def test_slices_of_one_gpu(start_ranks: Start) -> None:
    """Problem 23, MIG: slices share a bus address, and NCCL accepts one of them; slices of several GPUs work."""
    for text in start_ranks(2, "refused", slices=2).succeeds():
        assert "ranks 0 and 1 have slices (MIG) of one GPU (stand-in 1, 0000:01:00.0)" in text
    start_ranks(2, "accepted", slices=2, devices=["0", "2"]).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ordinal", "devices", "wanted"),
    [
        ("0", ["0", "9"], "rank 1: cuInit returned CUDA_ERROR_NO_DEVICE: the process sees no GPU"),
        ("1", ["0,1", "1"], "rank 1: cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE: the process sees 1 GPUs"),
    ],
)
def test_rank_without_that_gpu(ordinal: str, devices: list[str], wanted: str, start_ranks: Start) -> None:
    """Problem 23: all ranks are told."""
    for text in start_ranks(2, "refused", ordinal, devices=devices).succeeds():
        assert wanted in text
        assert "CUDA_VISIBLE_DEVICES" in text


def test_rank_without_a_driver(libraries: Path, tmp_path: Path) -> None:
    """Problem 22: the others do not wait, and say what is missing on that rank."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(libraries / "libcuda.so.1", bare)
    for text in Job([libraries, bare], tmp_path, 2, "refused", module="plane_programs").succeeds():
        assert "rank 1: NCCL cannot be loaded" in text


# ---- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), [(1, "lazy"), (3, "drawn"), *((2, policy) for policy in POLICIES)])
def test_opens_and_closes(size: int, policy: str, start_ranks: Start) -> None:
    """Problems 4 and 8: one thread makes all calls, every kernel is launched once and ends, and nothing is left."""
    start_ranks(size, "opens", policy=policy, loading_waits=1).succeeds()


def test_ready_when_all_have_come(start_ranks: Start) -> None:
    """A communicator in progress is not ready."""
    start_ranks(2, "late", "0.5").succeeds()


def test_another_threads_capture_goes_on(start_ranks: Start) -> None:
    """Problem 15."""
    start_ranks(2, "captures").succeeds()


def test_forked_child_calls_nothing(start_ranks: Start) -> None:
    """Problem 16: the stand-ins abort a child that calls them."""
    start_ranks(2, "forks").succeeds()


@pytest.mark.slow
def test_work_ends_before_a_close_frees(start_ranks: Start, tmp_path: Path) -> None:
    start_ranks(2, "busy", more=changed("none", tmp_path / "none")).succeeds()


@pytest.mark.slow
def test_call_that_goes_on_behind_a_close(start_ranks: Start, tmp_path: Path) -> None:
    start_ranks(1, "visited", more=changed("none", tmp_path / "none")).succeeds()


def test_cuda_thread_wakes_and_is_woken(start_ranks: Start) -> None:
    start_ranks(1, "rings").succeeds()


# ---- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_call_that_fails_is_told_on_all_ranks(start_ranks: Start) -> None:
    """Problem 17; afterwards opening works at once in the same world."""
    start_ranks(2, "failing").succeeds(100)


@pytest.mark.slow
def test_signals_do_not_lose_the_cuda_thread(start_ranks: Start) -> None:
    start_ranks(1, "signalled", linger=800).succeeds()


def test_each_code_of_nccl_has_a_text(start_ranks: Start) -> None:
    """Problem 24; the rank that waits for the other gives up in time."""
    start_ranks(2, "codes").succeeds()


@pytest.mark.parametrize(
    ("call", "blamed"),
    [
        ("ncclCommInitRankConfig", "other ranks have not come"),
        ("cuStreamQuery", "other ranks have not come"),
        ("cuMemAlloc_v2", "the driver is slow"),
        ("cuModuleLoadDataEx", "the driver is slow"),
    ],
)
def test_other_ranks_are_blamed_for_what_waits_for_them_alone(call: str, blamed: str) -> None:
    said = texts.explain_failure((call, texts.GIVEN_UP, "", ""), 1.0, {})
    assert said.startswith(f"the wait for {call} was given up after 1 s (ENGINE_START_TIMEOUT): {blamed}")


def test_old_driver_says_what_it_does_not_take(start_ranks: Start) -> None:
    """Problem 22: the error contains the compiler's own words."""
    for text in start_ranks(2, "refused", ptx=50).succeeds():
        assert "cuModuleLoadDataEx returned CUDA_ERROR_UNSUPPORTED_PTX_VERSION, ptxas fatal" in text
        assert "CUDA 9.0" in text


@pytest.mark.slow
@pytest.mark.parametrize("program", ["slow_kernel", "never_ends"])
def test_kernel_that_does_not_end_is_given_up(program: str, start_ranks: Start) -> None:
    """Problem 21."""
    start_ranks(2, program).succeeds()


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(call, marks=pytest.mark.slow) for call in ("cuInit", "cuModuleLoadDataEx")),
        "ncclCommInitRankConfig",
    ],
)
def test_call_that_hangs_is_left_alone(call: str, start_ranks: Start) -> None:
    """Problem 21: the world goes on, and the process ends in time."""
    job = start_ranks(2, "hangs", call, "1")
    job.succeeds()


def lose(
    how: str,
    culprit: int,
    calls: list[str],
    limit: str,
    libraries: Path,
    where: Path,
    more: Mapping[str, str] | None = None,
) -> str:
    """Run two ranks that lose a third in each of these calls, always in a new world; return what they wrote."""
    told = ("survives", how, str(culprit), limit, *calls)
    # The time for which a stopped rank keeps the others from closing what it may still read.
    more = {"ENGINE_SHUTDOWN_TIMEOUT": "2", **(more or {})}
    job = Job(libraries, where, 2, *told, module="plane_programs", more=more, one_thread=1)
    victims = []
    try:
        for number, call in enumerate(calls):
            command = [
                sys.executable,
                "-P",
                "-m",
                "tests.gpu.plane_programs",
                "victim",
                "2",
                "3",
                how,
                str(culprit),
                call,
            ]
            place = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "2", **chosen(libraries)}
            victims.append(start(command, libraries, place, cwd=where, devices=3, quiet=1))
            begun = where / f"{call}.0"
            until(lambda begun=begun: begun.exists() or job.ranks[0].poll() is not None, f"case {number}", 60)
        texts = job.succeeds(60)
    finally:
        for process in [*victims, *job.ranks]:
            process.kill()
        written = ["".join(process.communicate()) for process in victims]
    assert {process.returncode for process in victims} == {-signal.SIGKILL}, written
    return texts[0]


EVERY_CALL = "EVERY_CALL" in os.environ  # make gpu-faults
LAST = [call for call in CALLS if call != "ncclGetUniqueId"]  # only rank 0 requests an id
FIRST = ["cuInit", "ncclGetUniqueId", "ncclCommInitRankConfig"]
if not EVERY_CALL:
    LAST = ["cuLaunchKernel", "ncclCommInitRankConfig"]
    FIRST = ["ncclGetUniqueId"]


@pytest.mark.sample(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("culprit", "calls"), [(2, LAST), (0, FIRST)], ids=["rank-2", "rank-0"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_rank_that_is_lost_in_each_call(
    how: str, culprit: int, calls: list[str], libraries: Path, tmp_path: Path
) -> None:
    """Problem 19: the others name it within the limit, and open their GPUs again in a world without it."""
    lose(how, culprit, calls, "30" if how == "kill" else "1", libraries, tmp_path)


LINGERING = {"policy": "eager", "linger": 20}  # so that kernels end that wait for only two of three ranks


def expect_survivors(job: Job) -> None:
    """Expect that two of three ranks find no error, and that one has died."""
    statuses, texts = job.end()
    assert statuses == [0, 0, -signal.SIGKILL], "\n".join(texts)


@pytest.mark.slow
def test_survivors_wait_for_each_other(start_ranks: Start) -> None:
    """Problem 18, before a GPU is open."""
    expect_survivors(start_ranks(3, "half_open", **LINGERING))


# ---- mutants ---------------------------------------------------------------------------------------------------------

# Programs that detect each fault of the source.
KILLERS: dict[str, tuple[str, ...]] = {
    "init_not_polled": ("late", "0.5"),
    "poll_not_given_up": ("codes",),
    "calls_not_given_up": ("codes",),
    "launches_not_awaited": ("opens",),
    "drain_does_not_wait": ("opens",),
    "drain_not_given_up": ("slow_kernel",),
    "close_does_not_drain": ("busy",),
    "end_not_rung": ("rings",),
    "job_not_rung": ("rings",),
    "wait_does_not_sleep": ("rings",),
    "capture_mode_not_set": ("captures",),
    "blocking_stream": ("busy",),
    "communicator_not_ended": ("opens",),
    "communicator_not_finished": ("opens",),
    "failure_not_looked_at": ("kill", "ncclCommInitRankConfig"),
    "cuda_thread_without_limit": ("codes",),
    "return_without_limit": ("hangs", "cuInit", "1"),
    "exchange_without_limit": ("stop", "cuInit"),
    "stuck_is_closed": ("hangs", "cuInit", "1"),
    "forked_child_closes": ("forks",),
    "visitors_not_awaited": ("visited",),
    "half_open_is_closed_at_once": ("half_open",),
}


SIZES = {"rings": 1, "visited": 1}  # number of ranks of jobs without two ranks


@pytest.mark.skipif(not EVERY_CALL, reason="takes four minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, start_ranks: Start, libraries: Path, tmp_path: Path) -> None:
    program, *rest = KILLERS[mutant]
    more = changed(mutant, tmp_path / "mutant")
    if program == "half_open":
        with pytest.raises(AssertionError):
            expect_survivors(start_ranks(3, program, more=more, **LINGERING))
        return
    if program in ("kill", "stop"):
        with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
            lose(program, 2, rest, "20" if program == "kill" else "1", libraries, tmp_path, more=more)
        return
    job = start_ranks(SIZES.get(program, 2), program, *rest, more=more)
    try:
        statuses, texts = job.end(20)
    except subprocess.TimeoutExpired:
        return
    assert any(statuses), texts


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", sorted({each for each in KILLERS.values() if each[0] not in ("kill", "stop", "half_open")})
)
def test_what_kills_mutants_lets_the_source_live(program: tuple[str, ...], start_ranks: Start, tmp_path: Path) -> None:
    more = changed("none", tmp_path / "none")
    start_ranks(SIZES.get(program[0], 2), *program, more=more).succeeds()
