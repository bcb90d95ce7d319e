"""An endpoint that Prometheus scrapes: `/metrics`, `/sd` and a page with links.

One thread takes connections and ends those that last too long; each connection has a thread of its own and one request.
Answers are whole before their first byte is sent.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import html
import ipaddress
import os
import re
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..errors import MetricsError
from . import discovery
from .scrapers import Scrapers

PORTS = 50  # that are tried after the one asked for
CONNECTIONS = 16
LIFETIME = 10.0  # seconds of a connection
BACKLOG = 64
PAUSE = 0.1  # seconds, when no connection can be taken
LINGER = 1.0  # seconds in which a refused client may finish sending, so that it reads the answer
LINGER_BYTES = 1 << 20
STOP_LIMIT = 1.0
ANSWER_LIMIT = 0.3  # seconds that an answer may take after the end
LOOK = 0.005
BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\n\r\n503 too many connections\n"
)

GZIP = re.compile(r"gzip(\s*;\s*q=(1(\.0*)?|0\.0*[1-9]\d*))?", re.IGNORECASE)

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
    scrapers : Scrapers
        Who has scraped it.

    Raises
    ------
    MetricsError
        It cannot listen.
    """

    def __init__(self, address: str, port: int, run: str, exposition: Exposition) -> None:
        self.run = run
        self.exposition = exposition
        self.scrapers = Scrapers()
        self._listener = _listen(address, port)
        self._listener.setblocking(False)
        self._bound, self.port = self._listener.getsockname()[:2]
        self._reading, self._writing = socket.socketpair()
        self._connections: dict[socket.socket, float] = {}  # with the time at which each ends
        self._lock = threading.Lock()
        self._stopped = False
        # Started by `start`, woken and joined by `stop`.
        self._thread = threading.Thread(target=self._serve, name="engine-metrics", daemon=True)
        _endpoints.add(self)

    @property
    def target(self) -> str:
        """`HOST:PORT`, as others reach it."""
        wildcard = ipaddress.ip_address(self._bound.partition("%")[0]).is_unspecified
        return _target(socket.gethostname() if wildcard else self._bound, self.port)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called: what is not answered yet shall not be."""
        return self._stopped

    def start(self) -> None:
        """Answer from now on. Connections that came before have waited."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and end what is open. Answers that have begun have 0.3 s."""
        self._stopped = True
        if self._thread.is_alive():
            self._writing.send(b".")
            self._thread.join(STOP_LIMIT)
        for how in (
            socket.SHUT_RD,
            socket.SHUT_RDWR,
        ):  # who reads a request ends at once; who writes an answer has a moment
            with self._lock:
                for connection in self._connections:
                    _shut(connection, how)
            end = time.monotonic() + ANSWER_LIMIT
            while self._connections and how == socket.SHUT_RD and time.monotonic() < end:
                time.sleep(LOOK)
        self.close()

    def close(self) -> None:
        """Close this process's descriptors; in a forked child all that is to be done."""
        for each in (self._listener, self._reading, self._writing):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._reading, selectors.EVENT_READ)
            while True:
                selector.select(self._patience())
                if self._stopped:
                    return
                self._end_overdue()
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue
                except OSError:  # it is gone already, or there are no descriptors for it
                    time.sleep(PAUSE)
                    continue
                self._take(connection)

    def _patience(self) -> float | None:
        """Seconds until a connection is overdue."""
        with self._lock:
            return max(0.0, min(self._connections.values()) - time.monotonic()) if self._connections else None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            for connection, end in self._connections.items():
                if end <= now:
                    _shut(connection, socket.SHUT_RDWR)
                    self._connections[connection] = now + LIFETIME  # its thread is about to close it

    def _take(self, connection: socket.socket) -> None:
        """Give a connection a thread, or send it away."""
        with self._lock:
            full = len(self._connections) >= CONNECTIONS
            if not full:
                self._connections[connection] = time.monotonic() + LIFETIME
        if not full:
            try:
                threading.Thread(
                    target=self._answer, args=(connection,), name="engine-metrics-answer", daemon=True
                ).start()
                return
            except RuntimeError:  # no more threads
                with self._lock:
                    del self._connections[connection]
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(BUSY)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(LINGER_BYTES)  # what is left unread would turn the answer into a reset
        connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(LIFETIME)
            _Handler(connection, self)
            _linger(connection)
        except OSError:  # the client is gone, or was too slow: the socket is shut
            pass
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One request, HTTP/1.0."""

    server_version = "enginerun"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def __init__(self, connection: socket.socket, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        super().__init__(connection, connection.getpeername(), endpoint)  # type: ignore[arg-type]

    def parse_request(self) -> bool:
        """Refuse all methods but GET and HEAD."""
        if not super().parse_request():
            return False
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
            came = time.monotonic()
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
                if self.command == "GET":
                    endpoint.scrapers.note(f"{self.client_address[0]} {self._header('User-Agent')}", came)
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


def _listen(address: str, port: int) -> socket.socket:
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
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((where[0], candidate, *where[2:]))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
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


def _linger(connection: socket.socket) -> None:
    """Take what the client still sends after our answer: closing on it would reset the connection, and the answer."""
    _shut(connection, socket.SHUT_WR)
    end, taken = time.monotonic() + LINGER, 0
    while taken < LINGER_BYTES and (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        part = connection.recv(65536)
        if not part:
            return
        taken += len(part)


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the client was first
        connection.shutdown(how)
