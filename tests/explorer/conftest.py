from __future__ import annotations

import contextlib
import io
import threading
import time

import pytest
import torch
from PIL import Image

import sparsifiner as sp
from sparsifiner.explorer import server
from sparsifiner.explorer.app import create_app
from sparsifiner.explorer.pictures import lens_of
from sparsifiner.explorer.samples import Gallery, file_samples
from sparsifiner.explorer.subject import Subject

from ..toys import make_vit

GRID, TOKENS, DEPTH, HEADS = 5, 26, 4, 3
CONFIG = sp.SparseConfig(0.3, n_down=6, tau=0.1, basis_threshold=0.02)


def noise(seed: int, size=(40, 30)) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def file_of(image: Image.Image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    """A calibrated ViT of 26 tokens, 4 layers and 3 heads, and three images."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(3):
        noise(number).save(folder / f"image {number}.png")
    student = sp.sparsify(make_vit(depth=DEPTH), CONFIG)
    sp.calibrate(student, torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(0)))
    lens = lens_of(student)
    samples, _ = file_samples([str(folder)], lens)
    classes = [f"kind {number}" for number in range(7)]
    return Subject(student, "tiny", lens, Gallery(samples), classes, ["Calibrated on noise."])


@pytest.fixture(scope="module")
def app(subject):
    made = create_app(subject)
    yield made
    made.state.explorer.engine.close()


@contextlib.contextmanager
def serving(app, limits=None):
    """A real server in this process; yields its address."""
    listener = server.listen("127.0.0.1", 0)
    running = server.make_server(app, limits)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        yield server.address_of(listener)
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(app):
    with serving(app) as found:
        yield found
