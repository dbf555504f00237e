"""The page's server: requests in, answers out. What is in the answers is made elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sparsifiner.config import SparseConfig
from sparsifiner.errors import SparsifinerError
from sparsifiner.explorer import answers
from sparsifiner.explorer.anatomy import anatomy_of
from sparsifiner.explorer.engine import Engine, Pass
from sparsifiner.explorer.guard import Guard, guard_settings
from sparsifiner.explorer.pictures import MAX_BYTES, Picture, decode, too_large
from sparsifiner.explorer.refusal import Refusal
from sparsifiner.explorer.sessions import Sessions, new_key
from sparsifiner.explorer.subject import Subject

STATIC = Path(__file__).parent / "static"
# Seconds between looks for pages that have gone silent.
SWEEP = 15

# Some systems say that modules are plain text, and browsers then refuse them.
mimetypes.add_type("text/javascript", ".js")


class Settings(BaseModel):
    """An image and the settings asked for; what is not given is as in the model."""

    model_config = {"extra": "forbid"}

    image: Annotated[str, Field(max_length=200)]
    keep: float | None = None
    tau: float | None = None
    basis_threshold: float | None = None
    residual: bool | None = None
    tile: str | None = None
    token_keep: float | None = None


class View(Settings):
    """One query of one layer and head, counted from 0; queries are tokens, prefix tokens first."""

    layer: int
    head: int
    query: int


class Head(BaseModel):
    """One head of one layer, counted from 0."""

    model_config = {"extra": "forbid"}

    layer: int
    head: int


class Explorer:
    """A subject, the passes of its model, and the images of open pages."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.anatomy = anatomy_of(subject.student)  # before the engine's thread has the model
        self.engine = Engine(subject.student)
        self.sessions = Sessions(self.engine.forget)
        self.about = answers.describe(subject, self.anatomy, self.engine.config)

    def picture(self, key: str) -> Picture:
        """An image that is offered or was sent."""
        found = self.subject.gallery.find(key) or self.sessions.find(key)
        if found is None:
            raise Refusal(404, f"there is no image {key!r}: choose one that is offered, or send it again")
        return found

    def config(self, asked: Settings) -> SparseConfig:
        """The settings of a request."""
        given = asked.model_dump(include=set(Settings.model_fields) - {"image"})
        return answers.change(self.engine.config, self.anatomy, given)

    def run(self, asked: Settings) -> tuple[Picture, Pass]:
        """The pass that a request is about."""
        config = self.config(asked)
        picture = self.picture(asked.image)
        return picture, self.engine.run(picture, config)

    def receive(self, session: str, content: bytes, name: str) -> dict[str, Any]:
        """Takes an image a page has sent."""
        image, notes = decode(content)
        picture = self.subject.lens.picture(image, new_key(), _plain(name), notes)
        self.sessions.add(session, picture)
        return {"id": picture.key, "name": picture.name, "notes": notes}


def _plain(name: str) -> str:
    """A file's name without folders and without characters that do something."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(character for character in last if character.isprintable())[:80] or "image"


def create_app(subject: Subject, host: str = "127.0.0.1") -> FastAPI:
    """The server of a subject, bound to ``host``; ``app.state.explorer`` is what it serves."""
    explorer = Explorer(subject)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP)
                await run_in_threadpool(explorer.sessions.sweep)

        task = asyncio.create_task(sweep())
        yield
        task.cancel()

    # No pages that document the server: theirs load scripts from elsewhere.
    app = FastAPI(title="sparsifiner explore", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.explorer = explorer
    _add_reading(app, explorer)
    _add_sending(app, explorer)
    _add_files(app)
    _add_errors(app)
    app.add_middleware(Guard, **guard_settings(host))
    return app


def _add_reading(app: FastAPI, explorer: Explorer) -> None:
    """What changes nothing. Plain functions: they wait for the model in threads of their own."""

    @app.get("/api/about")
    def about() -> JSONResponse:
        return JSONResponse(explorer.about)

    @app.get("/api/run")
    def run(asked: Annotated[Settings, Query()]) -> JSONResponse:
        picture, found = explorer.run(asked)
        dense = explorer.engine.dense(picture)
        return JSONResponse(answers.summary(explorer.subject.classes, explorer.anatomy, found, dense))

    @app.get("/api/view")
    def view(asked: Annotated[View, Query()]) -> JSONResponse:
        explorer.anatomy.check(asked.layer, asked.head, asked.query)  # before the model is run for nothing
        _, found = explorer.run(asked)
        return JSONResponse(answers.view(explorer.anatomy, found, asked.layer, asked.head, asked.query))

    @app.get("/api/basis")
    def basis(asked: Annotated[Head, Query()]) -> JSONResponse:
        return JSONResponse(answers.basis(explorer.anatomy, asked.layer, asked.head))

    @app.get("/api/images/{key}")
    def image(key: str, small: bool = False) -> Response:
        picture = explorer.picture(key)
        return Response(picture.small if small else picture.shown, media_type=picture.media)


def _add_sending(app: FastAPI, explorer: Explorer) -> None:
    """Images of the reader's own."""

    @app.post("/api/sessions")
    def open_session() -> JSONResponse:
        return JSONResponse({"session": explorer.sessions.open()}, 201)

    @app.post("/api/sessions/{session}/alive")
    def alive(session: str) -> Response:
        explorer.sessions.heard(session)
        return Response(status_code=204)

    @app.post("/api/sessions/{session}/close")
    def close(session: str) -> Response:
        explorer.sessions.close(session)
        return Response(status_code=204)

    @app.post("/api/sessions/{session}/images")
    async def send(session: str, request: Request, name: str = "image") -> JSONResponse:
        # The body is the file itself. A form would be spooled to disk, where nothing of it may ever be.
        explorer.sessions.check(session)
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                if len(content) > MAX_BYTES:
                    raise too_large()
        except ClientDisconnect:  # also one that was too slow
            raise Refusal(400, "the image did not arrive whole") from None
        return JSONResponse(await run_in_threadpool(explorer.receive, session, bytes(content), name), 201)


def _add_files(app: FastAPI) -> None:
    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    app.mount("/static", StaticFiles(directory=STATIC))


def _add_errors(app: FastAPI) -> None:
    """Every error is one line of JSON."""

    @app.exception_handler(SparsifinerError)
    async def ours(_: Request, error: SparsifinerError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, getattr(error, "status", 422))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": f"{error.detail}: {request.method} {request.url.path}"}, error.status_code)
