"""Listening, and opening the browser once somebody listens."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import webbrowser
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sparsifiner.errors import ConfigError
from sparsifiner.explorer.connections import BoundedProtocol, Limits

# Tried one after the other where no port is asked for: links stay good from one time to the next.
PORTS = range(8765, 8785)


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that nobody else has; on the port asked for, or on the first free one of ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    reason = "all in use"
    for number in PORTS if port is None else [port]:
        # The protocol by name: asyncio turns off Nagle's algorithm, 40 ms an answer, only where it reads TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], number, *address[2:]))
            listener.listen(256)
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            reason = getattr(error, "strerror", None) or str(error)
    ports = f"port {port}" if port is not None else f"ports {PORTS[0]} to {PORTS[-1]}"
    raise ConfigError(f"cannot listen on {host}, {ports}: {reason}; give another --port")


def address_of(listener: socket.socket) -> str:
    """What to type into a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def make_server(app: ASGIApp, limits: Limits | None = None) -> uvicorn.Server:
    """A server of the app whose connections stay within the limits."""
    limits = limits or Limits()
    protocol: Any = functools.partial(BoundedProtocol, limits=limits)
    # There are no websockets here, and a page that is still open should not hold up Ctrl-C.
    config = uvicorn.Config(app, http=protocol, ws="none", log_level="warning", server_header=False)
    config.timeout_keep_alive = limits.idle  # pyright: ignore[reportAttributeAccessIssue] (whole numbers are not needed)
    config.timeout_graceful_shutdown = 3
    return uvicorn.Server(config)


def serve(app: ASGIApp, listener: socket.socket, open_browser: bool) -> None:
    """Answers until Ctrl-C."""
    server = make_server(app)
    if open_browser:
        threading.Thread(target=_open, args=(server, address_of(listener)), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # how uvicorn ends; everything is closed by then
        server.run(sockets=[listener])


def _open(server: uvicorn.Server, address: str) -> None:
    while not server.started:
        time.sleep(0.05)
    webbrowser.open(address)
