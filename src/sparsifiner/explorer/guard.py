"""Who may talk to the server, and what browsers are told with every answer."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsifiner.explorer.pictures import MAX_BYTES, too_large

HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """Lets through what the server's own page sends, and ends every failure in an answer.

    A page of another site can make a browser send requests here, and by a name of its own that resolves to this
    machine (DNS rebinding) even read the answers. So the name asked for must be ours, and a request that says where it
    comes from must come from our page.

    Args:
        app: what is guarded.
        names: host names that are ours, in lower case; addresses are judged by ``any_address``.
        any_address: whether the server is reached by addresses other than this machine's loopback.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], any_address: bool) -> None:
        self.app, self.names, self.any_address = app, frozenset(names), any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no websockets here
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self.refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is not None:
            status, text = refusal
            await JSONResponse({"error": text}, status)(scope, receive, send_guarded)
            return
        try:
            await self.app(scope, receive, send_guarded)
        except Exception:
            logging.getLogger("sparsifiner").exception("%s %s", scope["method"], scope["path"])
            if started:
                raise
            answer = {"error": "the server failed to answer; its terminal says why"}
            await JSONResponse(answer, 500)(scope, receive, send_guarded)

    def refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        """Why a request is not let through, and the status that says so; None if it is."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 403, f"{host or 'no host'!r} is not a name of this server: use the address it printed"
        reads = method in ("GET", "HEAD")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin is not None and _host_of(origin) != host.lower():
            return 403, f"requests from {origin!r} are not answered: only this server's own page may ask"
        # Any page may link to ours; nothing else here is for others, not even to read.
        if site not in ("same-origin", "none") and not (reads and path == "/"):
            return 403, "requests of other sites are not answered: only this server's own page may ask"
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return 400, "the content-length is not a number"
        return (413, str(too_large())) if int(length[:20]) > MAX_BYTES else None

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
        except ValueError:
            return False
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def guard_settings(host: str) -> dict[str, Any]:
    """The names and addresses by which a server bound to ``host`` is reached."""
    names = {"localhost"}
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        names.add(host.lower())
        loopback = host == "localhost"
    if not loopback:
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return {"names": names, "any_address": not loopback}
