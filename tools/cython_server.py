"""Process with Cython loaded: while a build lasts, it forks a child for each module that `cython_client` asks for."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import socketserver
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cython_client import ADDRESS


class _Translation(socketserver.StreamRequestHandler):
    """One translation, in a child of the server."""

    def handle(self) -> None:
        from Cython.Compiler.Main import main as run_cython

        request = json.loads(self.rfile.readline())
        os.chdir(request["directory"])
        sys.argv = ["cython", *request["arguments"]]
        output, errors, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                run_cython(command_line=1)  # type: ignore[no-untyped-call]
            except SystemExit as end:
                code = int(end.code or 0)
        answer = {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _TranslationServer(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Server of translations. If one of them dies, its client starts Cython by itself."""

    request_queue_size = 64

    def service_actions(self) -> None:
        """End with the build, also if it was killed; called twice a second."""
        super().service_actions()
        build = multiprocessing.parent_process()
        if build is not None and not build.is_alive():
            sys.exit()


def _serve_forever(server: _TranslationServer, folder: Path) -> None:
    from Cython.Compiler.Main import compile as translate

    sources = folder / "empty.pyx"
    sources.touch()
    translate(str(sources), language_level=3)  # type: ignore[no-untyped-call] # loads what an import of Cython leaves for later
    server.serve_forever()


@contextlib.contextmanager
def serve_cython() -> Iterator[None]:
    """Have the process, and tell the clients that are started meanwhile where it is."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = os.path.join(folder, "socket")
        try:
            server = _TranslationServer(address, _Translation)
        except OSError:  # a path may be too long for a socket: each client is Cython itself then
            yield
            return
        process = multiprocessing.get_context("fork").Process(
            target=_serve_forever, args=(server, Path(folder)), daemon=True
        )
        process.start()
        server.server_close()  # only the process listens: if it dies, its clients are told
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            process.terminate()
            process.join()
