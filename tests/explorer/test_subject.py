"""What the command line asks for is what is opened."""

import asyncio
import socket
import stat
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient

import sparsifiner as sp
from sparsifiner import digits, scenes
from sparsifiner.cli import main
from sparsifiner.errors import SparsifinerError
from sparsifiner.explorer import server, subject
from sparsifiner.explorer.app import create_app
from sparsifiner.explorer.subject import open_subject

from ..toys import sharpen
from .conftest import noise

NAME = "vit_tiny_patch16_224"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sparsifiner"


@pytest.fixture
def quick(monkeypatch):
    """Training that takes a moment; counts how often it is asked for."""
    calls = []
    train = scenes.train_scenes

    def short(source, **options):
        calls.append(len(source[0]))
        return train(source, **(options | {"steps": 2}))

    monkeypatch.setattr(scenes, "TOKENS", 128)
    monkeypatch.setattr(scenes, "MIXTURE", (8,))
    monkeypatch.setattr(scenes, "train_scenes", short)
    return calls


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(sharpen(timm.create_model(NAME, img_size=64, num_classes=3)).state_dict(), path)
    return str(path)


def test_nothing_at_all_is_the_scenes_kept_for_the_next_time(cache, quick):
    first = open_subject([])
    assert len(first.gallery.samples) == 8
    assert first.classes == []
    assert "trained on this machine" in first.notes[0]
    (file,) = cache.iterdir()
    second = open_subject([])
    assert len(quick) == 1
    tensor = second.gallery.find("scene-3").tensor
    assert torch.equal(first.student(tensor), second.student(tensor))
    file.write_bytes(b"damaged")
    open_subject([])
    assert len(quick) == 2
    assert sp.load(file) is not None


def test_without_a_place_to_keep_it_the_scenes_open_all_the_same(cache, quick):
    cache.parent.write_text("not a folder")
    found = open_subject([])
    assert "could not be kept" in found.notes[0]


def test_scenes_are_explored(cache, quick):
    found = open_subject([])
    _, test = digits.load_digits()
    assert torch.equal(found.gallery.find("scene-2").tensor, scenes.draw(test, 1, 32, seed=2).images)
    app = create_app(found)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/api/about").json()["model"]["tokens"] == 1025
        assert client.get("/api/run", params={"image": "scene-2"}).json()["predictions"] is None
        view = client.get("/api/view", params={"image": "scene-2", "layer": 3, "head": 2, "query": 64})
        assert len(view.json()["maps"]["full"]["patches"]) == 1024
        assert client.get("/api/images/scene-2").headers["content-type"] == "image/jpeg"
    app.state.explorer.engine.close()


def test_digits_are_explored_and_drawn_ones_too(tmp_path):
    model = timm.create_model(digits.NAME)
    sp.save(sp.sparsify(model, sp.suggest_config(model, 0.25)), tmp_path / "digits.safetensors")
    found = open_subject([str(tmp_path / "digits.safetensors")])
    assert found.classes == [str(number) for number in range(10)]
    (_, _), (images, labels) = digits.load_digits()
    picture = found.gallery.find("digit-7-2")
    assert torch.equal(picture.tensor[0], images[(labels == 7).nonzero()[1, 0]])
    app = create_app(found)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/api/about").json()["model"]["tokens"] == 65
        view = client.get("/api/view", params={"image": "digit-7-2", "layer": 3, "head": 3, "query": 64})
        assert len(view.json()["maps"]["full"]["patches"]) == 64
        assert client.get("/api/images/digit-7-2").headers["content-type"] == "image/png"
    app.state.explorer.engine.close()
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (300, 200), "white")
    ImageDraw.Draw(page).line((150, 20, 150, 180), fill="black", width=30)
    taken = found.lens.take(page)[0]
    assert taken.shape == (8, 8)
    assert taken[4, 4] > 0.5  # ink is bright, whatever it was drawn with
    assert taken[4, 0] < 0


def test_a_dense_model_opens_cells(weights, tmp_path):
    noise(0, (90, 70)).save(tmp_path / "mine.png")
    (tmp_path / "broken.jpg").write_bytes(b"broken")
    found = open_subject([str(tmp_path)], NAME, weights, 64)
    assert list(found.gallery.samples) == ["broken.jpg", "mine.png", "china.jpg", "flower.jpg"]
    assert "CC BY 2.0" in found.gallery.samples["china.jpg"].credit
    assert sp.config_of(found.student).pattern == "cells"
    assert any("There are no predictors here" in note for note in found.notes)
    assert found.gallery.find("china.jpg").tensor.shape == (1, 3, 64, 64)
    assert any("random" in note for note in open_subject([], NAME, None, 64).notes)


def test_a_checkpoint_opens_with_or_without_its_host(weights, tmp_path):
    host = sp.sparsify(subject.create_host(NAME, weights, img_size=64), sp.SparseConfig([0.5] * 11 + [0.1], n_down=4))
    sp.save(host, tmp_path / "whole.safetensors")
    sp.save(host, tmp_path / "predictors.safetensors", host_weights=False)
    found = open_subject([str(tmp_path / "whole.safetensors")])
    assert found.name == "whole.safetensors"
    app = create_app(found)
    assert app.state.explorer.about["settings"]["keep"] == (0.5,) * 11 + (0.1,)
    app.state.explorer.engine.close()
    assert open_subject([str(tmp_path / "predictors.safetensors")], NAME, weights, 64).student is not None
    with pytest.raises(SparsifinerError, match="no weights of the host"):
        open_subject([str(tmp_path / "predictors.safetensors")])


@pytest.mark.assets
def test_deit_has_predictors_that_come_with_the_package(assets):
    found = open_subject([], "deit_tiny_patch16_224", str(assets / "deit_tiny_patch16_224.safetensors"))
    assert any("come with sparsifiner" in note for note in found.notes)
    app = create_app(found)
    with TestClient(app, base_url="http://localhost") as client:
        run = client.get("/api/run", params={"image": "flower.jpg", "keep": 0.25}).json()
        assert run["predictions"]["dense"] == run["predictions"]["sparse"]
        assert run["predictions"]["top"][0]["name"]
        assert run["costs"]["attention"] < run["costs"]["dense_attention"]
        assert run["recall"] > 0.7
    app.state.explorer.engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.safetensors"], "nothing.safetensors does not exist"),
        (["photo.jpg"], "photo.jpg is not a checkpoint"),
        (["--weights", "x"], "--weights without --model"),
        (["--model", NAME, "nowhere.png"], "nowhere.png does not exist: give image files"),
        (["--model", "deit_tinny_patch16_224"], "did you mean deit_tiny_patch16_224"),
        (["--model", NAME, "."], ". holds no image files"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sparsifiner", "explore", "--no-browser", *arguments])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_the_command_says_where_the_page_is(cache, quick, monkeypatch, capsys):
    served = []

    def serve(app, listener, browser):
        served.append((*listener.getsockname(), browser))
        listener.close()

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["sparsifiner", "explore", "--no-browser"])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert not caught.value.code
    ((host, port, browser),) = served
    assert host == "127.0.0.1"
    assert not browser
    assert f"open http://127.0.0.1:{port}/" in capsys.readouterr().out


def test_a_port_in_use_is_said_to_be():
    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SparsifinerError, match=f"port {port}: .*give another --port"):
            server.listen("127.0.0.1", port)
        with server.listen("127.0.0.1", None) as other:
            assert other.getsockname()[1] in server.PORTS


def test_answers_do_not_wait_for_nagles_algorithm():
    """It cost every answer 40 ms."""
    delays = []

    async def serve():
        def meet(reader, writer):
            delays.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with server.listen("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(meet, sock=listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                assert await reader.read() == b""
                writer.close()

    asyncio.run(serve())
    assert delays == [1]


def test_what_is_kept_can_be_read_like_any_file(cache, quick):
    open_subject([])
    (file,) = cache.iterdir()
    assert stat.S_ISREG(file.stat().st_mode)
    assert sp.config_of(sp.load(file)).keep == scenes.KEEP
