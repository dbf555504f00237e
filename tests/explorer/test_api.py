"""The server: right answers, also to many at once, and clear ones to whatever else comes in."""

import concurrent.futures
import copy
import dataclasses
import http.client
import json
import random
import struct
import tempfile
import zlib
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import sparsifiner as sp
from sparsifiner.config import parse_tiles
from sparsifiner.convert import sparse_layers
from sparsifiner.explorer import pictures, sessions
from sparsifiner.explorer.app import create_app
from sparsifiner.explorer.engine import Engine, attention_row
from sparsifiner.explorer.guard import Guard, guard_settings
from sparsifiner.explorer.refusal import Refusal
from sparsifiner.explorer.sessions import Sessions
from sparsifiner.inspect.statistics import measure

from ..toys import make_vit
from .conftest import CONFIG, DEPTH, GRID, HEADS, TOKENS, file_of, noise

IMAGE = "image-1.png"
KEEPS = (0.05, 0.2, 0.5, 0.9)


@pytest.fixture
def client(app):
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def explorer(app):
    return app.state.explorer


@pytest.fixture
def twin(subject):
    """The same model to ask in the library's own ways; nobody else has it."""
    student = copy.deepcopy(subject.student)
    sp.reconfigure(student, **vars(CONFIG))
    return student


def get(client, path, code=200, **parameters):
    answer = client.get(f"/api/{path}", params=parameters)
    assert answer.status_code == code, answer.text
    return answer.json()


def flat(found):
    """Values over prefix and patches, without those of dropped ones."""
    return torch.tensor(found["prefix"] + [value for value in found["patches"] if value is not None])


# What the page shows is what the library says.


def test_about(client):
    about = get(client, "about")
    assert about["model"]["grid"] == [GRID, GRID]
    assert about["model"]["tokens"] == TOKENS
    assert about["model"]["layers"] == [{"heads": HEADS, "landmarks": 6}] * DEPTH
    assert about["model"]["prefix"] == ["class token"]
    assert about["model"]["token_blocks"] == [1, 2, 3]
    assert about["settings"]["keep"] == 0.3
    assert [image["id"] for image in about["images"]] == ["image-0.png", "image-1.png", "image-2.png"]
    assert about["notes"] == ["Calibrated on noise."]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"keep": 0.1},
        {"keep": 1},
        {"tau": 0, "basis_threshold": 0},
        {"tau": 0.3},
        {"residual": False},
        {"tile": "2x2", "keep": 0.2},
        {"token_keep": 0.6},
        {"token_keep": 0.5, "tile": "2x3", "residual": False, "keep": 0.2},
        {"tile": "2x2,none,none,3x2", "keep": 0.2},
    ],
)
def test_maps_are_those_of_capture(client, twin, explorer, settings):
    changes = dict(settings)
    if "tile" in changes:
        changes["tile"] = parse_tiles(changes["tile"])
    if "token_keep" in changes:
        changes["tokens"] = sp.TokenConfig(changes.pop("token_keep"))
    sp.reconfigure(twin, **changes)
    with sp.capture(twin) as seen, torch.inference_mode():
        logits = twin(explorer.picture(IMAGE).tensor)[0]
    for layer, head, query in ((0, 0, 1), (1, 2, 13), (3, 1, 25), (3, 2, 0)):
        found = seen[layer]
        position = query
        if found.cells is not None and query >= 1:
            where = (found.cells[0] == query - 1).nonzero()
            if not len(where):
                get(client, "view", 409, image=IMAGE, layer=layer, head=head, query=query, **settings)
                continue
            position = found.num_prefix + int(where)
        view = get(client, "view", image=IMAGE, layer=layer, head=head, query=query, **settings)
        assert flat(view["maps"]["mask"]).bool().tolist() == found.mask[0, head, position].tolist()
        for name, expected in (("full", found.full_map), ("sparse", found.sparse_map), ("estimate", found.estimate)):
            if view["maps"][name] is None:
                assert expected is None or query == 0
                continue
            torch.testing.assert_close(flat(view["maps"][name]), expected[0, head, position], rtol=1e-3, atol=1e-6)
        kept = found.full_map[0, head, position][found.mask[0, head, position]].sum().item()
        assert view["recall"] == pytest.approx(kept, abs=1e-5)
        assert view["kept"] == int(found.mask[0, head, position].sum())
        assert view["dense"] == (found.connectivity is None)
    run = get(client, "run", image=IMAGE, **settings)
    likely = logits.softmax(0)
    for entry in run["predictions"]["top"]:
        assert entry["sparse"] == pytest.approx(likely[entry["class"]].item(), abs=1e-5)


def test_costs_recall_and_layers_are_those_of_the_library(client, twin, explorer):
    tensor = explorer.picture(IMAGE).tensor
    sp.reconfigure(twin, keep=0.2, tokens=sp.TokenConfig(0.7))
    counted = sp.count_flops(twin, tensor, convention="measured")
    statistics = measure(twin, tensor)
    run = get(client, "run", image=IMAGE, keep=0.2, token_keep=0.7)
    assert run["costs"]["attention"] == pytest.approx(counted.mhsa)
    assert run["costs"]["total"] == pytest.approx(counted.total)
    assert run["costs"]["dense_total"] == pytest.approx(counted.dense_total)
    assert run["connections"]["kept"] == sum(layer.connections for layer in statistics)
    assert run["connections"]["all"] == DEPTH * HEADS * 25 * 26
    assert [layer["tokens"] for layer in run["layers"]] == [layer.tokens for layer in statistics] == [26, 26, 19, 14]
    assert run["recall"] == pytest.approx(sum(layer.recall for layer in statistics) / DEPTH)
    with sp.dense_mode(twin), torch.inference_mode():
        dense = twin(tensor)[0].softmax(0)
    for entry in run["predictions"]["top"]:
        assert entry["dense"] == pytest.approx(dense[entry["class"]].item(), abs=1e-5)
    assert run["predictions"]["dense"] == int(dense.argmax())


def test_the_recall_of_queries_averages_to_that_of_the_head(client):
    run = get(client, "run", image=IMAGE, keep=0.2)
    queries = [get(client, "view", image=IMAGE, keep=0.2, layer=2, head=1, query=query) for query in range(1, 26)]
    mean = sum(view["recall"] for view in queries) / 25
    assert mean == pytest.approx(run["layers"][2]["heads"][1], abs=1e-4)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tokens", [None, sp.TokenConfig(0.6)])
def test_what_is_used_is_what_the_output_is_made_of(explorer, twin, residual, tokens):
    """The rows of the map the page calls sparse, times the values, are the output of the layer."""
    sp.reconfigure(twin, residual=residual, tokens=tokens, keep=0.2)
    engine = Engine(twin)
    layer = sparse_layers(twin)[-1]
    values, outputs = [], []
    attend = layer.attend
    layer.attend = lambda q, k, v: values.append(v) or outputs.append(attend(q, k, v)) or outputs[-1]
    picture = copy.copy(explorer.picture(IMAGE))
    run = engine.run(picture, sp.config_of(twin))
    engine.close()
    for head in range(HEADS):
        for position in range(run.layers[-1].q.shape[1]):
            row = attention_row(run.layers[-1], head, position, residual)
            expected = outputs[-1][0, head, position]
            torch.testing.assert_close(row.used @ values[-1][0, head], expected, rtol=1e-4, atol=1e-5)


def test_a_budget_that_covers_everything_is_dense(client):
    run = get(client, "run", image=IMAGE, keep=1)
    assert all(layer["dense"] and layer["recall"] == 1 for layer in run["layers"])
    assert run["costs"]["attention"] == run["costs"]["dense_attention"]
    assert run["connections"]["kept"] == run["connections"]["all"]
    view = get(client, "view", image=IMAGE, keep=1, layer=0, head=0, query=5)
    assert view["dense"]
    assert view["kept"] == TOKENS
    assert view["maps"]["estimate"] is None
    assert view["maps"]["sparse"] == view["maps"]["full"]


def test_dropped_patches_are_none_and_cannot_be_asked_about(client):
    settings = {"image": IMAGE, "token_keep": 0.5}
    run = get(client, "run", **settings)
    cells = run["layers"][3]["cells"]
    assert run["layers"][0]["cells"] is None
    assert len(cells) == 7  # 25, 13, 7
    gone = next(cell for cell in range(25) if cell not in cells)
    view = get(client, "view", layer=3, head=0, query=1 + cells[0], **settings)
    assert [cell for cell, value in enumerate(view["maps"]["full"]["patches"]) if value is not None] == cells
    error = get(client, "view", 409, layer=3, head=0, query=1 + gone, **settings)["error"]
    assert "was dropped before this layer" in error
    get(client, "view", layer=0, head=0, query=1 + gone, **settings)


def test_a_tile_shares_its_list(client):
    views = [
        get(client, "view", image=IMAGE, tile="2x2", keep=0.2, layer=1, head=0, query=1 + cell) for cell in (0, 1, 5, 6)
    ]
    own = {0, 1, 5, 6}  # each attends to itself beside the list
    lists = [
        {cell for cell, kept in enumerate(view["maps"]["mask"]["patches"]) if kept and cell not in own}
        for view in views
    ]
    assert all(other == lists[0] for other in lists)
    assert lists[0]


def test_basis_maps_are_the_rows_of_w_up(client, twin):
    found = torch.tensor(get(client, "basis", layer=2, head=1)["rows"])
    torch.testing.assert_close(found, sparse_layers(twin)[2].predictor.w_up[1, :, 1:].detach(), rtol=1e-3, atol=1e-6)


def test_settings_of_one_request_are_not_those_of_the_next(client):
    before = get(client, "view", image=IMAGE, layer=1, head=0, query=7)
    get(client, "run", image=IMAGE, keep=0.05, residual=False, tile="2x2", token_keep=0.4, tau=0.3)
    assert get(client, "view", image="image-2.png", layer=1, head=0, query=7) != before
    assert get(client, "view", image=IMAGE, layer=1, head=0, query=7) == before
    assert get(client, "run", image=IMAGE)["settings"]["keep"] == 0.3


def test_images(client):
    shown = client.get(f"/api/images/{IMAGE}")
    assert shown.headers["content-type"] == "image/jpeg"
    assert len(client.get(f"/api/images/{IMAGE}", params={"small": True}).content) < len(shown.content)


# Many at once.


def requests_of_many(count):
    chosen = random.Random(0)
    for _ in range(count):
        settings = {"image": f"image-{chosen.randrange(3)}.png", "keep": chosen.choice(KEEPS)}
        settings |= chosen.choice([{}, {"residual": False}, {"tile": "2x2"}, {"token_keep": 0.6}])
        if chosen.random() < 0.4:
            yield "/api/run?" + urlencode(settings)
        else:
            place = {"layer": chosen.randrange(DEPTH), "head": chosen.randrange(HEADS), "query": chosen.randrange(26)}
            yield "/api/view?" + urlencode(settings | place)


def test_32_clients_at_once_get_the_answers_one_would_get(address, app):
    paths = list(requests_of_many(32 * 12))
    host = urlsplit(address).netloc

    def ask(mine):
        connection = http.client.HTTPConnection(host, timeout=120)
        answers = []
        for path in mine:
            connection.request("GET", path)
            response = connection.getresponse()
            answers.append((response.status, json.loads(response.read())))
        connection.close()
        return answers

    alone = ask(paths)
    with app.state.explorer.engine._lock:  # so that all is computed again
        app.state.explorer.engine._passes.clear()
        app.state.explorer.engine._held = 0
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        shares = list(pool.map(ask, [paths[number::32] for number in range(32)]))
    assert {status for status, _ in alone} <= {200, 409}
    for number in range(32):
        assert shares[number] == alone[number::32]


def test_what_is_remembered_is_bounded(subject, explorer):
    engine = Engine(copy.deepcopy(subject.student), memory=1)
    picture = copy.copy(explorer.picture(IMAGE))
    for keep in KEEPS:
        engine.run(picture, engine.config.replace(keep=keep))
    assert len(engine._passes) == 1
    assert engine._held == next(iter(engine._passes.values())).size
    engine.forget(picture)
    assert engine._held == 0
    engine.run(picture, engine.config)  # a pass that was under way when its image went
    assert not engine._passes
    engine.close()


# What does not make sense is said to.


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("view?image=nothing&layer=0&head=0&query=0", 404, "there is no image 'nothing'"),
        (f"view?image={IMAGE}&layer=4&head=0&query=0", 404, "layer 4 does not exist: the model has layers 0 to 3"),
        (f"view?image={IMAGE}&layer=-1&head=0&query=0", 404, "layer -1 does not exist"),
        (f"view?image={IMAGE}&layer=0&head=3&query=0", 404, "heads 0 to 2"),
        (f"view?image={IMAGE}&layer=0&head=0&query=26", 404, "queries 0 to 25"),
        (f"view?image={IMAGE}&layer=0&head=0&query=1e3", 422, "query: "),
        (f"view?image={IMAGE}&layer=zero&head=0&query=0", 422, "layer: "),
        (f"view?image={IMAGE}&layer=0&head=0", 422, "query: Field required"),
        (f"view?image={IMAGE}&layer=99999999999999999999999&head=0&query=0", 404, "does not exist"),
        ("run", 422, "image: Field required"),
        (f"run?image={'x' * 300}", 422, "image: "),
        (f"run?image={IMAGE}&keep=0", 422, "keep must be a share of the tokens in (0, 1]"),
        (f"run?image={IMAGE}&keep=-1", 422, "keep must be"),
        (f"run?image={IMAGE}&keep=1.01", 422, "keep must be"),
        (f"run?image={IMAGE}&keep=nan", 422, "keep must be"),
        (f"run?image={IMAGE}&keep=inf", 422, "keep must be"),
        (f"run?image={IMAGE}&keep=", 422, "keep: "),
        (f"run?image={IMAGE}&keep=half", 422, "keep: "),
        (f"run?image={IMAGE}&tau=nan", 422, "tau must be"),
        (f"run?image={IMAGE}&tau=1", 422, "tau must be"),
        (f"run?image={IMAGE}&basis_threshold=-0.1", 422, "basis_threshold must be"),
        (f"run?image={IMAGE}&basis_threshold=inf", 422, "basis_threshold must be"),
        (f"run?image={IMAGE}&residual=perhaps", 422, "residual: "),
        (f"run?image={IMAGE}&tile=2by2", 422, "tile must be 'none' or ROWSxCOLUMNS"),
        (f"run?image={IMAGE}&tile=0x2", 422, "tile must be"),
        (f"run?image={IMAGE}&tile=6x1", 422, "larger than the grid"),
        (f"run?image={IMAGE}&tile=2x2,none", 422, "tile lists 2 tiles but the model has 4"),
        (f"run?image={IMAGE}&tile=99999999999x1", 422, "tile must be"),
        (f"run?image={IMAGE}&token_keep=0", 422, "the tokens' keep must be"),
        (f"run?image={IMAGE}&token_keep=nan", 422, "the tokens' keep must be"),
        (f"run?image={IMAGE}&sharpness=3", 422, "sharpness: "),
        ("basis?layer=0&head=9", 404, "heads 0 to 2"),
        ("images/nothing", 404, "there is no image"),
        ("images/..%2f..%2fetc%2fpasswd", 404, ""),
        ("nothing", 404, "Not Found: GET /api/nothing"),
    ],
)
def test_senseless_requests(client, path, code, words):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == code, answer.text
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]


def test_wrong_methods_and_files_that_are_not_the_pages(client):
    assert client.post("/api/about").status_code == 405
    assert client.delete(f"/api/images/{IMAGE}").status_code == 405
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/docs", "/openapi.json"):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert "error" in answer.json()


def test_an_error_of_ours_is_an_answer_and_the_server_goes_on(client, explorer, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(explorer.engine, "run", fail)
    assert "the server failed" in get(client, "run", 500, image=IMAGE)["error"]
    monkeypatch.undo()
    get(client, "run", image=IMAGE)


def test_unreadable_files_of_the_user_are_said_to_be(tmp_path, subject):
    from sparsifiner.explorer.samples import Gallery, file_samples

    (tmp_path / "broken.png").write_bytes(b"broken")
    (tmp_path / "gone.png").write_bytes(file_of(noise(0)))
    samples, _ = file_samples([str(tmp_path)], subject.lens)
    (tmp_path / "gone.png").unlink()
    gallery = Gallery(samples)
    with pytest.raises(Refusal, match="no image the page can read"):
        gallery.find("broken.png")
    with pytest.raises(Refusal, match="gone.png cannot be read any more"):
        gallery.find("gone.png")


# Images from outside.


def send(client, content, code=201, session=None, name="mine.png", **options):
    if session is None:
        session = client.post("/api/sessions").json()["session"]
    answer = client.post(f"/api/sessions/{session}/images", params={"name": name}, content=content, **options)
    assert answer.status_code == code, answer.text
    return answer.json()


def shown(client, key):
    import io

    with Image.open(io.BytesIO(client.get(f"/api/images/{key}").content)) as image:
        return image.convert("RGB")


def corner(client, key, x=0.05, y=0.05):
    image = shown(client, key)
    return image.getpixel((int(x * image.width), int(y * image.height)))


def near(colour, expected):
    return all(abs(a - b) < 25 for a, b in zip(colour, expected, strict=True))


def flat_image(mode, colour, size=(40, 40)):
    return Image.new(mode, size, colour)


def test_an_image_is_shown_and_explored(client):
    sent = send(client, file_of(noise(9)), name="C:\\photos\\dog\x00 <b>.png")
    assert sent["name"] == "dog <b>.png"
    get(client, "run", image=sent["id"])
    view = get(client, "view", image=sent["id"], layer=0, head=0, query=3)
    assert view["maps"]["full"]["patches"]


def test_kinds_of_images(client):
    red = (250, 10, 10)
    kinds = {
        "jpeg": file_of(flat_image("RGB", red), "JPEG"),
        "cmyk": file_of(flat_image("RGB", red).convert("CMYK"), "JPEG"),
        "webp": file_of(flat_image("RGB", red), "WEBP"),
        "bmp": file_of(flat_image("RGB", red), "BMP"),
        "palette": file_of(flat_image("RGB", red).convert("P"), "PNG"),
        "alpha": file_of(flat_image("RGBA", (*red, 255)), "PNG"),
    }
    for kind, content in kinds.items():
        assert near(corner(client, send(client, content)["id"]), red), kind
    grey = file_of(Image.fromarray((torch.full((40, 40), 32768).int().numpy()).astype("uint16")), "PNG")
    assert near(corner(client, send(client, grey)["id"]), (128, 128, 128))
    single = file_of(flat_image("1", 1), "PNG")
    assert near(corner(client, send(client, single)["id"]), (255, 255, 255))
    assert send(client, file_of(flat_image("L", 7, (1, 1)), "PNG"))["id"]


def test_what_is_transparent_is_white(client):
    clear = flat_image("RGBA", (255, 0, 0, 0))
    assert near(corner(client, send(client, file_of(clear))["id"]), (255, 255, 255))
    palette = flat_image("P", 0)
    palette.putpalette([255, 0, 0] * 256)
    assert near(corner(client, send(client, file_of(palette, transparency=0))["id"]), (255, 255, 255))


def test_an_animation_is_its_first_frame(client):
    frames = [flat_image("RGB", (250, 10, 10)), flat_image("RGB", (10, 10, 250))]
    for kind in ("GIF", "WEBP"):
        sent = send(client, file_of(frames[0], kind, save_all=True, append_images=frames[1:]))
        assert near(corner(client, sent["id"]), (250, 10, 10))
        assert "only the first frame" in sent["notes"][0]


def test_photos_stand_upright(client):
    image = flat_image("RGB", (250, 250, 250), (80, 80))
    image.paste((10, 10, 10), (0, 0, 80, 40))  # dark above
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter to the right to be upright: dark on the right
    sent = send(client, file_of(image, "JPEG", exif=exif.tobytes(), quality=95))
    assert near(corner(client, sent["id"], 0.95, 0.5), (10, 10, 10))
    assert near(corner(client, sent["id"], 0.05, 0.5), (250, 250, 250))
    assert send(client, file_of(image, "JPEG", exif=b"Exif\x00\x00nonsense"))["id"]


def test_a_thin_image_does_not_grow_without_bound(client):
    sent = send(client, file_of(flat_image("RGB", (250, 10, 10), (1, 30_000))))
    assert "only the middle" in sent["notes"][0]
    assert max(shown(client, sent["id"]).size) < 1000


def png_of_size(width, height):
    """A PNG whose header promises more than its data holds."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


NO_GOOD = {
    "empty": (b"", 422, "empty"),
    "text": (b"not an image", 415, "no image the page can read"),
    "svg": (SVG, 415, "no image"),
    "pdf": (b"%PDF-1.7 ...", 415, "no image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", 415, "no image"),
    "zeros": (b"\x00" * 4096, 415, "no image"),
    "png cut short": (file_of(noise(1))[:-200], 422, "damaged or cut short"),
    "png cut after its header": (file_of(noise(1))[:40], 415, "its beginning is damaged"),
    "png without data": (file_of(noise(1)).replace(b"IDAT", b"IDAX"), 415, "its beginning is damaged"),
    "png of too little data": (png_of_size(100, 100), 422, "damaged or cut short"),
    "jpeg cut short": (file_of(noise(1), "JPEG")[:-400], 422, "damaged or cut short"),
    "bomb": (png_of_size(20_000, 20_000), 413, "pixels"),
    "too many pixels": (png_of_size(9_000, 9_000), 413, "9000 x 9000 pixels, more than 36 million"),
    "impossibly many": (png_of_size(2_000_000_000, 2_000_000_000), 413, "pixels"),
    "too large": (b"x" * (pictures.MAX_BYTES + 1), 413, "larger than 12 MiB"),
}


@pytest.mark.parametrize(("content", "code", "words"), NO_GOOD.values(), ids=NO_GOOD)
def test_what_is_no_good_image(client, content, code, words):
    assert words in send(client, content, code)["error"]
    get(client, "run", image=IMAGE)


def test_a_body_without_a_length_is_cut_off_too(client):
    def parts():
        for _ in range(pictures.MAX_BYTES // 2**20 + 2):
            yield b"x" * 2**20

    assert "larger than" in send(client, parts(), 413)["error"]


def test_an_image_is_never_written_to_disk(client, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a file was opened")

    for name in ("SpooledTemporaryFile", "NamedTemporaryFile", "TemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    send(client, file_of(noise(3, (1500, 1500))))  # larger than what forms are kept in memory


# Images go when their page does.


def test_a_closed_page_leaves_nothing(client, explorer):
    session = client.post("/api/sessions").json()["session"]
    sent = send(client, file_of(noise(4)), session=session)
    get(client, "run", image=sent["id"], keep=0.5)
    assert any(key[0] == sent["id"] for key in explorer.engine._passes)
    assert client.post(f"/api/sessions/{session}/alive").status_code == 204
    assert client.post(f"/api/sessions/{session}/close").status_code == 204
    assert client.post(f"/api/sessions/{session}/close").status_code == 204
    assert not any(key[0] == sent["id"] for key in explorer.engine._passes)
    get(client, "run", 404, image=sent["id"])
    assert client.get(f"/api/images/{sent['id']}").status_code == 404
    assert client.post(f"/api/sessions/{session}/alive").status_code == 404
    assert "gone" in send(client, file_of(noise(4)), 404, session=session)["error"]


def test_a_page_that_goes_silent_is_closed(subject):
    now, gone = [0.0], []
    held = Sessions(gone.append, clock=lambda: now[0])
    name, other = held.open(), held.open()
    picture = subject.lens.picture(noise(0), "own-1", "mine")
    held.add(name, picture)
    now[0] = sessions.EXPIRY - 1
    held.heard(other)
    now[0] = sessions.EXPIRY + 1
    assert held.find("own-1") is None
    assert gone == [picture]
    held.heard(other)
    with pytest.raises(Refusal, match="gone"):
        held.heard(name)


def test_pages_and_their_images_are_bounded(subject):
    gone = []
    held = Sessions(gone.append)
    made = [subject.lens.picture(noise(0), f"own-{number}", "mine") for number in range(sessions.MAX_IMAGES + 1)]
    name = held.open()
    for picture in made:
        held.add(name, picture)
    assert gone == made[:1]
    assert held.counts() == (1, sessions.MAX_IMAGES)
    names = [held.open() for _ in range(sessions.MAX_SESSIONS - 1)]
    with pytest.raises(Refusal, match="close one") as caught:
        held.open()
    assert caught.value.status == 503
    with pytest.raises(Refusal, match="images in all"):
        for other in names:
            for _ in range(sessions.MAX_IMAGES):
                held.add(other, made[1])
    assert held.counts()[1] == sessions.MAX_IMAGES_IN_ALL


# Who may ask.


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "127.0.0.1:8765"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST.:8765"}, 200),
        ({"host": "[::1]:8765"}, 200),
        ({"host": "127.0.0.2"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "192.168.1.9:8765"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[broken"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-length": "-1"}, 400),
        ({"content-length": str(1 << 40)}, 413),
    ],
)
def test_only_our_own_page_may_ask(client, headers, code):
    answer = client.get("/api/about", headers=headers)
    assert answer.status_code == code
    assert code == 200 or list(answer.json()) == ["error"]


def test_posts_from_elsewhere_do_nothing(client, explorer):
    before = explorer.sessions.counts()
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/sessions", headers=headers).status_code == 403
    assert explorer.sessions.counts() == before
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link may lead here


def test_names_follow_the_address_that_is_listened_on():
    def may(host, name):
        return Guard(None, **guard_settings(host))._is_ours(name)

    assert may("127.0.0.1", "localhost:1")
    assert not may("127.0.0.1", "10.0.0.5:1")
    assert may("0.0.0.0", "10.0.0.5:1")
    assert may("0.0.0.0", "[fe80::1]:1")
    assert not may("0.0.0.0", "evil.example")
    assert may("explore.lan", "explore.lan:80")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/about", "/api/nothing", f"/api/images/{IMAGE}"])
def test_browsers_are_told_to_be_strict(client, path):
    answer = client.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] in ("no-store", "no-cache")


def test_the_page_names_nothing_outside_itself(client):
    from sparsifiner.explorer.app import STATIC

    for file in STATIC.iterdir():
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not [word for word in ("http:", "https:", "@import", "url(") if word in text], file.name
    page = client.get("/").text
    assert "style=" not in page
    assert "onclick" not in page
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")


def test_a_model_that_opens_cells(subject):
    student = sp.sparsify(make_vit(depth=2), sp.SparseConfig(0.3, pattern="cells"))
    app = create_app(dataclasses.replace(subject, student=student))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        model = get(client, "about")["model"]
        assert (model["pattern"], model["layers"][0]) == ("cells", {"heads": 3, "landmarks": 0})
        assert get(client, "basis", layer=0, head=2)["rows"] == []
        view = get(client, "view", image=IMAGE, layer=1, head=0, query=7)
        assert view["cells"] == [3 * (patch // 10) + patch % 5 // 2 for patch in range(25)]
        assert view["coefficients"] is None
        kept, given = view["maps"]["mask"]["patches"], view["maps"]["estimate"]["patches"]
        assert [value > 0 for value in given] == [not key for key in kept]
        assert get(client, "view", image=IMAGE, layer=1, head=0, query=0)["cells"] is None
        dropped = get(client, "view", image=IMAGE, layer=1, head=0, query=0, token_keep=0.5)
        assert sum(value is not None for value in dropped["maps"]["full"]["patches"]) < 25
        refused = client.get("/api/run", params={"image": IMAGE, "keep": 0.05})
        assert "keys is less than one cell of 2 x 2 patches" in refused.json()["error"]
    app.state.explorer.engine.close()
