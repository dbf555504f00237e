"""Connections that do not hold the server up: who sends nothing, or too slowly, or takes no answer, is let go."""

from __future__ import annotations

import asyncio
import dataclasses
import http
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsifiner.explorer.guard import HEADERS


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a connection may take.

    Attributes:
        headers: seconds from the start of a connection, or from the first byte of a later request, until a request's
            headers are there; however much of them has come.
        body: seconds from then on until its body is there, and for the client to take what it is sent.
        idle: seconds between an answer and the next request.
        linger: seconds in which a client that was refused may read why.
        connections: open at a time; the next is refused. Beyond twice as many it is closed without a word.
    """

    headers: float = 5.0
    body: float = 30.0
    idle: float = 5.0
    linger: float = 1.0
    connections: int = 256


class BoundedProtocol(H11Protocol):
    """uvicorn's side of one connection, with an end to all that it waits for but the answer."""

    def __init__(self, *arguments: Any, limits: Limits, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.limits, self.refused = limits, False
        self._waiting: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Somebody connects."""
        super().connection_made(transport)
        count, most = len(self.connections), self.limits.connections
        if count > 2 * most:
            transport.abort()
        elif count > most:
            self._refuse(503, f"{most} connections are open, which is all there may be: close some, or try again")
        else:
            self._wait("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        if self.refused:
            return  # read all the same: a connection closed on unread bytes takes the refusal with it
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """A request is answered; perhaps before all of it has come."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        self._wait("reading")

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._follow()

    def _follow(self) -> None:
        """Waits for what is missing of the request that is coming in, if one is."""
        theirs = self.conn.their_state
        if self.transport.is_closing() or self.flow.write_paused:
            return
        if theirs is h11.SEND_BODY:
            self._wait("body")
        elif theirs is h11.IDLE and self.conn.trailing_data[0]:
            self._wait("headers")
        else:
            self._wait(None)

    def _wait(self, what: str | None) -> None:
        """From now on for this; as before, if it is that already: more bytes give no more time."""
        if what == self._waiting or self.refused:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._waiting, self._timer = what, None
        if what is not None:
            seconds = self.limits.headers if what == "headers" else self.limits.body
            self._timer = self.loop.call_later(seconds, self._late, what, seconds)

    def _late(self, what: str, seconds: float) -> None:
        begun = bool(self.conn.trailing_data[0]) if what == "headers" else not self.cycle.response_started
        if what == "reading" or not begun:
            self.transport.abort()  # there is nobody to tell, or no way
        else:
            self._refuse(408, f"the {what} of the request did not arrive within {seconds:g} seconds")

    def _refuse(self, status: int, reason: str) -> None:
        """Says why, and lets the client read it."""
        content = json.dumps({"error": reason}).encode()
        about = {"content-type": "application/json", "content-length": len(content), "connection": "close"}
        lines = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            *(f"{k}: {v}" for k, v in (about | HEADERS).items()),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        self.transport.write_eof()
        self._wait(None)
        self.refused = True
        self._timer = self.loop.call_later(self.limits.linger, self.transport.abort)
