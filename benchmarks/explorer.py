"""How fast `sparsifiner explore` answers, and what it says to hostile input: results/MACHINE/explorer.csv.

Starts the server on DeiT-Tiny, asks it alone, then as 32 clients at once, and compares what the many got with what one
gets. Then sends it what it should refuse, and prints the answers. Last, it is besieged by connections that send
nothing, or too slowly, while one good client goes on asking: results/MACHINE/explorer-slow.csv.

    python benchmarks/explorer.py [--clients 32] [--requests 40] [--only-slow]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import http.client
import io
import json
import random
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from rich.console import Console
from rich.table import Table

from common import assets, environment, machine_results, write_csv
from sparsifiner.files import replacing

NAME = "deit_tiny_patch16_224"
IMAGES = ("china.jpg", "flower.jpg")
LAYERS, HEADS, TOKENS = 12, 3, 197

Request = tuple[str, str, str, bytes | None]  # what it is, method, path, body


class Client:
    """One browser tab: one connection that stays open."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        return response.status, response.read()


def start() -> tuple[subprocess.Popen[bytes], int]:
    """The server, once it answers, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    weights = str(assets() / f"{NAME}.safetensors")
    command = ["-m", "sparsifiner", "explore", "--model", NAME, "--weights", weights, "--port", str(port)]
    process = subprocess.Popen([sys.executable, *command, "--no-browser"], stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            Client(port).ask("GET", "/api/about")
            return process, port
        except OSError:
            if process.poll() is not None:
                raise SystemExit("the server did not start") from None
            time.sleep(0.2)
    raise SystemExit("the server did not answer within two minutes")


def photo(seed: int) -> bytes:
    """A JPEG of 1000 x 750 pixels, as a phone's browser might send."""
    noise = Image.frombytes("RGB", (40, 30), random.Random(seed).randbytes(3600))
    buffer = io.BytesIO()
    noise.resize((1000, 750), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def person(seed: int, session: str, count: int) -> Iterator[Request]:
    """What somebody does: mostly looks at other patches, sometimes moves a slider, now and then sends an image."""
    chosen = random.Random(seed)
    settings: dict[str, Any] = {"image": chosen.choice(IMAGES), "keep": 0.1}
    for number in range(count):
        what = chosen.random()
        place = {"layer": chosen.randrange(LAYERS), "head": chosen.randrange(HEADS), "query": chosen.randrange(TOKENS)}
        if number == count // 2:
            yield "send an image", "POST", f"/api/sessions/{session}/images", photo(seed)
        elif what < 0.12:
            settings["keep"] = chosen.randrange(2, 100) / 100
            settings |= chosen.choice([{}, {"residual": "false"}, {"tile": "2x2"}, {"tau": 0.01}])
            yield "new settings", "GET", "/api/run?" + urlencode(settings), None
        elif what < 0.2:
            yield "basis maps", "GET", f"/api/basis?layer={place['layer']}&head={place['head']}", None
        elif what < 0.25:
            yield "page and image", "GET", f"/api/images/{settings['image']}", None
        else:
            yield "another patch", "GET", "/api/view?" + urlencode(settings | place), None


Answer = tuple[str, str, float, int, bytes]  # what it was, path, seconds, status, body


def play(port: int, requests: list[Request]) -> list[Answer]:
    """One person's requests, one after the other."""
    client, answers = Client(port), []
    for what, method, path, body in requests:
        begin = time.perf_counter()
        status, answer = client.ask(method, path, body)
        answers.append((what, path, time.perf_counter() - begin, status, answer))
    return answers


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(port: int, clients: int, count: int) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Rows of the table for so many clients, each kind of request by itself and all."""
    sessions = [json.loads(Client(port).ask("POST", "/api/sessions")[1])["session"] for _ in range(clients)]
    plans = [list(person(seed, session, count)) for seed, session in enumerate(sessions)]
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = [answer for part in pool.map(lambda plan: play(port, plan), plans) for answer in part]
    seconds = time.perf_counter() - begin
    for session in sessions:
        Client(port).ask("POST", f"/api/sessions/{session}/close")
    rows = []
    for what in [*sorted({answer[0] for answer in answers}), "all"]:
        mine = [answer for answer in answers if what in (answer[0], "all")]
        times = [answer[2] for answer in mine]
        rows.append(
            {
                "clients": clients,
                "kind": what,
                "requests": len(mine),
                "errors": sum(answer[3] >= 400 for answer in mine),
                "p50_ms": round(1000 * percentile(times, 0.5), 1),
                "p99_ms": round(1000 * percentile(times, 0.99), 1),
                "max_ms": round(1000 * max(times), 1),
                "per_second": round(len(mine) / seconds, 1),
            }
        )
    return rows, answers


def wrong(port: int, answers: list[Answer]) -> int:
    """How many of the answers are not what one client alone gets."""
    client, known = Client(port), {}
    count = 0
    for _, path, _, _, body in answers:
        if path.startswith(("/api/run", "/api/view", "/api/basis")):
            if path not in known:
                known[path] = client.ask("GET", path)[1]
            count += known[path] != body
    return count


def png(width: int, height: int) -> bytes:
    """A PNG whose header promises so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def hostile(port: int) -> None:
    """Prints what the server says to what it should refuse, and that it still answers."""
    session = json.loads(Client(port).ask("POST", "/api/sessions")[1])["session"]
    images = f"/api/sessions/{session}/images"
    good = photo(0)
    view = "/api/view?image=china.jpg&layer=0&head=0&query=5"
    cases: list[tuple[str, str, str, bytes | None, dict[str, str]]] = [
        ("keep=nan", "GET", "/api/run?image=china.jpg&keep=nan", None, {}),
        ("keep=0", "GET", "/api/run?image=china.jpg&keep=0", None, {}),
        ("keep=many", "GET", "/api/run?image=china.jpg&keep=many", None, {}),
        ("tile=9999x9999", "GET", "/api/run?image=china.jpg&tile=9999x9999", None, {}),
        ("layer 12", "GET", view.replace("layer=0", "layer=12"), None, {}),
        ("query -1", "GET", view.replace("query=5", "query=-1"), None, {}),
        ("unknown image", "GET", view.replace("china", "nothing"), None, {}),
        ("unknown setting", "GET", f"{view}&debug=1", None, {}),
        ("a long address", "GET", f"/api/run?image={'x' * 9000}", None, {}),
        ("path out of the folder", "GET", "/static/..%2fapp.py", None, {}),
        ("empty file", "POST", images, b"", {}),
        ("text", "POST", images, b"hello", {}),
        ("SVG with a script", "POST", images, b"<svg><script>alert(1)</script></svg>", {}),
        ("PostScript", "POST", images, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}),
        ("half a JPEG", "POST", images, good[: len(good) // 2], {}),
        ("400-megapixel PNG header", "POST", images, png(20_000, 20_000), {}),
        ("PNG of 4 x 10^18 pixels", "POST", images, png(2_000_000_000, 2_000_000_000), {}),
        ("20 MiB", "POST", images, bytes(20 << 20), {}),
        ("unknown session", "POST", "/api/sessions/nobody/images", good, {}),
        ("another origin", "POST", images, good, {"Origin": "http://evil.example"}),
        ("origin null", "POST", images, good, {"Origin": "null"}),
        ("another site's image tag", "GET", view, None, {"Sec-Fetch-Site": "cross-site"}),
        ("DNS rebinding", "GET", view, None, {"Host": f"evil.example:{port}"}),
        ("wrong method", "DELETE", "/api/about", None, {}),
        ("a good image", "POST", images, good, {}),
        ("a good request", "GET", view, None, {}),
    ]
    table = Table("input", "status", "answer", title="hostile input")
    for name, method, path, body, headers in cases:
        status, answer = Client(port).ask(method, path, body, **headers)
        text = json.loads(answer).get("error", "(answered)")
        table.add_row(name, str(status), text if len(text) < 110 else f"{text[:110]}…")
    Console(width=170).print(table)


# How slow connections begin; then they send a byte now and then, or nothing.
SLOW = {
    "nothing sent": b"",
    "headers, byte by byte": b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
    "body, byte by byte": b"POST /api/sessions/{session}/images HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Length: 99999\r\n\r\n",
    "idle after an answer": b"GET /api/basis?layer=0&head=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


def besiege(port: int, name: str, count: int, seconds: float = 40.0) -> dict[str, Any]:
    """So many slow connections at once: when the last was let go, what they were told, and how a good client fared."""
    client = Client(port)
    session = json.loads(client.ask("POST", "/api/sessions")[1])["session"]
    opening = SLOW[name].replace(b"{session}", session.encode())
    begin = time.perf_counter()
    open_ones = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    told: dict[socket.socket, bytes] = {}
    for connection in open_ones:
        told[connection] = b""
        with contextlib.suppress(OSError):  # refused already
            connection.sendall(opening)
        connection.setblocking(False)
    times, errors, closed = [], 0, 0.0
    while open_ones and time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        try:
            errors += client.ask("GET", "/api/view?image=china.jpg&layer=0&head=0&query=5")[0] != 200
        except (OSError, http.client.HTTPException):
            errors, client = errors + 1, Client(port)
        times.append(time.perf_counter() - start)
        for connection in list(open_ones):
            if _is_closed(connection, told, drip="byte" in name):
                open_ones.remove(connection)
                closed = time.perf_counter() - begin
        time.sleep(0.1)
    for connection in open_ones:
        connection.close()
    statuses = [
        answer[answer.rindex(b"HTTP/1.1") :][9:12] if b"HTTP/1.1" in answer else b"" for answer in told.values()
    ]
    return {
        "slow": name,
        "connections": count,
        "told_408": statuses.count(b"408"),
        "told_503": statuses.count(b"503"),
        "left_open": len(open_ones),
        "last_closed_s": round(closed, 1),
        "good_requests": len(times),
        "good_errors": errors,
        "good_p50_ms": round(1000 * percentile(times, 0.5), 1),
        "good_max_ms": round(1000 * max(times), 1),
    }


def _is_closed(connection: socket.socket, told: dict[socket.socket, bytes], drip: bool) -> bool:
    """Whether the server has let go of it; takes what it says, and sends another byte if it is to."""
    try:
        while part := connection.recv(1 << 16):
            told[connection] += part
        connection.close()
        return True
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        return True
    if drip:
        with contextlib.suppress(OSError):
            connection.send(b"x")
    return False


def slow(port: int) -> None:
    """Prints and writes what becomes of slow connections."""
    rows = [besiege(port, name, 200) for name in SLOW]
    rows.append(besiege(port, "nothing sent", 400))  # more than there may be
    table = Table(*rows[0], title="slow connections, and one good client")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=170).print(table)
    write_csv(rows, machine_results() / "explorer-slow.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=40, help="of each client")
    parser.add_argument("--only-slow", action="store_true", help="only the slow connections")
    arguments = parser.parse_args()
    process, port = start()
    try:
        if arguments.only_slow:
            return slow(port)
        measure(port, 1, 5)  # what is done once is done before anything is measured
        alone, _ = measure(port, 1, 10 * arguments.requests)
        many, answers = measure(port, arguments.clients, arguments.requests)
        mistakes = wrong(port, answers)
        hostile(port)
        slow(port)
        still = process.poll() is None
    finally:
        process.terminate()
        process.wait()
    table = Table(*alone[0], title=f"{NAME}; {mistakes} wrong answers among {len(answers)}")
    for row in [*alone, *many]:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    print("the server stayed up" if still else "THE SERVER WENT DOWN")
    with replacing(machine_results() / "explorer.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*alone[0], "wrong", *environment()], lineterminator="\n")
        writer.writeheader()
        for row in alone + many:
            writer.writerow(row | {"wrong": mistakes if row["clients"] > 1 else ""} | environment())
    return None


if __name__ == "__main__":
    main()
