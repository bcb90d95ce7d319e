"""An endpoint that Prometheus scrapes: `/metrics`, `/sd` and a page with links.

`http.server` takes connections in one thread and answers each in a thread of its own. What it does not bound is bounded
here: connections at once, the time that a request takes to come and an answer to go, and how long `stop` takes.
Answers are whole before their first byte is sent.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import html
import io
import ipaddress
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from ...host.strangers import Strangers, accept
from ..errors import MetricsError
from . import discovery

PORTS = 50  # ports that are tried after the one asked for
CONNECTIONS = 16
LIFETIME = 10.0  # seconds in which a request must have come, and in which its answer must have gone
LONGEST_HEAD = 1 << 17  # most bytes of a request that are kept; a line of 64 KiB is refused as too long
LONGEST_REQUEST = 1 << 20  # most bytes of a refused request that are read
REST_LIMIT = 2.0  # seconds in which a client that has its answer may send the rest of what it wanted to say
PAUSE = 0.1  # seconds before the next try, when no connection can be taken
STOP_LIMIT = 1.0
ANSWER_LIMIT = 0.3  # seconds that an answer may still take after `stop`
LOOK = 0.005
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\n\r\n503 too many connections\n"
)

GZIP = re.compile(r"gzip(\s*;\s*q=(1(\.0*)?|0\.0*[1-9]\d*))?", re.IGNORECASE)
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_VERSION = re.compile(rb"HTTP/\d\.\d\r?$")

Exposition = Callable[[str], tuple[bytes, str]]

_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


class Endpoint:
    """A listening socket, and what answers there.

    Parameters
    ----------
    address : str
        An IP address or a name of this host.
    port : int
        Where that is in use, one of the next 50 is taken; 0: any free one.
    run : str
        The run's name.
    exposition : callable
        Gives what `/metrics` says, and its content type, from the request's `Accept`.

    Attributes
    ----------
    port : int
        Where it listens.
    scraped : bool
        Whether anybody has got metrics here.
    stopped : bool
        Whether `stop` was called: what is not answered yet shall not be.

    Raises
    ------
    MetricsError
        It cannot listen.
    """

    def __init__(self, address: str, port: int, run: str, exposition: Exposition) -> None:
        self.run = run
        self.exposition = exposition
        self.scraped = False
        self.stopped = False
        self._server = _listen(self, address, port)
        self._bound, self.port = self._server.socket.getsockname()[:2]
        # Started by `start`, woken and joined by `stop`.
        self._thread = threading.Thread(target=self._serve, name="engine-metrics", daemon=True)
        _endpoints.add(self)

    @property
    def target(self) -> str:
        """`HOST:PORT`, as others reach it."""
        wildcard = ipaddress.ip_address(self._bound.partition("%")[0]).is_unspecified
        return _target(socket.gethostname() if wildcard else self._bound, self.port)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._server.open)

    def start(self) -> None:
        """Answer from now on. Connections that came before have waited."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and end what is open. Answers that have begun have 0.3 s."""
        self.stopped = True
        _shut(self._server.socket, socket.SHUT_RDWR)  # wakes the thread that listens
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT)
        self._server.shut(socket.SHUT_RD)  # who reads a request ends at once; who writes an answer has a moment
        end = time.monotonic() + ANSWER_LIMIT
        while self.connections and time.monotonic() < end:
            time.sleep(LOOK)
        self._server.shut(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this process's descriptor; in a forked child all that is to be done."""
        self._server.socket.close()

    def _serve(self) -> None:
        while not self.stopped:
            self._server.handle_request()


class _Server(ThreadingHTTPServer):
    """A server of so many connections at once. `open` has them: the listening thread adds each, its own removes it.

    Those that have not sent a whole request yet are strangers, which give way to newer ones.
    """

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_port = False  # newer Pythons would share the port with another job's server

    def __init__(self, endpoint: Endpoint, family: socket.AddressFamily, where: tuple[Any, ...]) -> None:
        self.endpoint = endpoint
        self.open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._strangers: Strangers[socket.socket] = Strangers(2 * CONNECTIONS)
        self.address_family = family
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        """Bind, and ask no name server for this host's name, as the class above would."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection."""
        try:
            return accept(self.socket, self._give_way)
        except OSError:  # there are no descriptors for it: it waits, and the thread does not spin
            if not self.endpoint.stopped:
                time.sleep(PAUSE)
            raise

    def _give_way(self) -> bool:
        """End the stranger that gives way next, and wait until its thread has closed it; False if there is none."""
        with self._lock:
            displaced = self._strangers.displace()
        if displaced is None:
            return False
        _shut(displaced, socket.SHUT_RDWR)
        end = time.monotonic() + STOP_LIMIT
        while displaced.fileno() >= 0 and time.monotonic() < end:
            time.sleep(LOOK)
        return True

    def know(self, request: socket.socket) -> None:
        """Keep a connection that has sent its request."""
        with self._lock:
            self._strangers.remove(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, or send it away."""
        if len(self.open) < CONNECTIONS or self._give_way():
            self.open.add(request)
            with self._lock:
                self._strangers.add(request, str(client_address[0]))
            try:
                return super().process_request(request, client_address)
            except RuntimeError:  # no more threads
                pass
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(BUSY)
            request.recv(LONGEST_REQUEST)  # what is left unread would turn the answer into a reset
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.know(request)
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Have a defect shown, by the hook for exceptions of threads. A client that is gone or too slow is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            raise

    def shut(self, how: int) -> None:
        """Shut all connections."""
        for connection in list(self.open):
            _shut(connection, how)


class _Handler(BaseHTTPRequestHandler):
    """One request, HTTP/1.0."""

    server_version = "enginerun"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def setup(self) -> None:
        """Read the request. Whoever sends it byte by byte has no more time than others."""
        super().setup()
        assert isinstance(self.server, _Server)
        self._endpoint = self.server.endpoint
        self._whole = False  # whether the client has sent all that it wanted to, as far as its headers say
        self.rfile = io.BytesIO(_request(self.connection))
        self.server.know(self.connection)
        self.connection.settimeout(LIFETIME)  # of `sendall`: for all of an answer

    def finish(self) -> None:
        """The answer has gone. Listen for a while to a client that may still be sending, as the body of a POST."""
        super().finish()
        if not self._whole:
            _drain(self.connection)

    def parse_request(self) -> bool:
        """Refuse all methods but GET and HEAD."""
        if not super().parse_request():
            return False
        self._whole = not (self._header("Content-Length") or self._header("Transfer-Encoding"))
        if self.command not in ("GET", "HEAD"):
            text = f"405 {self.command!r} is not allowed: GET and HEAD are\n"
            self._reply(HTTPStatus.METHOD_NOT_ALLOWED, text, {"Allow": "GET, HEAD"})
            return False
        return True

    def do_GET(self) -> None:
        """Answer by path."""
        endpoint = self._endpoint
        path = re.sub(r"^https?://[^/]*", "", self.path, flags=re.IGNORECASE).partition("?")[0]
        if path == "/metrics":
            try:
                body, kind = endpoint.exposition(self._header("Accept"))
            except Exception:
                self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, "500 a defect: the job's stderr shows it\n")
                raise
            headers = {"Content-Type": kind}
            if any(GZIP.fullmatch(word.strip()) for word in self._header("Accept-Encoding").split(",")):
                body, headers = gzip.compress(body, compresslevel=1), headers | {"Content-Encoding": "gzip"}
            if not endpoint.stopped:
                self._reply(HTTPStatus.OK, body, headers)
                endpoint.scraped = endpoint.scraped or self.command == "GET"
        elif path == "/sd":
            text = discovery.document(self._reached(), endpoint.run, os.getpid())
            self._reply(HTTPStatus.OK, text, {"Content-Type": "application/json"})
        elif path == "/":
            text = _INDEX.format(run=html.escape(endpoint.run)).encode()
            self._reply(HTTPStatus.OK, text, {"Content-Type": "text/html; charset=utf-8"})
        else:
            self._reply(HTTPStatus.NOT_FOUND, f"404 there is nothing at {path[:200]!r}: see / or /metrics\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: the launcher's output is the job's."""

    def _reply(self, status: HTTPStatus, body: bytes | str, headers: dict[str, str] | None = None) -> None:
        if isinstance(body, str):
            body = body.encode(errors="backslashreplace")
            headers = {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _header(self, name: str) -> str:
        return ", ".join(self.headers.get_all(name, []))

    def _reached(self) -> str:
        """The address at which this client has reached us: on a wildcard address there are several."""
        host, port = self.connection.getsockname()[:2]
        return _target(str(host), int(port))


_INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{run}</title>
<h1>{run}</h1>
<ul><li><a href="metrics">metrics</a> for Prometheus<li><a href="sd">sd</a>: this endpoint, for http_sd</ul>
</html>
"""


def _forget_in_forked_child() -> None:
    """A listening socket that a child keeps would take connections that nobody answers."""
    for endpoint in list(_endpoints):
        endpoint.close()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _request(connection: socket.socket) -> bytes:
    """Read a request up to its empty line; of what is none, as of a client that wants to encrypt, the first line."""
    read, searched, end = bytearray(), 0, time.monotonic() + LIFETIME
    while not _EMPTY_LINE.search(read, searched) and len(read) < LONGEST_HEAD:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (part := connection.recv(65536)):
            break
        searched = max(0, len(read) - 2)
        read += part
        line, ended, _ = read.partition(b"\n")
        if ended and not _VERSION.search(line):
            break
    return bytes(read)


def _drain(connection: socket.socket) -> None:
    """Say that nothing more comes, and read on to the client's end, or it may see a reset instead of its answer."""
    read, end = 0, time.monotonic() + REST_LIMIT
    with contextlib.suppress(OSError):  # the client is gone, or too slow
        connection.shutdown(socket.SHUT_WR)
        while read < LONGEST_REQUEST and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(65536)):
                break
            read += len(part)


def _listen(endpoint: Endpoint, address: str, port: int) -> _Server:
    """Listen there, or on one of the next ports."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: of what cannot be a name
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise MetricsError(
            f"metrics address {address!r}: {reason}; give an IP address of this host, such as 127.0.0.1 or 0.0.0.0"
        ) from error
    last = min(port + PORTS, 65535) if port else 0
    for candidate in range(port, last + 1):
        try:
            return _Server(endpoint, family, (where[0], candidate, *where[2:]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise MetricsError(
                    f"metrics cannot be served on {address} port {candidate}: {error.strerror}{_mend(error)}"
                ) from error
    raise MetricsError(f"metrics: the ports {port} to {last} of {address} are all in use: give another, or 0 for any")


def _mend(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "; give an address of this host, such as 127.0.0.1 or 0.0.0.0"
    if error.errno == errno.EACCES:
        return "; give a port above 1023"
    return ""


def _target(host: str, port: int) -> str:
    if ":" not in host:
        return f"{host}:{port}"
    parsed = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return f"{parsed.ipv4_mapped}:{port}"
    return f"[{host}]:{port}"


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the client was first
        connection.shutdown(how)
