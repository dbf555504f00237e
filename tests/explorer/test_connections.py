"""Sockets that send nothing, or too slowly, or take nothing: let go, while good clients are answered."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from sparsifiner.explorer.connections import Limits

from .conftest import file_of, noise, serving

# Short enough to wait for, and long enough for a good client on a busy machine. A socket gives up after ten seconds.
SHORT = Limits(headers=0.6, body=0.6, idle=0.6, linger=0.2)
SIZE = 30 << 20


async def app(scope, receive, send):
    """Answers with the length of the body; /large without reading it, with more than any buffer takes."""
    if scope["type"] != "http":
        return
    length, more = 0, scope["path"] != "/large"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    body = bytes(SIZE) if scope["path"] == "/large" else str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def short():
    with serving(app, SHORT) as address:
        yield urlsplit(address)


def connect(address):
    return socket.create_connection((address.hostname, address.port), timeout=10)


def ask(address):
    """What a good client gets."""
    client = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    with contextlib.closing(client):
        client.request("POST", "/", b"12345")
        return client.getresponse().read()


def rest(connection):
    """All that comes until the server lets go; an error if it does not."""
    parts = []
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def drip(connection, content, stop):
    """Sends byte by byte, never pausing for long, until nobody takes it."""
    with contextlib.suppress(OSError):
        for byte in content:
            if stop.is_set():
                return
            connection.send(bytes([byte]))
            time.sleep(0.02)


@contextlib.contextmanager
def dripping(connection, content):
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(connection, content, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def endless(start):
    return itertools.chain(start, itertools.cycle(b"x"))


def refusal(answer):
    """The status and the error of the last answer on a connection."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1") :].partition(b"\r\n\r\n")
    assert b"x-content-type-options: nosniff" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_silent_connections_are_let_go_and_others_answered_meanwhile(short):
    silent = [connect(short) for _ in range(60)]
    assert ask(short) == b"5"
    assert [rest(connection) for connection in silent] == [b""] * 60
    assert ask(short) == b"5"


def test_headers_that_drip(short):
    slow = connect(short)
    with dripping(slow, endless(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")):
        assert ask(short) == b"5"
        assert refusal(rest(slow)) == (408, "the headers of the request did not arrive within 0.6 seconds")


def test_headers_that_drip_after_a_good_request(short):
    slow = connect(short)
    slow.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    with dripping(slow, endless(b"GET / HTTP/1.1\r\nX: ")):
        answer = rest(slow)
    assert answer.startswith(b"HTTP/1.1 200")
    assert refusal(answer)[0] == 408


def test_a_connection_that_stays_idle(short):
    idle = connect(short)
    idle.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = rest(idle)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"\r\n\r\n0")


@pytest.mark.parametrize("form", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_bodies_that_drip(short, form):
    slow = connect(short)
    slow.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n" + form + b"\r\n\r\n")
    with dripping(slow, endless(b"186A0\r\n" if form.startswith(b"T") else b"")):
        assert ask(short) == b"5"
        assert refusal(rest(slow)) == (408, "the body of the request did not arrive within 0.6 seconds")


def test_a_body_that_nobody_waits_for(short):
    slow = connect(short)
    slow.sendall(b"POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
    with dripping(slow, endless(b"")):
        assert rest(slow).startswith(b"HTTP/1.1 200")  # answered, and not told twice


def test_a_client_that_does_not_take_its_answer(short):
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(10)
    deaf.connect((short.hostname, short.port))
    deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
    assert ask(short) == b"5"
    time.sleep(4 * SHORT.body)
    assert len(rest(deaf)) < SIZE  # what the buffers held, no more


def test_a_slow_but_steady_client_is_not_hurried(short):
    """What is bounded is what it takes, not how long the connection lasts."""
    client = http.client.HTTPConnection(short.hostname, short.port, timeout=10)
    with contextlib.closing(client):
        for _ in range(6):
            client.request("POST", "/", b"12345")
            assert client.getresponse().read() == b"5"
            time.sleep(SHORT.headers / 4)


def test_too_many_connections_are_told_so_and_there_is_room_again():
    with serving(app, Limits(headers=10, body=10, idle=10, linger=0.2, connections=4)) as found:
        address = urlsplit(found)
        held = [connect(address) for _ in range(4)]
        waited = 0
        status, reason = refusal(rest(connect(address)))
        assert (status, reason.split(":")[0]) == (503, "4 connections are open, which is all there may be")
        client = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        client.request("POST", "/", b"12345")
        assert client.getresponse().status == 503  # also to one that has sent its request by then
        many = [connect(address) for _ in range(20)]
        answers = [rest(connection) for connection in many]
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 503", b""}  # beyond twice as many, without a word
        for connection in held:
            connection.close()
        while waited < 100:  # until the server has seen that they are closed
            with contextlib.suppress(http.client.HTTPException, OSError):
                if ask(address) == b"5":
                    return
            waited += 1
            time.sleep(0.05)
        pytest.fail("there was no room again")


def test_an_image_that_drips_to_the_page(subject):
    from sparsifiner.explorer.app import create_app

    page = create_app(subject)
    with serving(page, Limits(headers=5, body=0.5, idle=5, linger=0.2)) as found:
        address = urlsplit(found)
        client = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        client.request("POST", "/api/sessions")
        session = json.loads(client.getresponse().read())["session"]
        path, content = f"/api/sessions/{session}/images", file_of(noise(1))
        slow = connect(address)
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        with dripping(slow, content):
            client.request("POST", path, content)
            answer = client.getresponse()
            assert (answer.status, bool(answer.read())) == (201, True)
            assert refusal(rest(slow))[0] == 408
        assert page.state.explorer.sessions.counts() == (1, 1)  # nothing of the slow one is kept
        client.close()
    page.state.explorer.engine.close()


def test_the_bounds_are_as_documented():
    assert Limits() == Limits(headers=5, body=30, idle=5, linger=1, connections=256)
