"""Program that stands for `cython` in a build: a process that has loaded Cython before translates for it.

Cython takes 0.7 s to start, and most of our modules take less to translate; `cython_server` is the other half of this.
Where no server is, as when an editable install builds a module that was edited, the program becomes Cython itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys

ADDRESS = "CYTHON_SERVER"  # the environment variable with the path of the server's socket


def make_command() -> list[str]:
    """Return the command that stands for `cython`. It imports no package, and starts in some milliseconds."""
    return [sys.executable, "-IS", os.path.abspath(__file__)]


def ask_server(address: str, arguments: list[str]) -> dict[str, str | int] | None:
    """Return the exit code and the texts of a translation, or None if no server answers at an address."""
    request = json.dumps({"directory": os.getcwd(), "arguments": arguments})
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(address)
            stream.sendall(request.encode() + b"\n")
            with stream.makefile() as file:
                answer = file.readline()
    except OSError:
        return None
    return dict(json.loads(answer)) if answer else None


def main() -> int:
    """Translate as `cython` would with the same arguments; return its exit code."""
    address = os.environ.get(ADDRESS)
    answer = ask_server(address, sys.argv[1:]) if address else None
    if answer is None:
        os.execvp("cython", ["cython", *sys.argv[1:]])
    sys.stdout.write(str(answer["output"]))
    sys.stderr.write(str(answer["errors"]))
    return int(answer["code"])


if __name__ == "__main__":
    sys.exit(main())
