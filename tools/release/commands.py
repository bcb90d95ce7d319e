"""Commands that the tools of a release start: each with a deadline, and with an error that shows what it printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SHOWN = 3000  # characters of a failed command's output in the error


class CommandError(Exception):
    """A command failed, did not start or took too long; the first line of the text names it, the others its output."""


def run_tool(command: Sequence[str | Path], folder: Path, timeout: float = 900, **variables: str) -> str:
    """Run a command with the programs of this environment first on its PATH, and return all that it printed.

    Raises `CommandError` if it fails, cannot be started, or is not done within `timeout` seconds.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = _run_command(command, folder, timeout, {**os.environ, "PATH": path, **variables}, subprocess.STDOUT)
    return printed.decode(errors="replace")


def ask_git(root: Path, *arguments: str) -> bytes:
    """Return the output of a git command in a checkout; raise `CommandError` if it fails."""
    return _run_command(["git", *arguments], root, 120, os.environ, subprocess.PIPE)


def _run_command(
    command: Sequence[str | Path], folder: Path, timeout: float, variables: Mapping[str, str], errors: int
) -> bytes:
    name = f"{shlex.join(map(str, command))}, run in {folder},"
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, timeout=timeout, check=False, stdout=subprocess.PIPE, stderr=errors
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{name} was not done within {timeout:g} s{_show_end(error.stdout)}") from error
    except OSError as error:
        raise CommandError(f"{name} cannot be started: {error}") from error
    if done.returncode:
        raise CommandError(f"{name} exited with {done.returncode}{_show_end(done.stderr or done.stdout)}")
    return done.stdout


def _show_end(output: bytes | None) -> str:
    text = (output or b"").decode(errors="replace").strip()[-_SHOWN:]
    return f":\n{text}" if text else ""
