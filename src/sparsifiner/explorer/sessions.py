"""Images that pages send: held in memory while the page is open, then gone."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable

from sparsifiner.explorer.pictures import Picture
from sparsifiner.explorer.refusal import Refusal

# A page says every HEARTBEAT seconds that it is open. Browsers slow the clocks of hidden pages to a minute.
HEARTBEAT, EXPIRY = 20.0, 180.0
MAX_SESSIONS = 64
MAX_IMAGES = 6
MAX_IMAGES_IN_ALL = 128


@dataclasses.dataclass
class _Session:
    heard: float
    pictures: list[Picture] = dataclasses.field(default_factory=list)


class Sessions:
    """Open pages and their images; may be asked from any thread.

    Args:
        on_gone: told of every image that is let go.
        clock: seconds that only ever grow.
    """

    def __init__(self, on_gone: Callable[[Picture], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_gone, self._clock = on_gone, clock
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.RLock()

    def open(self) -> str:
        """A new page's name, which nobody can guess."""
        with self._lock:
            self.sweep()
            if len(self._sessions) >= MAX_SESSIONS:
                raise Refusal(503, f"{MAX_SESSIONS} pages with images of their own are open: close one")
            name = secrets.token_urlsafe(18)
            self._sessions[name] = _Session(self._clock())
            return name

    def heard(self, name: str) -> None:
        """A page is still open."""
        with self._lock:
            self._find(name).heard = self._clock()

    def close(self, name: str) -> None:
        """A page is closed, whether it was known or not."""
        with self._lock:
            session = self._sessions.pop(name, None)
            for picture in session.pictures if session else []:
                self._on_gone(picture)

    def add(self, name: str, picture: Picture) -> None:
        """Another image of a page; its oldest goes if it has too many."""
        with self._lock:
            session = self._find(name)
            session.heard = self._clock()
            if len(session.pictures) >= MAX_IMAGES:
                self._on_gone(session.pictures.pop(0))
            if sum(len(other.pictures) for other in self._sessions.values()) >= MAX_IMAGES_IN_ALL:
                raise Refusal(503, f"open pages hold {MAX_IMAGES_IN_ALL} images in all: close one")
            session.pictures.append(picture)

    def check(self, name: str) -> None:
        """An error if there is no such page: before its image is read and decoded."""
        with self._lock:
            self._find(name)

    def find(self, key: str) -> Picture | None:
        """The image of this key, of whatever page: keys cannot be guessed."""
        with self._lock:
            self.sweep()
            pictures = (picture for session in self._sessions.values() for picture in session.pictures)
            return next((picture for picture in pictures if picture.key == key), None)

    def sweep(self) -> None:
        """Closes pages that have not been heard of for too long."""
        with self._lock:
            late = self._clock() - EXPIRY
            for name in [name for name, session in self._sessions.items() if session.heard < late]:
                self.close(name)

    def counts(self) -> tuple[int, int]:
        """How many pages, and how many images."""
        with self._lock:
            return len(self._sessions), sum(len(session.pictures) for session in self._sessions.values())

    def _find(self, name: str) -> _Session:
        self.sweep()
        if name not in self._sessions:
            raise Refusal(404, "this page's images are gone, because it was not heard of for a while: send them again")
        return self._sessions[name]


def new_key() -> str:
    """A key for an image that somebody sent."""
    return f"own-{secrets.token_urlsafe(18)}"
