"""Mutants of the GPU plane: each has a test that fails with it (`make gpu-faults`).

Those that one program of ranks kills are here, those of which a test needs more in the file of what they break.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..parallel.test_frozen_runs import KILLERS as OF_FROZEN
from .jobs import Start
from .mutants import CUDA_THREAD, MUTANTS, VARIANTS, changed
from .test_metrics import KILLERS as OF_METRICS
from .test_plane import EVERY_CALL
from .test_plane import KILLERS as OF_OPENING
from .test_sets import KILLERS as OF_SETS

PROGRAMS = ""
# By the module of the programs and the mutant: the program, with its arguments.
KILLERS: dict[str, dict[str, tuple[str, ...]]] = {
    "allreduce_programs": {
        "marks_not_awaited": ("fused",),
        "mark_not_recorded": ("fused",),
        "nccl_not_polled": ("fused",),
        "groups_not_polled": ("numbers",),
        "broadcast_not_polled": ("broadcasts",),
        "done_before_the_work": ("fused",),
        "caller_does_not_wait": ("fused",),
        "caller_waits_for_the_last_but_one": ("fused",),
        "always_passed": ("many",),
        "passed_without_a_look": ("forgotten",),
        "tables_used_again_too_early": ("pieces",),
        "context_not_pushed": ("streams",),
        "callers_spoil_captures": ("captures",),
        "newest_item_first": ("many",),
        "item_not_rung": ("fused",),
        "gaps_in_a_piece": ("pieces",),
        "second_table_lies_where_the_first_does": ("pieces",),
        "rows_end_with_their_piece": ("pieces",),
        "numbers_of_pieces_stay_here": ("pieces",),
    },
    "moving_programs": {
        "scatter_not_polled": ("numbers",),
        "moves_not_polled": ("numbers",),
        "slab_overrun_of_who_has_joined": ("joins",),
        "windows_overlap": ("numbers",),
        "room_not_awaited": ("numbers",),
        "room_awaited_for_ever": ("noroom",),
        "failure_while_room_is_awaited": ("slowroom",),
        "room_not_rung": ("prompt",),
        "room_used_too_early": ("forgotten",),
        "room_spoils_captures": ("captures",),
    },
    "sums_programs": {
        "setting_not_looked_at": ("ordered",),
    },
    "views_programs": {
        "neighbours_not_compared": ("apart",),
        "every_piece_in_the_first_place": ("apart",),
        "places_where_sums_are_ordered": ("ordered",),
        "factor_not_applied_in_place": ("kept",),
        "places_freed_in_flight": ("dropped",),
        "places_left_to_the_collector": ("dropped",),
    },
    "freeze_programs": {
        "pass_not_ordered": ("streams",),
        "pass_not_recorded": ("streams",),
        "close_does_not_await_passes": ("shuts_down",),
        "close_does_not_await_graphs": ("shuts_down",),
        "graphs_are_revoked": ("dies",),
        "graphs_hold_up_the_end": ("outlived",),
        "kernels_of_graphs_are_unloaded": ("outlived",),
        "leaving_forgets_frozen_passes": ("leaves",),
        "captures_hide_graphs": ("leaves",),
        "lack_of_memory_is_told_late": ("lacks_memory",),
        "clocks_end_with_a_freeze": ("clocks",),
        "captures_without_blocking": ("graphs",),
        "capture_is_not_asked_for": ("graphs",),
        "nothing_of_0_bytes": ("nothing",),
    },
}
SECONDS = {"allreduce_programs": 30, "moving_programs": 40, "views_programs": 40}
# Programs that end without an error on an unchanged source: the module, the program with its arguments, the source.
RUN_UNCHANGED = sorted(
    {
        (module, program, MUTANTS[mutant][0] if module == "views_programs" else CUDA_THREAD)
        for module in SECONDS
        for mutant, program in KILLERS[module].items()
    }
)


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize(("module", "mutant"), [(module, mutant) for module in KILLERS for mutant in KILLERS[module]])
def test_mutant_is_killed(module: str, mutant: str, start_ranks: Start, tmp_path: Path) -> None:
    of_sums = module == "sums_programs"
    more = changed(mutant, tmp_path / "mutant")
    job = start_ranks(3 if of_sums else 2, *KILLERS[module][mutant], module=module, more=more, linger=1)
    job.goes_wrong(SECONDS.get(module, 60), may_hang=not of_sums)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "program", "source"),
    RUN_UNCHANGED,
    ids=[f"{module}-{' '.join(program)}-{source.name}" for module, program, source in RUN_UNCHANGED],
)
def test_what_kills_mutants_lets_the_source_live(
    module: str, program: tuple[str, ...], source: Path, start_ranks: Start, tmp_path: Path
) -> None:
    start_ranks(2, *program, module=module, more=changed("none", tmp_path / "none", source), linger=1).succeeds()


def test_every_mutant_has_a_killer() -> None:
    of = (*KILLERS.values(), OF_OPENING, OF_SETS, OF_METRICS, OF_FROZEN)
    assert set().union(*of) == set(MUTANTS)


@pytest.mark.parametrize("name", {**MUTANTS, **VARIANTS})
def test_what_is_changed_is_there(name: str) -> None:
    path, old, new = {**MUTANTS, **VARIANTS}[name]
    assert old in path.read_text()
    assert old != new
