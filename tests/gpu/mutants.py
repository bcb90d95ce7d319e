"""Faulty variants of the GPU plane's sources, and how a process of the tests comes to run them.

Each has a test that fails with it (test_plane.py, test_allreduce.py, test_sums.py, tests/parallel/test_frozen_runs.py).
A process with CUDA_THREAD_LIBRARY uses the CUDA thread of that library, of which one source was changed. PLANE_SOURCE
names the file of the module `engine.gpu.plane`, and NATIVE_MODULE a module of `engine_ext` and its library.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ..standins import LIBRARY, ROOT, compiled

SOURCES = sorted((ROOT / "engine_ext/gpu").glob("*.c"))
CUDA_THREAD, FREEZING, KEEPING, LAUNCHING, MOVING, OPENING, SAMPLING, STREAMS, TURNS = SOURCES
PLANE = ROOT / "engine/gpu/plane.py"
FROZEN = ROOT / "engine_ext/coordinator/frozen.pyx"
COORDINATOR = ROOT / "engine_ext/coordinator/coordinator.pyx"
HANDOVER = ROOT / "engine_ext/control/device_entries.pyx"
HOOKS = ROOT / "engine_ext/bindings/gradients.pyx"

# By name: the file, the text in it, and its replacement.
MUTANTS: dict[str, tuple[Path, str, str]] = {
    "init_not_polled": (CUDA_THREAD, "if (state != ncclInProgress) return", "return"),
    "poll_not_given_up": (
        CUDA_THREAD,
        "STEP(cuda_thread_cancelled(t, call) || NCCL(ncclCommGetAsyncError, t->at->comm, &state));",
        "STEP(NCCL(ncclCommGetAsyncError, t->at->comm, &state));",
    ),
    "calls_not_given_up": (
        CUDA_THREAD,
        "return load32_acquire(&t->cancelled) ? cuda_thread_failed",
        "return 0 ? cuda_thread_failed",
    ),
    "pass_not_ordered": (FREEZING, "if (p->ran) CUDA_STEP(cuStreamWaitEvent, p->stream, p->memory->done, 0);", ""),
    "pass_not_recorded": (FREEZING, "  STEP(CUDA(cuEventRecord, p->memory->done, p->stream));", ""),
    "close_does_not_await_passes": (FREEZING, "if (load32_acquire(&p->ran) && t->f", "if (0 && t->f"),
    "close_does_not_await_graphs": (KEEPING, "if (!cuda_thread_has_captured(t)) return 1;", "return 1;"),
    "graphs_are_revoked": (OPENING, "if (cuda_thread_has_captured(t)) cuda_thread_end_graphs(t, 0);", ""),
    "graphs_hold_up_the_end": (KEEPING, "engine_thread_start(NULL, run, k);", "run(k);"),
    "captures_hide_graphs": (
        KEEPING,
        "while (k->f.cuCtxSynchronize() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) cuda_thread_nap();",
        "k->f.cuCtxSynchronize();",
    ),
    "kernels_of_graphs_are_unloaded": (OPENING, "t->module != NULL && !left", "t->module != NULL"),
    "leaving_forgets_frozen_passes": (
        STREAMS,
        "if (load_pointer((void **)&t->passes) == NULL) return 1;",
        "if (1) return 1;",
    ),
    "lack_of_memory_is_told_late": (
        CUDA_THREAD,
        "t->failure.code == CUDA_ERROR_OUT_OF_MEMORY) cuda_thread_forgive(t);",
        "0) cuda_thread_forgive(t);",
    ),
    "clocks_end_with_a_freeze": (
        CUDA_THREAD,
        "if (idle && cuda_thread_compare_clocks(t))",
        "if (!waiting && idle && cuda_thread_compare_clocks(t))",
    ),
    "captures_without_blocking": (OPENING, ".blocking = blocking,", ".blocking = 0,"),
    "capture_is_not_asked_for": (FREEZING, "if (capturing != CU_STREAM_CAPTURE_STATUS_NONE) {", "if (0) {"),
    "launches_not_awaited": (OPENING, "  return cuda_thread_drain(t, 0);", "  return 0;"),
    "drain_does_not_wait": (CUDA_THREAD, "if (code != CUDA_ERROR_NOT_READY) return", "return"),
    "drain_not_given_up": (
        CUDA_THREAD,
        'now_ns() - begun > limit : cuda_thread_cancelled(t, "cuStreamQuery")',
        "0 : 0",
    ),
    "close_does_not_drain": (OPENING, "  if (t->stream != NULL && cuda_thread_drain(t, DRAIN_NS)) well = 0;\n", ""),
    "end_not_rung": (CUDA_THREAD, "    door_ring(&t->ended, DOOR_EVERYBODY);\n", ""),
    "job_not_rung": (
        CUDA_THREAD,
        "  store32_release(&t->job, job); /* pairs with the thread's look */\n  door_ring(&t->door, 1);\n",
        "  store32_release(&t->job, job);\n",
    ),
    "wait_does_not_sleep": (
        CUDA_THREAD,
        "!= CUDA_THREAD_NOTHING) door_sleep(&t->ended, count, ns)",
        "!= CUDA_THREAD_NOTHING) (void)count, (void)ns",
    ),
    "capture_mode_not_set": (OPENING, "  CUDA_STEP(cuThreadExchangeStreamCaptureMode, &mode);\n", "  (void)mode;\n"),
    "blocking_stream": (OPENING, "CU_STREAM_NON_BLOCKING, greatest", "CU_STREAM_DEFAULT, least"),
    "communicator_not_ended": (OPENING, "  if (c->comm != NULL) NCCL(ncclCommAbort, c->comm);\n", ""),
    "communicator_not_finished": (OPENING, "if (whole && well) finish_communicators(t);", ""),
    "failure_not_looked_at": (PLANE, " and self.engine.failure is None:", ":"),
    "cuda_thread_without_limit": (
        PLANE,
        "not cuda_thread.wait(TICK) and self.patience.seconds_left() and",
        "not cuda_thread.wait(TICK) and",
    ),
    "return_without_limit": (
        PLANE,
        "if not _has_ended(cuda_thread, RETURN):",
        "while not _has_ended(cuda_thread, RETURN):",
    ),
    "exchange_without_limit": (PLANE, "if not patience.seconds_left():", "if False:"),
    "visitors_not_awaited": (OPENING, "t->left = !see_visitors_out(t);", "see_visitors_out(t);"),
    "half_open_is_closed_at_once": (
        PLANE,
        "half.close() if self.engine.failure is None else keep(half)",
        "half.close()",
    ),
    "turns_take_of_the_limit": (
        PLANE,
        "            self.patience.reset(self.settings.start_timeout)\n"
        '            self._run_collective_step("communicator"',
        '            self._run_collective_step("communicator"',
    ),
    "sets_are_not_forgotten": (PLANE, "            self.cuda_thread.free_communicator(at)\n", ""),
    "nothing_of_0_bytes": (
        FREEZING,
        "longest(parts, n_parts) / 32 * 32 + 32)",
        "(longest(parts, n_parts) + 31) / 32 * 32)",
    ),
    "stuck_is_closed": (
        PLANE,
        "if self.cuda_thread is not None and self.cuda_thread not in _stuck:",
        "if self.cuda_thread is not None:",
    ),
    "marks_not_awaited": (
        LAUNCHING,
        "CUDA_STEP(cuStreamWaitEvent, t->stream, item->ready[k]->event, 0);",
        "(void)k;",
    ),
    "mark_not_recorded": (STREAMS, "code = t->f.cuEventRecord(mark->event, stream);", "code = CUDA_SUCCESS;"),
    "nccl_not_polled": (LAUNCHING, 'return settle(t, "ncclAllReduce");', "return 0;"),
    "groups_not_polled": (LAUNCHING, 'return settle(t, "ncclGroupEnd");', "return 0;"),
    "broadcast_not_polled": (LAUNCHING, 'return settle(t, "ncclBroadcast");', "return 0;"),
    "done_before_the_work": (
        LAUNCHING,
        "  STEP(cuda_thread_run(t, item));\n  t->table_ends[turn] = t->table_head;\n"
        "  CUDA_STEP(cuEventRecord, t->done[turn], t->stream);\n",
        "  CUDA_STEP(cuEventRecord, t->done[turn], t->stream);\n"
        "  STEP(cuda_thread_run(t, item));\n"
        "  t->table_ends[turn] = t->table_head;\n",
    ),
    "caller_does_not_wait": (
        STREAMS,
        "TRY(cuStreamWaitEvent, stream, t->done[(ticket - 1) % DEVICE_OUTSTANDING], 0);",
        "(void)l, (void)stream, (void)ticket, (void)why;",
    ),
    "caller_waits_for_the_last_but_one": (
        STREAMS,
        "TRY(cuStreamWaitEvent, stream, t->done[(ticket - 1) % DEVICE_OUTSTANDING], 0);",
        "TRY(cuStreamWaitEvent, stream, t->done[(ticket + DEVICE_OUTSTANDING - 2) % DEVICE_OUTSTANDING], 0);",
    ),
    "always_passed": (
        STREAMS,
        "  if (load_acquire(&d->enqueued) < ticket",
        "  if (1) return 1;\n  if (load_acquire(&d->enqueued) < ticket",
    ),
    "passed_without_a_look": (
        LAUNCHING,
        "if (code == CUDA_ERROR_NOT_READY) break;",
        "if (code == CUDA_ERROR_NOT_READY) code = 0;",
    ),
    "passed_is_told_relaxed": (
        LAUNCHING,
        "store_release(&t->d.passed, passed);",
        "store_relaxed(&t->d.passed, passed);",
    ),
    "passed_is_read_relaxed": (
        STREAMS,
        "passed = load_acquire(&d->passed) >= ticket;",
        "passed = load_relaxed(&d->passed) >= ticket;",
    ),
    "tables_used_again_too_early": (
        LAUNCHING,
        "  while (t->table_head + bytes - t->table_tail > t->table_bytes) {",
        "  while (0) {",
    ),
    "context_not_pushed": (STREAMS, "if (v->pushed) TRY(cuCtxPushCurrent_v2, t->context);", "v->pushed = 0;"),
    "callers_spoil_captures": (
        STREAMS,
        "v->mode = CU_STREAM_CAPTURE_MODE_RELAXED;",
        "v->mode = CU_STREAM_CAPTURE_MODE_GLOBAL;",
    ),
    "newest_item_first": (
        CUDA_THREAD,
        "    item->next = oldest;\n    oldest = item;\n",
        "    if (!oldest) oldest = item;\n    item->next = next;\n",
    ),
    "item_not_rung": (TURNS, "  door_ring(&t->door, 1);\n", ""),
    "gaps_in_a_piece": (
        LAUNCHING,
        "rows[count].offset = row->offset + first - m->low - *base;",
        "rows[count].offset = row->offset - m->low - *base;",
    ),
    "second_table_lies_where_the_first_does": (LAUNCHING, "slab = m->slab + base;", "slab = m->slab;"),
    "rows_end_with_their_piece": (LAUNCHING, "2 * row + (rows[row].offset < begin)", "2 * row"),
    "numbers_of_pieces_stay_here": (
        LAUNCHING,
        "used = cuda_thread_table_bytes(count, end);",
        "used = count * sizeof *rows;",
    ),
    "awaited_members_are_held": (FROZEN, "if awaited and is_awaited(c, batch):", "if False:"),
    "members_that_cannot_come_are_waited_for": (FROZEN, "if cannot_fill(c, batch, ended):", "if False:"),
    "batches_are_held_for_ever": (FROZEN, "return age_ns(now, batch.latest) >= (", "return 0 * ("),
    "batches_are_broken_by_time": (FROZEN, "HOLD_NS = 1000000000", "HOLD_NS = 100000"),
    "late_ranks_break_batches": (FROZEN, ">= (c.hold_ns if ended.count else ", ">= (0 * c.hold_ns if False else "),
    "frozen_batches_have_no_deadline": (FROZEN, "if c.held else 0", "if False else 0"),
    "broken_batches_take_members_in": (FROZEN, "if batch.broken:", "if False:"),
    "what_fuses_by_time_takes_gradients_in": (FROZEN, "if not is_frozen(c, name):", "if True:"),
    "optimizers_share_batches": (FROZEN, "while o != NULL and o.number != name.number:", "while False:"),
    "batches_outlive_a_change": (COORDINATOR, "        frozen_dissolve(c, name)\n", ""),
    "batches_are_never_made_anew": (FROZEN, "if not kept and (", "if not kept and o.batches == NULL and ("),
    "setting_not_looked_at": (LAUNCHING, "return t->ordered || ", "return "),
    "scatter_not_polled": (LAUNCHING, 'return settle(t, "ncclReduceScatter");', "return 0;"),
    "moves_not_polled": (MOVING, '  STEP(cuda_thread_settle(t, "ncclGroupEnd"));\n', ""),
    "samples_are_never_read": (LAUNCHING, "  STEP(cuda_thread_read_samples(t));\n", ""),
    "samples_are_read_too_early": (SAMPLING, "s != t->sampling && s->ticket <= t->d.passed", "s != t->sampling"),
    "held_marks_are_given_out": (
        STREAMS,
        "  if (mark->unread) return; /* the CUDA thread calls, which has yet to read it */\n",
        "",
    ),
    "stands_are_read_too_early": (
        SAMPLING,
        "  if (code == CUDA_ERROR_NOT_READY) return 0;\n  STEP(cuda_thread_after",
        "  STEP(cuda_thread_after",
    ),
    "stand_begins_behind_the_wait": (
        STREAMS,
        "  TRY(cuEventRecord, stand->before, stream);\n"
        "  if (load_acquire(&t->d.passed) < ticket && let_wait(t, stream, ticket, why)) return -1;"
        " /* pairs with cuda_thread_look */\n",
        "  if (load_acquire(&t->d.passed) < ticket && let_wait(t, stream, ticket, why)) return -1;"
        " /* pairs with cuda_thread_look */\n"
        "  TRY(cuEventRecord, stand->before, stream);\n",
    ),
    "stages_are_not_told_apart": (SAMPLING, "    s->stages[s->n++] = stage;", "    s->stages[s->n++] = DEVICE_NCCL;"),
    "queue_begins_at_the_work": (
        SAMPLING,
        "duration(t, s->mark->event, s->events[0],",
        "duration(t, s->events[0], s->events[0],",
    ),
    "clocks_are_not_compared": (SAMPLING, "before + (after - before) / 2;", "before + 5000000000;"),
    "slab_overrun_of_who_has_joined": (MOVING, "item->lacking ? t->slab_bytes : LARGEST", "LARGEST"),
    "windows_overlap": (LAUNCHING, "t->slab + (uint64_t)r * stride};", "t->slab + (uint64_t)r * (stride - VECTOR)};"),
    "room_not_awaited": (CUDA_THREAD, "if (!load32_acquire(&item->unallocated)) break;", "break;"),
    "room_awaited_for_ever": (CUDA_THREAD, "    STEP(cuda_thread_cancelled(t, what));\n", ""),
    "failure_while_room_is_awaited": (CUDA_THREAD, "    look_around(t);\n    STEP(t->failure.call != NULL);\n", ""),
    "room_not_rung": (STREAMS, "  door_ring(&cuda_thread_of(d)->door, 1);\n", "  (void)d;\n"),
    "room_used_too_early": (LAUNCHING, "k < item->n_ready; k++", "k < item->n_ready && k < 1; k++"),
    "neighbours_not_compared": (HANDOVER, "if row.tensor - row.offset != place:", "if False:"),
    "every_piece_in_the_first_place": (LAUNCHING, "part->place + low : t->slab", "part->place : t->slab"),
    "places_where_sums_are_ordered": (LAUNCHING, "part->place != 0 && !ordered ?", "part->place != 0 ?"),
    "factor_not_applied_in_place": (LAUNCHING, "(copies && is_there(m, row))", "is_there(m, row)"),
    "places_left_to_the_collector": (
        HOOKS,
        "keep_alive(hook.op, hook.view if hook.placed else None)",
        "keep_alive(hook.op, None)",
    ),
    "places_freed_in_flight": (HOOKS, "                self.keep_place()\n", "                pass\n"),
    "room_spoils_captures": (STREAMS, "  v.mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* in which", "  /* in which"),
    "sets_take_no_turns": (
        TURNS,
        "  if (item->queue == NULL || item->work == DEVICE_TURN) add(&t->first, &t->last, item);\n",
        "  if (item->work == DEVICE_TURN) free(item);\n  else if (c != NULL) add(&t->first, &t->last, item);\n",
    ),
    "turns_do_not_wait": (TURNS, "    if (c->first == NULL && !gives_up(t)) return NULL;\n", ""),
    "looks_forget_the_set": (CUDA_THREAD, "  t->at = at;\n", "  t->at = &t->world;\n"),
    "sets_are_not_parted": (
        OPENING,
        "  end_communicator(t, c);\n  cuda_thread_remove_communicator(t, c);\n",
        "  cuda_thread_remove_communicator(t, c);\n",
    ),
    "sets_are_ended_one_by_one": (OPENING, "several = c != NULL && c->next != NULL;", "several = 0;"),
    "forked_child_closes": (PLANE, "if self._open and os.getpid() == self._pid:", "if self._open:"),
}


# Equivalent variants that show more.
VARIANTS: dict[str, tuple[Path, str, str]] = {
    "calls_of_4_kib_in_threes": (
        MOVING,
        "enum { CALLS = 1024 };                             /* of one group of NCCL's, which takes 2048 */\n"
        "static const uint64_t LARGEST = (uint64_t)1 << 30;",
        "enum { CALLS = 3 };\nstatic const uint64_t LARGEST = 4096;",
    ),
}


def changed(mutant: str, where: Path, source: Path = CUDA_THREAD, told: Path | None = None) -> dict[str, str]:
    """Make a mutant, or with `none` an unchanged source; return the variables of a process that runs it.

    `told` is the directory of the stand-ins, which then see how threads synchronize by the CUDA thread's words
    (told.h).
    """
    path, old, new = {**MUTANTS, **VARIANTS}.get(mutant, (source, "", ""))
    text = path.read_text()
    if mutant != "none":
        assert text.count(old) >= 1, f"{mutant}: not in {path.name}: {old}"
        text = text.replace(old, new)
    where.mkdir(parents=True, exist_ok=True)
    if path == PLANE:
        (where / "plane.py").write_text(text)
        return {"PLANE_SOURCE": str(where / "plane.py")}
    (where / path.name).write_text(text)
    if path.suffix == ".pyx":
        return _native(path, where)
    glue = Path(__file__).parent / "cuda_thread_glue.c"
    sources = [glue, where / path.name, *(each for each in SOURCES if each != path)]
    options = [f"-I{ROOT / 'engine_ext/gpu'}", "-Wno-unused", "-Wno-unused-parameter", *LIBRARY]
    if told:
        options += ["-include", str(Path(__file__).parent / "told.h"), f"-L{told}", "-l:libcuda.so.1"]
    return {"CUDA_THREAD_LIBRARY": str(compiled(where / "cuda_thread.so", sources, *options))}


def _native(path: Path, directory: Path) -> dict[str, str]:
    """Compile a Cython source at `path` in the sources, of which `directory` has a changed copy."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    library = directory / f"{path.stem}.so"
    options = [
        "-Xboundscheck=False",
        "-Xwraparound=False",
        "-Xcdivision=True",
        "-I",
        str(ROOT),
        "--module-name",
        module,
    ]
    command = [sys.executable, "-m", "cython", "-3", *options, str(directory / path.name)]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    includes = [f"-I{each}" for each in (ROOT / "engine_ext", sysconfig.get_path("include"))]
    compiled(library, [directory / f"{path.stem}.c"], *includes, "-fPIC", "-shared", "-w")
    return {"NATIVE_MODULE": f"{module}={library}"}


def take_native_place() -> None:
    """Load the mutant of a Cython source, if there is one, before anything of the engine is imported."""
    if "NATIVE_MODULE" not in os.environ:
        return
    name, _, library = os.environ["NATIVE_MODULE"].partition("=")
    importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def take_place() -> None:
    """Load the mutant in place of the source, if there is one."""
    if library := os.environ.get("CUDA_THREAD_LIBRARY"):
        import engine_ext.gpu.cuda_thread

        CudaThread.glue = _glue(library)
        engine_ext.gpu.cuda_thread.CudaThread = CudaThread  # type: ignore[misc, assignment]
    if source := os.environ.get("PLANE_SOURCE"):
        import engine.gpu

        spec = importlib.util.spec_from_file_location("engine.gpu.plane", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["engine.gpu.plane"] = engine.gpu.plane = module  # type: ignore[attr-defined]
        spec.loader.exec_module(module)


class Failure(ctypes.Structure):
    """`cuda_thread_failure`."""

    _fields_ = (
        ("call", ctypes.c_char_p),
        ("code", ctypes.c_int),
        ("name", ctypes.c_char * 64),
        ("text", ctypes.c_char * 2048),
    )


class Identity(ctypes.Structure):
    """`cuda_thread_identity`."""

    _fields_ = (
        ("driver", ctypes.c_int),
        ("devices", ctypes.c_int),
        ("name", ctypes.c_char * 128),
        ("pci", ctypes.c_char * 32),
        ("uuid", ctypes.c_ubyte * 16),
    )


def _glue(library: str) -> ctypes.CDLL:
    glue = ctypes.CDLL(library)
    for name, kind in {
        "new": ctypes.c_void_p,
        "add_communicator": ctypes.c_void_p,
        "device": ctypes.c_void_p,
        "allocate_pass": ctypes.c_void_p,
        "pass_ended": ctypes.c_char_p,
        "call": ctypes.c_char_p,
        "failure": ctypes.POINTER(Failure),
        "identity": ctypes.POINTER(Identity),
        "id": ctypes.POINTER(ctypes.c_char * 128),
        "stream": ctypes.c_void_p,
        "kernel": ctypes.c_void_p,
    }.items():
        getattr(glue, f"glue_{name}").restype = kind
    return glue


def _numbers(kernels: list[bytes]) -> Any:
    """Return the number of each kernel: `cuda_thread_kernels`."""
    dtypes = "float16 bfloat16 float32 float64 int8 uint8 int16 uint16 int32 int64 bool".split()
    names = [f"{way}_{tensor}_{wire}" for way in ("pack", "unpack") for tensor in dtypes for wire in dtypes]
    names += ["pack_bytes", "unpack_bytes", *(f"reduce_{dtype}" for dtype in dtypes)]
    numbers = [kernels.index(name.encode()) if name.encode() in kernels else -1 for name in names]
    return (ctypes.c_int * len(numbers))(*numbers)


class CudaThread:
    """`engine_ext.gpu.cuda_thread.CudaThread` on top of another library."""

    glue: ctypes.CDLL
    sets = 0

    def __init__(
        self,
        addresses: list[int],
        ordinal: int,
        rank: int,
        size: int,
        image: bytes,
        kernels: list[bytes],
        *,
        slab: int,
        tables: int,
        ordered: bool = False,
    ) -> None:
        self.kept = (ctypes.c_size_t * len(addresses))(*addresses), image, (ctypes.c_char_p * len(kernels))(*kernels)
        table, text, names = self.kept
        known = _numbers(kernels)
        sizes = (ctypes.c_uint64 * 3)(slab, tables, ordered)
        made = self.glue.glue_new(table, ordinal, rank, size, ctypes.c_char_p(text), names, len(kernels), known, sizes)
        self.state = ctypes.c_void_p(made)

    def begin(self, job: str, id: bytes | None = None) -> None:
        number = 1 + ["identify", "prepare", "name", "connect", "close"].index(job)
        self.glue.glue_begin(self.state, number, ctypes.c_char_p(id))

    def wait(self, seconds: float) -> bool:
        return bool(self.glue.glue_wait(self.state, ctypes.c_ulonglong(int(seconds * 1e9) or 1)))

    def cancel(self) -> None:
        self.glue.glue_cancel(self.state)

    def join_thread(self) -> None:
        self.glue.glue_join_thread(self.state)

    def add_communicator(self, number: int, rank: int, size: int) -> int:
        self.sets += 1
        return int(self.glue.glue_add_communicator(self.state, number, rank, size))

    def connect_communicator(self, communicator_at: int, id: bytes) -> None:
        self.glue.glue_connect_communicator(self.state, ctypes.c_void_p(communicator_at), ctypes.c_char_p(id))

    def destroy_communicator(self, communicator_at: int) -> None:
        self.glue.glue_destroy_communicator(self.state, ctypes.c_void_p(communicator_at))

    def await_stage(self, communicator_at: int, stage: str, seconds: float) -> str | None:
        stages, limit = ["begun", "connected", "destroyed", "failed"], ctypes.c_ulonglong(int(seconds * 1e9) or 1)
        wanted = stages.index(stage) + 1
        found = self.glue.glue_await_stage(self.state, ctypes.c_void_p(communicator_at), wanted, limit)
        return "failed" if found == len(stages) else stage if found >= wanted else None

    def free_communicator(self, communicator_at: int) -> None:
        self.sets -= 1
        self.glue.glue_free_communicator(ctypes.c_void_p(communicator_at))

    def allocate_pass(
        self,
        op: int,
        prescale: float,
        postscale: float,
        parts: list[tuple[int, int, int, int, int]],
        rows: list[tuple[int, int, int]],
    ) -> int:
        factors = (ctypes.c_double * 2)(prescale, postscale)
        their_parts = b"".join(struct.pack("=4i3Q", *part, 0, 0) for part in parts)
        their_rows = b"".join(struct.pack("=3Q", *row) for row in rows)
        counts = len(parts), len(rows)
        made = self.glue.glue_allocate_pass(self.state, op, factors, their_parts, counts[0], their_rows, counts[1])
        return int(made)

    def connect_pass(self, pass_at: int, id: bytes | None) -> None:
        self.glue.glue_connect_pass(self.state, ctypes.c_void_p(pass_at), id)

    def replay_pass(self, pass_at: int, stream: int) -> None:
        self.glue.glue_replay_pass(self.state, ctypes.c_void_p(pass_at), ctypes.c_void_p(stream))

    def pass_ended(self, pass_at: int, seconds: float) -> str | None:
        limit = ctypes.c_ulonglong(int(seconds * 1e9) or 1)
        found = self.glue.glue_pass_ended(self.state, ctypes.c_void_p(pass_at), limit)
        return None if found is None else found.decode()

    @property
    def pending(self) -> bool:
        return bool(self.glue.glue_pending(self.state))

    @property
    def device(self) -> int:
        return int(self.glue.glue_device(self.state))

    @property
    def call(self) -> str | None:
        found = self.glue.glue_call(self.state)
        return None if found is None else found.decode()

    @property
    def failure(self) -> tuple[str, int, str, str] | None:
        found = self.glue.glue_failure(self.state).contents
        return (
            None if found.call is None else (found.call.decode(), found.code, found.name.decode(), found.text.decode())
        )

    @property
    def identity(self) -> dict[str, int | str]:
        found = self.glue.glue_identity(self.state).contents
        told: dict[str, Any] = {name: getattr(found, name) for name in ("driver", "devices")}
        return {**told, "name": found.name.decode(), "pci": found.pci.decode(), "uuid": bytes(found.uuid).hex()}

    @property
    def id(self) -> bytes:
        return self.glue.glue_id(self.state).contents.raw

    @property
    def left(self) -> bool:
        return bool(self.glue.glue_left(self.state))

    def mark(self, stream: ctypes.c_void_p) -> str:
        """Mark a stream in this thread, like a submission; return "", or why that failed."""
        why = ctypes.create_string_buffer(512)
        self.glue.glue_mark(self.state, stream, why)
        return why.value.decode()

    @property
    def stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.glue.glue_stream(self.state))

    def kernel(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.glue.glue_kernel(self.state, number))
