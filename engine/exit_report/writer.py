"""The rank's half of the exit report: it writes why this process is about to end.

Every Python that a job starts loads this module. So it imports only the standard library, and until there is something
to write, only modules that Python has loaded already. A write never raises: it must not hide the failure it reports.
"""

from __future__ import annotations

import _thread  # importing `threading` would delay each start of Python more than all else here
import atexit
import os
import sys

PAGE = "ENGINE_EXIT_REPORT"  # environment variable: the inode number of the page, and its path
OWNER = "ENGINE_EXIT_REPORT_OWNER"  # environment variable: pid of the rank's Python; child processes inherit it
LIMIT = 1 << 17  # largest size of a report in bytes
_LONGEST = 8000  # longest message in characters
_DEEPEST = 100  # most exceptions of a chain that are examined
_ENGINE_ERROR = ("engine_ext.errors", "EngineError")
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Any

_report: dict[str, Any] = {}
_lock = _thread.RLock()
_installed = False


def _forget_parent() -> None:
    """Start anew in a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = _thread.RLock()
    _report.clear()


os.register_at_fork(after_in_child=_forget_parent)


def install() -> None:
    """Arrange that the uncaught exception of the main thread is reported. Does nothing without a launcher.

    Only the first Python process of a rank reports; its child processes do not, unless one calls `claim_rank`.
    """
    global _installed
    if PAGE in os.environ and not _installed:
        _installed = True
        os.environ.setdefault(OWNER, str(os.getpid()))
        atexit.register(_report_last_exception)


def claim_rank() -> None:
    """Make this process the one that reports for its rank."""
    if PAGE in os.environ:
        os.environ[OWNER] = str(os.getpid())
        install()


def report_exception(error: BaseException) -> None:
    """Report an exception that ends this process."""
    try:
        _report["raised"] = describe(error)
        _write()
    except Exception:  # a program's exception may raise when it is examined
        pass


def report_failure(rank: int, cause: str, message: str, time: float) -> None:
    """Report that the world of this rank has failed.

    `rank` caused it, and `cause` is the same as in `engine.errors.WorldError`. This rank learned of it at `time`:
    seconds, CLOCK_REALTIME.
    """
    _report["failure"] = {"rank": rank, "cause": cause, "message": message[:_LONGEST], "time": time}
    _write()


def clear() -> None:
    """Withdraw the report, because this process has entered a new world."""
    if _report:
        _report.clear()
        _write()


def describe(error: BaseException) -> dict[str, Any]:
    """Return the entry of a report that describes an exception: the fields of `Raised`.

    Without a frame outside of the engine, `file` and `line` are those of the innermost frame.
    """
    file, line = _find_position(error)
    blame = next(filter(None, map(_get_blame, _walk_chain(error))), None)
    culprit, cause = blame or (None, "")
    return {
        "type": type(error).__name__,
        "message": _format_message(error),
        "file": file,
        "line": line,
        "consequence": blame is not None,
        "culprit": culprit,
        "cause": cause,
    }


def _get_blame(error: BaseException) -> tuple[int | None, str] | None:
    """Return the rank and cause that an exception of the engine blames, else None; see `EngineError.get_blame`."""
    if not any((kind.__module__, kind.__name__) == _ENGINE_ERROR for kind in type(error).__mro__):
        return None
    blame: tuple[int | None, str] | None = error.get_blame()  # type: ignore[attr-defined]
    return blame


def _format_message(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST]
    except Exception:
        return "its text cannot be made"


def _walk_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and the members of exception groups; each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting and len(seen) < _DEEPEST:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        context = None if each.__suppress_context__ else each.__context__
        members = getattr(each, "exceptions", ()) if isinstance(each, BaseExceptionGroup) else ()
        waiting += [*(other for other in (context, each.__cause__) if other is not None), *members]


def _find_position(error: BaseException) -> tuple[str, int]:
    """Return file and line of an exception's innermost frame outside of the engine, or of its innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return str(error.filename), int(error.lineno or 0)
    frames: TracebackType | None = error.__traceback__
    own = last = ("", 0)
    while frames is not None:
        last = frames.tb_frame.f_code.co_filename, frames.tb_lineno or 0
        if not last[0].startswith((_PACKAGE, "engine_ext/", "<frozen ")):
            own = last
        frames = frames.tb_next
    return own if own[0] else last


def _report_last_exception() -> None:
    """Report the exception that ended the main thread, which the interpreter keeps whatever hook displayed it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        report_exception(error)


def _write() -> None:
    """Replace the report in the page, if this process is the one that reports for its rank."""
    inode, _, path = os.environ.get(PAGE, "").partition(" ")
    if not path or os.environ.get(OWNER) != str(os.getpid()):
        return
    import json

    with _lock:  # the monitor thread reports failures, the main thread exceptions
        data = json.dumps({"pid": os.getpid(), **_report}).encode() if _report else b""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # the launcher has ended
            return
        try:
            # The launcher may have closed the page, and reused its descriptor number for another file.
            if str(os.fstat(descriptor).st_ino) == inode and len(data) <= LIMIT:
                os.ftruncate(descriptor, 0)  # a reader between the two calls finds no report
                os.pwrite(descriptor, data, 0)
        except OSError:  # out of memory
            pass
        finally:
            os.close(descriptor)
