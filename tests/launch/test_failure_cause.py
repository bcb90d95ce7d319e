"""Decision about the culprit of a failure, from exit codes and reports alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import EngineError, RankDiedError, RankLeftError, RankRaisedError, RankStalledError, RendezvousError
from engine.exit_report import writer
from engine.exit_report.report import ExitReport, Failure
from engine.launch.process.console import Console
from engine.launch.process.output import RankOutput
from engine.launch.process.rank_end import RankEnd
from engine.launch.report.failure_cause import Claim, claim_of, find_failure_cause, traceback_span
from engine.launch.report.failure_report import failure_lines, find_first_failure, read_tail

pytestmark = pytest.mark.quick


def died(source, culprit, time, cause="died"):
    return Claim(source, culprit, cause, f"rank {culprit} {cause}", time)


@pytest.mark.parametrize(
    ("ends", "claims", "culprit", "code"),
    [
        # the first in time, not in number
        ([RankEnd(0, 4, 2.0), RankEnd(1, 0, 0.5), RankEnd(2, 3, 1.0)], [], 2, 3),
        # killed: the others raise because of it, and are noticed first
        ([RankEnd(0, 1, 1.0), RankEnd(1, -9, 1.1)], [died(0, 1, 1.0)], 1, 137),
        # the same moment: the rank that blames no other
        ([RankEnd(0, 1, 1.0), RankEnd(1, 7, 1.0), RankEnd(2, 1, 1.0)], [died(0, 1, 1.0), died(2, 1, 1.0)], 1, 7),
        # the same moment, without reports: the killed rank
        ([RankEnd(0, 1, 1.0), RankEnd(1, -11, 1.0)], [], 1, 139),
        # stopped, and killed by the launcher much later; the exit code is that of the first that failed
        (
            [RankEnd(0, 1, 1.0), RankEnd(1, 1, 1.01), RankEnd(2, -9, 6.0, True)],
            [died(0, 2, 1.0), died(1, 2, 1.0)],
            2,
            1,
        ),
        # exited cleanly while others needed it
        ([RankEnd(0, 5, 1.0), RankEnd(1, 0, 0.2)], [died(0, 1, 1.0, "left")], 1, 5),
        # a claim that names no rank only clears its source
        ([RankEnd(0, 1, 1.0), RankEnd(1, 6, 1.2)], [Claim(0, None, "", "", 1.0)], 1, 6),
        ([RankEnd(0, 1, 1.0), RankEnd(1, 0, 1.2)], [Claim(0, None, "", "", 1.0)], 0, 1),
        # blame is followed along a chain
        ([RankEnd(0, 1, 1.0), RankEnd(1, 1, 1.1), RankEnd(2, -9, 1.2)], [died(0, 1, 1.0), died(1, 2, 0.9)], 2, 137),
        # a cycle of blame ends
        ([RankEnd(0, 1, 1.0), RankEnd(1, 2, 1.1)], [died(0, 1, 1.0), died(1, 0, 1.1)], 1, 2),
        # a host that is cut off takes rank 0 for gone, whose host has decided otherwise
        (
            [RankEnd(0, 1, 5.1), RankEnd(1, 1, 5.1), RankEnd(2, 1, 4.5), RankEnd(3, 1, 4.5)],
            [died(0, 2, 5.1), died(1, 2, 5.1), died(2, 0, 4.5), died(3, 0, 4.5)],
            2,
            1,
        ),
        # its own report makes it the culprit from that time on
        ([RankEnd(0, 1, 1.5), RankEnd(1, 2, 1.4)], [Claim(0, 0, "raised", "", 1.0)], 0, 1),
        # a rank that does not exist cannot be the cause
        ([RankEnd(0, 1, 1.0), RankEnd(1, 2, 1.1)], [died(0, 9, 1.0)], 0, 1),
        # an unrelated failure before the claim
        ([RankEnd(0, 3, 0.5), RankEnd(1, 1, 1.0), RankEnd(2, -9, 0.9)], [died(1, 2, 1.0)], 0, 3),
    ],
)
def test_the_first_cause(ends, claims, culprit, code):
    verdict = find_failure_cause(ends, claims)
    assert verdict is not None
    assert (verdict.culprit, verdict.exit_code) == (culprit, code)


def test_a_word_of_others_is_told_rather_than_the_culprit_s_own() -> None:
    """A rank that leaves may get an error caused by its own leaving before its process has ended."""
    ends = [RankEnd(0, 5, 1.0), RankEnd(1, 0, 1.1)]
    own, of_others = died(1, 1, 1.0, "left"), died(0, 1, 1.001, "left")
    verdict = find_failure_cause(ends, [own, of_others])
    assert verdict is not None and verdict.claim == of_others
    verdict = find_failure_cause([RankEnd(0, 0, 1.0), RankEnd(1, 3, 1.1)], [own])
    assert verdict is not None and verdict.claim == own


def test_no_failure_no_verdict():
    assert find_failure_cause([RankEnd(0, 0, 1.0), RankEnd(1, -15, 1.0, True)], []) is None


PLAIN = """noise
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
{}
""".split("\n")[:-1]


def trace(last: str) -> list[str]:
    return [*PLAIN[:-1], *last.split("\n")]


def reported(error: BaseException) -> ExitReport:
    """Report of a rank that an exception ends."""
    return ExitReport.parse(json.dumps({"raised": writer.describe(error)}).encode())


def failed(rank: int, cause: str = "died", message: str = "", time: float = 1.0) -> ExitReport:
    """Report of a rank whose world has failed."""
    return ExitReport(failure=Failure(rank, cause, message, time))


@pytest.mark.parametrize("kind", [RankDiedError, RankLeftError, RankStalledError])
def test_the_engines_errors_name_the_culprit(kind: type[RankDiedError]) -> None:
    claim = claim_of(RankEnd(0, 1, 1.0, report=reported(kind("any text at all", 12))))
    assert claim is not None
    assert (claim.source, claim.culprit, claim.cause) == (0, 12, kind.cause)


@pytest.mark.parametrize(
    "error", [ValueError("rank 1 is wrong"), EngineError("rank 1"), RankDiedError("itself", 0), RendezvousError("x")]
)
def test_other_exceptions_are_no_claims(error: Exception) -> None:
    assert claim_of(RankEnd(0, 1, 1.0, report=reported(error))) is None
    assert claim_of(RankEnd(0, 1, 1.0)) is None


def test_a_rank_that_ended_well_or_was_ended_claims_nothing_by_its_exception() -> None:
    report = reported(RankDiedError("rank 1", 1))
    assert claim_of(RankEnd(0, 0, 1.0, report=report)) is None
    assert claim_of(RankEnd(0, -15, 1.0, by_launcher=True, report=report)) is None


def test_an_error_raised_from_an_engine_error_is_a_consequence() -> None:
    error = RuntimeError("training failed")
    error.__cause__ = RankRaisedError("rank 3 raised ValueError", 3)
    claim = claim_of(RankEnd(0, 1, 1.0, report=reported(error)))
    assert claim is not None and claim.culprit == 3


def test_a_chain_of_tracebacks_is_one() -> None:
    lines = [
        *trace("engine.errors.RankRaisedError: rank 3 raised ValueError"),
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        *trace("RuntimeError: training failed")[1:],
    ]
    assert traceback_span(lines) == (1, len(lines))


def test_the_last_of_two_tracebacks_counts():
    lines = [*trace("ValueError: caught and printed"), "going on", *trace("KeyError: 'x'")]
    assert traceback_span(lines) == (7, 11)


def job(tmp_path: Path, **stderr: str) -> Path:
    for name, text in stderr.items():
        home = tmp_path / f"rank.{name[1:]}"
        home.mkdir()
        (home / "stderr").write_text(text)
    return tmp_path


def test_failures_are_believed_before_exceptions() -> None:
    told = reported(RankDiedError("rank 1 died", 1))
    failure = Failure(2, "raised", "rank 2 raised", 9.9)
    both = ExitReport(told.raised, failure)
    ends = [RankEnd(0, 1, 10.0, report=both), RankEnd(1, 1, 10.1, report=both), RankEnd(2, 1, 10.05)]
    verdict = find_first_failure(ends)
    assert verdict is not None
    assert verdict.culprit == 2
    assert verdict.blames == {0: 2, 1: 2}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'{"failure": 3}', b'{"failure": {"rank": null}}', b"\xff{}", b"[" * 60000),
        b'{"failure": {"rank": 1, "cause": "died"}}',
        b'{"failure": {"rank": 1e300, "cause": "died", "message": "", "time": 1}}',
        b'{"failure": {"rank": 5000, "cause": "died", "message": "", "time": 1}}',
        b'{"raised": {"type": "RankDiedError", "culprit": 1}}',
        b'{"raised": {"type": 3, "message": "", "file": "", "line": 0, "consequence": true, "culprit": 1}}',
    ],
)
def test_half_a_report_is_no_report(text: bytes) -> None:
    report = ExitReport.parse(text)
    assert report.empty
    verdict = find_first_failure([RankEnd(0, 3, 1.0, report=report), RankEnd(1, 0, 2.0)])
    assert verdict is not None
    assert verdict.culprit == 0


def test_reports_are_kept_beside_the_output(tmp_path: Path) -> None:
    ends = [RankEnd(0, 1, 1.0, report=failed(1)), RankEnd(1, -9, 1.0)]
    for end in ends:
        (tmp_path / f"rank.{end.rank}").mkdir()
    output = RankOutput(tmp_path, (Console(1), Console(2)), timestamps=False)
    for end in ends:
        output.keep_report(end.rank, end.report)
    assert [path.parent.name for path in tmp_path.glob("rank.*/exit.json")] == ["rank.0"]
    assert ExitReport.parse((tmp_path / "rank.0" / "exit.json").read_bytes()) == failed(1)


def lines_of(tmp_path: Path, stderr: str) -> list[str]:
    ends = [RankEnd(0, 1, 2.0), RankEnd(1, 0, 2.0)]
    verdict = find_failure_cause(ends, [])
    assert verdict is not None
    return failure_lines(verdict, ends, job(tmp_path, r0=stderr, r1=""), 0.0)


def test_twenty_last_lines(tmp_path):
    lines = lines_of(tmp_path, "".join(f"line {number}\n" for number in range(100)))
    assert lines[-20:] == [f"  | line {number}" for number in range(80, 100)]
    assert "line 79" not in "\n".join(lines)
    assert lines[-21].startswith("first failure: rank 0 ")


def test_a_traceback_within_the_last_lines_is_there_once(tmp_path):
    lines = lines_of(tmp_path, "before\n" + "\n".join(trace("ValueError: boom")) + "\n")
    assert sum("ValueError: boom" in line for line in lines) == 1
    assert "  | before" in lines


def test_a_traceback_before_the_last_lines_is_shown_too(tmp_path):
    after = [f"after {number}" for number in range(50)]
    lines = lines_of(tmp_path, "\n".join([*trace("ValueError: boom"), *after]))
    start = lines.index("  | Traceback (most recent call last):")
    assert lines[start + 3] == "  | ValueError: boom"
    assert lines[start + 4 :] == ["  | ...", *(f"  | {line}" for line in after[30:])]


def test_a_traceback_that_reaches_into_the_last_lines_is_whole(tmp_path):
    frames = [f'  File "deep.py", line {number}, in f' for number in range(40)]
    stack = ["Traceback (most recent call last):", *frames, "RecursionError: too deep"]
    lines = lines_of(tmp_path, "\n".join(["x"] * 5 + stack))
    assert lines[-42:] == [f"  | {line}" for line in stack]


def test_the_tail_of_a_huge_file_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "stderr"
    path.write_bytes(b"".join(b"%08d\n" % number for number in range(100_000)) + b"\xff\n\n")
    tail = read_tail(path)
    assert all(len(line) == 8 for line in tail[:-1])
    assert tail[-1] == "\\xff"
    assert read_tail(tmp_path / "none") == []


def test_the_clock_of_another_host_does_not_make_its_rank_the_first() -> None:
    """Rank 0 names rank 1 by a clock that is two days slow; rank 2 exits earlier by the launcher's clock."""
    report = failed(1, "raised", "rank 1 failed: boom", 11.0 - 2 * 86400)
    ends = [RankEnd(0, 1, 12.0, report=report), RankEnd(1, 1, 11.5), RankEnd(2, 1, 10.0)]
    late = find_first_failure(ends)
    assert late is not None and late.culprit == 1
    true = find_first_failure(ends, {0: 2 * 86400.0})
    assert true is not None and true.culprit == 2


def test_a_rank_that_was_lost_with_its_host_is_told_so(tmp_path: Path) -> None:
    ends = [RankEnd(0, 1, 12.0, by_launcher=True), RankEnd(1, -9, 11.0, lost="ended (exit code 255)")]
    verdict = find_first_failure(ends)
    assert verdict is not None
    *_, last = failure_lines(verdict, ends, tmp_path, 1.0, {0: "a", 1: "b"})
    assert last.startswith("first failure: rank 1 on b: lost with its host, whose agent ended (exit code 255), 10.0 s")
    assert last.endswith("; nothing of its stderr had come")


def test_a_rank_that_did_not_come_is_the_first_failure_and_not_who_waited(tmp_path: Path) -> None:
    told = "ranks 1, 2 did not come within 4 s (ENGINE_START_TIMEOUT)"
    waited = RendezvousError(f"{told}\n  a (rank 0): rank 0 came\n  nobody from b has called", absent=1)
    job(tmp_path, r0="", r1="loading\n", r2="")
    ends = [RankEnd(0, 1, 5.0, report=reported(waited)), RankEnd(1, -15, 10.0, by_launcher=True), RankEnd(2, 0, 1.0)]
    verdict = find_first_failure(ends)
    assert verdict is not None and (verdict.culprit, verdict.exit_code, verdict.blames) == (1, 1, {0: 1})
    *others, first, quoted = failure_lines(verdict, ends, tmp_path, 1.0, {0: "a", 1: "b", 2: "b"})
    assert first.startswith(
        "first failure: rank 1 on b: did not come to engine.init; the launcher ended it 9.0 s after the start "
        f"(rank 0: {told}); the end of its stderr"
    )
    assert others[-2:] == ["rank 0: a (rank 0): rank 0 came", "rank 0: nobody from b has called"]
    assert quoted == "  | loading"


def test_who_waits_for_the_first_of_its_own_host_is_not_to_blame() -> None:
    """The waiting rank knows the missing one by its place on the host alone."""
    told = RendezvousError("rank 2: local rank 0 did not come within 3 s. Is it running, on this host?", absent=-1)
    waits = RendezvousError("ranks 1, 2 did not come within 3 s (ENGINE_START_TIMEOUT)", absent=1)
    ends = [
        RankEnd(0, 1, 5.1, report=reported(waits)),
        RankEnd(1, -15, 10.0, True),
        RankEnd(2, 1, 5.0, report=reported(told)),
    ]
    verdict = find_first_failure(ends)
    assert verdict is not None and verdict.culprit == 1 and verdict.blames == {0: 1, 2: None}


def test_of_a_start_that_was_tried_again_the_last_error_counts() -> None:
    error = RankDiedError("rank 1 died", 1)
    error.__context__ = RendezvousError("rank 2 did not come within 3 s", absent=2)
    claim = claim_of(RankEnd(0, 1, 1.0, report=reported(error)))
    assert claim is not None and (claim.culprit, claim.cause) == (1, "died")


def test_a_rank_that_ended_well_before_init_is_the_first_failure(tmp_path: Path) -> None:
    error = RendezvousError("rank 1: rank 0 did not come within 3 s. Is it running", absent=0)
    ends = [RankEnd(0, 0, 1.5), RankEnd(1, 1, 5.0, report=reported(error))]
    job(tmp_path, r0="", r1="")
    verdict = find_first_failure(ends)
    assert verdict is not None and (verdict.culprit, verdict.exit_code) == (0, 1)
    *_, last = failure_lines(verdict, ends, tmp_path, 1.0)
    assert "did not come to engine.init; exit code 0, 0.5 s after the start (rank 1: rank 0 did not come" in last


def test_hosts_that_do_not_reach_rank_0_are_those_that_did_not_come(tmp_path: Path) -> None:
    """Both wait for each other; the user sees last the address at which rank 0 was not reached."""
    text = "rank 0 did not come within 3 s: rank 1 on b did not reach it at n:5\n  n: no such host"
    job(tmp_path, r0="", r1="\n".join(trace(f"RendezvousError: {text}")))
    waits = reported(RendezvousError("rank 1 did not come within 3 s", absent=1))
    no_way = reported(RendezvousError(text, absent=0))
    for times in ((5.0, 5.1), (5.1, 5.0)):
        ends = [RankEnd(0, 1, times[0], report=waits), RankEnd(1, 1, times[1], report=no_way)]
        verdict = find_first_failure(ends)
        assert verdict is not None and verdict.culprit == 1
        lines = failure_lines(verdict, ends, tmp_path, 1.0)
        assert lines[-2:] == ["  | RendezvousError: " + text.split("\n")[0], "  |   n: no such host"]


@pytest.mark.parametrize(("code", "by_launcher", "ending"), [(1, False, "exit code 1,"), (-15, True, "the launcher")])
def test_a_rank_that_was_out_of_reach_and_ran_on_has_not_died(
    tmp_path: Path, code: int, by_launcher: bool, ending: str
) -> None:
    message = "rank {} cannot be reached: its connection is silent (rank {} noticed it first)"
    reports = [failed(1 - rank, "lost", message.format(1 - rank, rank), 10.0 - rank) for rank in (0, 1)]
    ends = [RankEnd(0, 1, 10.0, report=reports[0]), RankEnd(1, code, 11.0, by_launcher, report=reports[1])]
    verdict = find_first_failure(ends)
    assert verdict is not None
    *_, last = failure_lines(verdict, ends, tmp_path, 1.0, {0: "a", 1: "b"})
    assert last.startswith(f"first failure: rank 1 on b: could not be reached by rank 0, and ran on; {ending}")
    assert last.count("(rank 0: its connection is silent)") == 1
