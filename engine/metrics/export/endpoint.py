"""HTTP endpoint that Prometheus scrapes: `/metrics`, `/sd` and an index page.

`http.server` accepts connections in one thread and answers each in a thread of its own. This module adds bounds:
the number of connections, the time for a request and for an answer, and the duration of `stop`.
An answer is complete before its first byte is sent.
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
from . import files

PORTS = 50  # ports that are tried after the one asked for
CONNECTIONS = 16
LIFETIME = 10.0  # maximum seconds to receive a request, and to send its answer
LONGEST_HEAD = 1 << 17  # maximum bytes of a request that are kept; a line of 64 KiB is refused as too long
LONGEST_REQUEST = 1 << 20  # maximum bytes of a refused request that are read
REST_LIMIT = 2.0  # seconds in which a client that has its answer may send the rest of its request
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
    """Listening socket with the server that answers its requests.

    `address` is an IP address or a name of this host. If `port` is in use, one of the next 50 is taken; 0: any free
    port. Raises MetricsError if it cannot listen.
    """

    def __init__(self, address: str, port: int, run: str, exposition: Exposition) -> None:
        self.run = run
        self.exposition = exposition  # takes the `Accept` header; returns the body of `/metrics` and its content type
        self.scraped = False  # whether a client has got metrics here
        self.stopped = False  # whether `stop` was called: requests that are not answered yet are dropped
        self._server = _listen(self, address, port)
        self._bound, self.port = self._server.socket.getsockname()[:2]
        # Started by `start`, woken and joined by `stop`.
        self._thread = threading.Thread(target=self._serve, name="engine-metrics", daemon=True)
        _endpoints.add(self)

    @property
    def target(self) -> str:
        """Address `HOST:PORT` at which other hosts reach the endpoint."""
        wildcard = ipaddress.ip_address(self._bound.partition("%")[0]).is_unspecified
        return _format_target(socket.gethostname() if wildcard else self._bound, self.port)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._server.open)

    def start(self) -> None:
        """Start to answer requests; connections made before have waited in the backlog."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close open connections. Answers that have begun have 0.3 s to finish."""
        self.stopped = True
        _shut_down(self._server.socket, socket.SHUT_RDWR)  # wakes the thread that listens
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT)
        # Readers of a request end at once; writers of an answer have a moment.
        self._server.shut_down_connections(socket.SHUT_RD)
        end = time.monotonic() + ANSWER_LIMIT
        while self.connections and time.monotonic() < end:
            time.sleep(LOOK)
        self._server.shut_down_connections(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close this process's descriptor. A forked child needs to do nothing else."""
        self._server.socket.close()

    def _serve(self) -> None:
        while not self.stopped:
            self._server.handle_request()


class _Server(ThreadingHTTPServer):
    """Server with a limit on open connections. The listening thread adds each to `open`; its own thread removes it.

    Connections that have not sent a whole request yet are strangers: newer ones displace them.
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
        """Bind without a DNS lookup of this host's name, which the base class would do."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return accept(self.socket, self._drop_unauthenticated)
        except OSError:  # no descriptors are left: the connection waits, and the thread must not spin
            if not self.endpoint.stopped:
                time.sleep(PAUSE)
            raise

    def _drop_unauthenticated(self) -> bool:
        """Shut down an unauthenticated connection to free its descriptor; return False if there is none.

        It returns when the connection's thread has closed it, or after `STOP_LIMIT` seconds.
        """
        with self._lock:
            displaced = self._strangers.displace_next()
        if displaced is None:
            return False
        _shut_down(displaced, socket.SHUT_RDWR)
        end = time.monotonic() + STOP_LIMIT
        while displaced.fileno() >= 0 and time.monotonic() < end:
            time.sleep(LOOK)
        return True

    def mark_known(self, request: socket.socket) -> None:
        """Mark a connection as known: it has sent its request, and is not displaced any more."""
        with self._lock:
            self._strangers.remove(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a new thread, or reject it with 503."""
        if len(self.open) < CONNECTIONS or self._drop_unauthenticated():
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
            request.recv(LONGEST_REQUEST)  # unread input would turn the answer into a reset
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and forget it."""
        self.mark_known(request)
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Re-raise a defect for the threads' exception hook; ignore OSError, as clients may disconnect or time out."""
        if not isinstance(sys.exc_info()[1], OSError):
            raise

    def shut_down_connections(self, how: int) -> None:
        """Shut down all connections."""
        for connection in list(self.open):
            _shut_down(connection, how)


class _Handler(BaseHTTPRequestHandler):
    """Handler of one HTTP/1.0 request."""

    server_version = "enginerun"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def setup(self) -> None:
        """Read the request within its time limit, which also holds for clients that send byte by byte."""
        super().setup()
        assert isinstance(self.server, _Server)
        self._endpoint = self.server.endpoint
        self._whole = False  # whether the client has sent everything, according to its headers
        self.rfile = io.BytesIO(_read_request(self.connection))
        self.server.mark_known(self.connection)
        self.connection.settimeout(LIFETIME)  # limit of `sendall`, for the whole answer

    def finish(self) -> None:
        """Finish the answer, then read what a client may still send, such as the body of a POST."""
        super().finish()
        if not self._whole:
            _drain(self.connection)

    def parse_request(self) -> bool:
        """Parse the request; refuse all methods but GET and HEAD."""
        if not super().parse_request():
            return False
        self._whole = not (self._get_header("Content-Length") or self._get_header("Transfer-Encoding"))
        if self.command not in ("GET", "HEAD"):
            text = f"405 {self.command!r} is not allowed: GET and HEAD are\n"
            self._send_reply(HTTPStatus.METHOD_NOT_ALLOWED, text, {"Allow": "GET, HEAD"})
            return False
        return True

    def do_GET(self) -> None:
        """Answer a request according to its path."""
        endpoint = self._endpoint
        path = re.sub(r"^https?://[^/]*", "", self.path, flags=re.IGNORECASE).partition("?")[0]
        if path == "/metrics":
            try:
                body, kind = endpoint.exposition(self._get_header("Accept"))
            except Exception:
                self._send_reply(HTTPStatus.INTERNAL_SERVER_ERROR, "500 a defect: the job's stderr shows it\n")
                raise
            headers = {"Content-Type": kind}
            if any(GZIP.fullmatch(word.strip()) for word in self._get_header("Accept-Encoding").split(",")):
                body, headers = gzip.compress(body, compresslevel=1), headers | {"Content-Encoding": "gzip"}
            if not endpoint.stopped:
                self._send_reply(HTTPStatus.OK, body, headers)
                endpoint.scraped = endpoint.scraped or self.command == "GET"
        elif path == "/sd":
            text = files.describe_endpoint(self._get_reached_target(), endpoint.run, os.getpid())
            self._send_reply(HTTPStatus.OK, text, {"Content-Type": "application/json"})
        elif path == "/":
            text = _INDEX.format(run=html.escape(endpoint.run)).encode()
            self._send_reply(HTTPStatus.OK, text, {"Content-Type": "text/html; charset=utf-8"})
        else:
            self._send_reply(HTTPStatus.NOT_FOUND, f"404 there is nothing at {path[:200]!r}: see / or /metrics\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log, because the launcher's output belongs to the job."""

    def _send_reply(self, status: HTTPStatus, body: bytes | str, headers: dict[str, str] | None = None) -> None:
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

    def _get_header(self, name: str) -> str:
        return ", ".join(self.headers.get_all(name, []))

    def _get_reached_target(self) -> str:
        """Return the address at which this client reached the endpoint; a wildcard address has several."""
        host, port = self.connection.getsockname()[:2]
        return _format_target(str(host), int(port))


_INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{run}</title>
<h1>{run}</h1>
<ul><li><a href="metrics">metrics</a> for Prometheus<li><a href="sd">sd</a>: this endpoint, for http_sd</ul>
</html>
"""


def _forget_in_forked_child() -> None:
    """Close listening sockets in a forked child, which would accept connections and never answer them."""
    for endpoint in list(_endpoints):
        endpoint.close()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _read_request(connection: socket.socket) -> bytes:
    """Read a request up to its empty line. Stop after the first line if it is not HTTP, such as a TLS handshake."""
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
    """End sending and read to the client's end; otherwise it may see a reset instead of its answer."""
    read, end = 0, time.monotonic() + REST_LIMIT
    with contextlib.suppress(OSError):  # the client is gone, or too slow
        connection.shutdown(socket.SHUT_WR)
        while read < LONGEST_REQUEST and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (part := connection.recv(65536)):
                break
            read += len(part)


def _listen(endpoint: Endpoint, address: str, port: int) -> _Server:
    """Listen on the port, or on one of the next ones if it is in use."""
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
                    f"metrics cannot be served on {address} port {candidate}: {error.strerror}{_suggest_remedy(error)}"
                ) from error
    raise MetricsError(f"metrics: the ports {port} to {last} of {address} are all in use: give another, or 0 for any")


def _suggest_remedy(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "; give an address of this host, such as 127.0.0.1 or 0.0.0.0"
    if error.errno == errno.EACCES:
        return "; give a port above 1023"
    return ""


def _format_target(host: str, port: int) -> str:
    if ":" not in host:
        return f"{host}:{port}"
    parsed = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return f"{parsed.ipv4_mapped}:{port}"
    return f"[{host}]:{port}"


def _shut_down(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the client was first
        connection.shutdown(how)
