"""The endpoint answers scrapes, refuses other requests, and waits for no client."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine.metrics.errors import MetricsError
from engine.metrics.export import endpoint
from engine.metrics.export.endpoint import Endpoint

from ..waiting import let_pass, until

TEXT = b"engine_world_size 4.0\n" * 1000
Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make endpoints that are stopped after the test."""
    made: list[Endpoint] = []

    def start(address: str = "127.0.0.1", port: int = 0, exposition=lambda accept: (TEXT, "text/plain")) -> Endpoint:
        made.append(Endpoint(address, port, "digits-7", exposition))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.stop()


def connect(to: Endpoint, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, to.port), timeout=60)


def ask(to: Endpoint, request: bytes, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and read until the connection ends."""
    with connect(to, host) as client:
        client.sendall(request)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def get(to: Endpoint, path: str, *headers: str, method: str = "GET", host: str = "127.0.0.1"):
    return ask(to, "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode(), host)


def test_metrics_sd_and_a_page_of_links(make):
    it = make()
    code, headers, body = get(it, "/metrics?x=1")
    assert (code, headers["Content-Type"], headers["Content-Length"], body) == (200, "text/plain", "22000", TEXT)
    code, headers, body = get(it, "/sd")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    labels = {"__meta_engine_run": "digits-7", "__meta_engine_pid": str(os.getpid())}
    assert json.loads(body) == [{"targets": [f"127.0.0.1:{it.port}"], "labels": labels}]
    assert get(it, f"http://127.0.0.1:{it.port}/metrics")[0] == 200  # the form that proxies use
    code, headers, body = get(it, "/")
    assert code == 200
    assert b'<a href="metrics">' in body and b"digits-7" in body


def test_accept_is_passed_on_and_gzip_given_where_it_is_taken(make):
    it = make(exposition=lambda accept: (accept.encode(), "text/odd"))
    code, headers, body = get(it, "/metrics", "Accept: a/b", "Accept: c/d;q=0.5", "Accept-Encoding: deflate, GZIP;q=1")
    assert (code, headers["Content-Encoding"], headers["Content-Type"]) == (200, "gzip", "text/odd")
    assert gzip.decompress(body) == b"a/b, c/d;q=0.5"
    for refused in ("br", "gzip;q=0", "gzip;q=0.0", "x-gzip"):
        assert "Content-Encoding" not in get(it, "/metrics", f"Accept-Encoding: {refused}")[1]


def test_head_is_get_without_the_body(make):
    code, headers, body = get(make(), "/metrics", method="HEAD")
    assert (code, headers["Content-Length"], body) == (200, "22000", b"")


@pytest.mark.parametrize(
    "path", ["/nope", "/metrics/", "/../etc/passwd", "http://[x/nope", "/%00%ff", "/<b>", "*", "/\u00e9", "metrics"]
)
def test_other_paths_are_404_with_a_clear_line(make, path):
    code, headers, body = get(make(), path)
    assert code == 404
    assert body.startswith(b"404 there is nothing at ") and body.endswith(b": see / or /metrics\n")
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("text/plain; charset=utf-8", "nosniff")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get", "X" * 100])
def test_other_methods_are_405(make, method):
    code, headers, body = get(make(), "/metrics", method=method)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")
    assert body.startswith(b"405 ")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"one two three four five\r\n\r\n", 400),
        (bytes(range(256)) * 4 + b"\r\n\r\n", 400),
    ],
    ids=["long line", "huge header", "many headers", "TLS", "version", "no version", "words", "bytes"],
)
def test_garbage_is_refused_and_scrapes_go_on(make, request_, code):
    it = make()
    with connect(it) as client:
        client.sendall(request_)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    # HTTP/0.9: a request line without a version gets an answer without a status line.
    assert str(code).encode() in answer[:60], answer[:200]
    assert get(it, "/metrics")[2] == TEXT


@pytest.mark.parametrize("line", [b"\x16\x03\x01\x02\x00\x01\x00\xfc\n", b"GET /metrics\r\n"], ids=["TLS", "HTTP/0.9"])
def test_a_line_of_another_protocol_is_answered_at_once(make, monkeypatch, line):
    monkeypatch.setattr(endpoint, "LIFETIME", 120.0)  # within which the rest of a request may come
    with connect(make()) as client:
        client.sendall(line)
        assert client.recv(65536)


def test_a_request_may_come_in_pieces(make):
    it = make()
    with connect(it) as client:
        for piece in (b"GET /metrics HTTP/1.1\r", b"\nHost: x\r\n", b"\r", b"\n"):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(piece)
            let_pass(0.01)  # so that each arrives in a read of its own
        assert b"".join(iter(lambda: client.recv(65536), b"")).endswith(TEXT)


def test_a_client_that_hangs_up_disturbs_nobody(make):
    it = make()
    for sent in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n\r\n"):
        connect(it).close()
        with connect(it) as client:
            client.sendall(sent)
    assert get(it, "/metrics")[2] == TEXT


def test_slow_clients_are_ended_also_those_that_never_stop_sending(make, monkeypatch):
    monkeypatch.setattr(endpoint, "LIFETIME", 0.3)
    it = make()
    with connect(it) as silent, connect(it) as dripping:
        began = time.monotonic()
        dripping.settimeout(0.01)
        while time.monotonic() - began < 60:
            try:
                dripping.send(b"a")
                if dripping.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert silent.recv(1) == b""
        assert time.monotonic() - began < 60
    assert get(it, "/metrics")[2] == TEXT


def test_a_client_that_does_not_read_is_ended(make, monkeypatch):
    monkeypatch.setattr(endpoint, "LIFETIME", 0.3)
    it = make(exposition=lambda accept: (bytes(50 << 20), "text/plain"))
    with connect(it) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: not it.connections, "the connection is closed")


def refused_post(to: Endpoint) -> socket.socket:
    """Client that has received the whole answer before it has sent the body."""
    client = connect(to)
    client.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")
    answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.0 405 ") and answer.endswith(b" is not allowed: GET and HEAD are\n")
    return client


def test_who_sends_a_body_slowly_is_not_reset(make, monkeypatch):
    monkeypatch.setattr(endpoint, "REST_LIMIT", 60.0)
    with refused_post(make()) as client:
        for _ in range(10):
            client.sendall(b"a" * 10_000)  # the connection is closed: this causes a reset, and the next send fails
            let_pass(0.01)


def test_who_keeps_sending_after_the_answer_is_ended(make, monkeypatch):
    monkeypatch.setattr(endpoint, "REST_LIMIT", 60.0)
    it, body = make(), bytes(endpoint.LONGEST_REQUEST)

    def keep_sending(client: socket.socket) -> None:
        for _ in range(1000):  # more than the socket buffers can hold, however far the system lets them grow
            client.sendall(body)

    with refused_post(it) as client, pytest.raises(ConnectionError):
        keep_sending(client)
    monkeypatch.setattr(endpoint, "REST_LIMIT", 0.1)
    with refused_post(it):
        until(lambda: not it.connections, "the connection is closed")


def test_too_many_connections_are_refused_until_some_end(make, monkeypatch):
    monkeypatch.setattr(endpoint, "CONNECTIONS", 2)
    asked, answered = threading.Semaphore(0), threading.Event()

    def exposition(accept: str) -> tuple[bytes, str]:
        asked.release()
        answered.wait(60)
        return TEXT, "text/plain"

    it = make(exposition=exposition)
    with connect(it) as first, connect(it) as second:
        for each in (first, second):
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert asked.acquire(timeout=60)
        with connect(it) as third:
            assert third.recv(4096).startswith(b"HTTP/1.0 503 ")
        answered.set()
    until(lambda: get(it, "/metrics")[0] == 200, "a connection is free")


def test_connections_that_ask_nothing_keep_no_scraper_out(make):
    it = make()
    with ExitStack() as idle:
        for number in range(3 * endpoint.CONNECTIONS):
            idle.enter_context(connect(it)).sendall(b"GET /metrics HTTP/1.0\r\n"[: number % 24])
        assert get(it, "/metrics")[2] == TEXT
        assert it.connections <= endpoint.CONNECTIONS


def test_many_scrapes_at_once(make):
    it, bodies = make(), []

    def scrape() -> None:
        bodies.extend(get(it, "/metrics")[2] for _ in range(20))

    scrapers = [threading.Thread(target=scrape) for _ in range(8)]
    for each in scrapers:
        each.start()
    for each in scrapers:
        each.join(60)
    assert bodies == [TEXT] * 160


def test_a_defect_is_500_and_shown(make, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda about: shown.append(about.exc_type))
    it = make(exposition=lambda accept: ("x", 1 // 0))
    code, _, body = get(it, "/metrics")
    assert (code, body) == (500, b"500 a defect: the job's stderr shows it\n")
    assert get(it, "/")[0] == 200
    until(lambda: shown, "the defect is shown")  # after the answer
    assert shown == [ZeroDivisionError]


def test_stop_waits_for_no_client_and_no_scrape(make):
    scraping, go_on = threading.Event(), threading.Event()

    def slow(accept: str) -> tuple[bytes, str]:
        scraping.set()
        go_on.wait(100)
        return TEXT, "text/plain"

    it = make(exposition=slow)
    with connect(it) as idle, connect(it) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert scraping.wait(60)
        began = time.monotonic()
        it.stop()
        assert time.monotonic() - began < 50, "the scrape takes 100 s"
        assert idle.recv(1) == b""
        go_on.set()
        assert client.recv(4096) == b""  # nothing rather than half an answer
        with pytest.raises(ConnectionRefusedError):
            connect(it)


def test_a_port_in_use_gives_the_next_free_one(make):
    first = make()
    second = make(port=first.port)
    assert first.port < second.port <= first.port + 50
    assert get(second, "/sd")[0] == 200


def test_no_port_free_says_which_were_tried(make, monkeypatch):
    monkeypatch.setattr(endpoint, "PORTS", 0)
    it = make()
    with pytest.raises(MetricsError, match=rf"the ports {it.port} to {it.port} of 127.0.0.1 are all in use"):
        make(port=it.port)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("203.0.113.7", "cannot be served on 203.0.113.7 port .*: Cannot assign .*; give an address of this host"),
        ("no such name", "metrics address 'no such name': .*; give an IP address of this host"),
        ("a" * 100, "metrics address 'a.*give an IP address"),
    ],
)
def test_an_address_that_is_not_ours_says_so(make, address, words):
    with pytest.raises(MetricsError, match=words):
        make(address)


def test_ipv6_and_all_addresses(make):
    try:
        it = make("::1")
    except MetricsError:
        pytest.skip("no IPv6 here")
    assert it.target == f"[::1]:{it.port}"
    assert json.loads(get(it, "/sd", host="::1")[2])[0]["targets"] == [f"[::1]:{it.port}"]
    both = make("::")
    assert json.loads(get(both, "/sd")[2])[0]["targets"] == [f"127.0.0.1:{both.port}"]
    assert both.target == f"{socket.gethostname()}:{both.port}"
    assert make("0.0.0.0").target.startswith(f"{socket.gethostname()}:")


def test_a_forked_child_holds_no_socket(make):
    it = make()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        os.close(reading)
        assert get(it, "/metrics")[2] == TEXT
        it.stop()
        with pytest.raises(ConnectionRefusedError):
            connect(it)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
