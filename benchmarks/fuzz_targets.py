"""What `fuzz.py` hands spoilt files to: the ways by which strangers' files come in."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

import torch
from PIL import Image
from safetensors.torch import save as to_safetensors
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms.functional import to_pil_image

import fuzz_mutations as mutations
import sparsifiner as sp
from sparsifiner import checkpoint
from sparsifiner.cli.main import app as command_line
from sparsifiner.convert import host_of, note_tuning
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.distillation import state
from sparsifiner.distillation.data import from_files, mixing
from sparsifiner.distillation.recipe import Recipe, config_for
from sparsifiner.distillation.teacher import CachedTeacher
from sparsifiner.errors import SparsifinerError
from sparsifiner.inspect.journal import Journal
from sparsifiner.inspect.tuning import LayerTiming, TuningReport
from sparsifiner.models import create_host, read_weights

NAME, SIZE, CLASSES = "vit_fuzz_sparsifiner", 16, 4


@register_model
def vit_fuzz_sparsifiner(pretrained: bool = False, **arguments: Any) -> VisionTransformer:
    """A ViT of 17 tokens, two layers and two heads that is made and run in milliseconds."""
    known = {"cache_dir", "pretrained_cfg", "pretrained_cfg_overlay"}
    settings: dict[str, Any] = {"img_size": SIZE, "patch_size": 4, "num_classes": CLASSES, "embed_dim": 16, "depth": 2}
    settings |= {"num_heads": 2} | {key: value for key, value in arguments.items() if key not in known}
    model = VisionTransformer(**settings)
    vars(model)["pretrained_cfg"] = {"architecture": NAME, "input_size": (3, SIZE, SIZE)}
    return model


class Surprise(Exception):
    """Something that is neither an answer nor a refusal."""


@dataclasses.dataclass
class Case:
    """What is handed in: a file's content, and how it is handed in."""

    content: bytes
    choice: int


class Target:
    """One kind of file.

    Args:
        folder: where its files are put.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = folder / "sprung"  # what hostile code would make

    def good(self) -> list[Case]:
        """Files as they should be: run once before the rest, so that nothing of the first time is measured."""
        raise NotImplementedError

    def make(self, draw: Random) -> Case:
        """A spoilt file."""
        raise NotImplementedError

    def run(self, case: Case) -> None:
        """Hands it in; ends well, or in an error."""
        raise NotImplementedError

    def put(self, content: bytes, name: str) -> Path:
        """The content as a file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


def host() -> VisionTransformer:
    """The dense model of most targets."""
    torch.manual_seed(0)
    return vit_fuzz_sparsifiner().eval()


def _saved(student: torch.nn.Module, folder: Path, **options: Any) -> bytes:
    path = folder / "saved.safetensors"
    checkpoint.save(student, path, **options)
    return path.read_bytes()


def _huggingface() -> torch.nn.Module | None:
    try:
        from transformers import Dinov2Config, Dinov2ForImageClassification
    except ImportError:
        return None
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4)
    model = Dinov2ForImageClassification(config).eval()
    vars(model)["pretrained_cfg"] = {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9}
    return model


CELLS = sp.SparseConfig(0.5, pattern="cells", cells=((2, 2), (4, 4)), breadth=1.5, tile=(2, 2))


def _tuned(model: Any) -> Any:
    """With a tile of its own in each layer, and what was measured when they were chosen."""
    student = sp.sparsify(model, CELLS.replace(tile=[(2, 2), None]))
    times = {"dense": 1.0, "per query": 0.5, "tile 2x2": 0.4}
    note_tuning(student, TuningReport((LayerTiming(times), LayerTiming()), 1, 17, 1).to_dict())
    return student


class Checkpoints(Target):
    """Converted models: by name, with tokens dropped, predictors alone, with cells and none, of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = host()
        config = sp.SparseConfig(0.3, n_down=4)
        pruned = sp.SparseConfig([0.3, 1.0], n_down=4, tile=(2, 2), tokens=sp.TokenConfig(0.5, "dynamicvit", [1]))
        self.files = [
            _saved(sp.sparsify(self.host, config), folder),
            _saved(sp.sparsify(self.host, pruned), folder),
            _saved(sp.sparsify(self.host, config), folder, host_weights=False),
            _saved(sp.sparsify(self.host, CELLS), folder),
            _saved(_tuned(self.host), folder),
        ]
        if (other := _huggingface()) is not None:
            self.files.append(_saved(sp.sparsify(other, config), folder))

    def good(self) -> list[Case]:
        return [Case(content, number) for number, content in enumerate(self.files)]

    def make(self, draw: Random) -> Case:
        # Hugging Face's models take longer to make: fewer of them.
        number = draw.choice([0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5][: 2 * len(self.files)])
        return Case(mutations.spoil_safetensors(self.files[number], draw, self.files, "sparsifiner"), number)

    def run(self, case: Case) -> None:
        path = self.put(case.content, "case.safetensors")

        def load() -> None:
            student = checkpoint.load(path, model=self.host if case.choice == 2 else None)
            with torch.inference_mode():
                student(torch.zeros(1, 3, *host_of(student).image_size(student)))

        _each(
            load,
            lambda: checkpoint.describe(path),
            lambda: _command_line("info", str(path)),
            lambda: _command_line("info", str(path), "--json"),
        )


def _each(*steps: Callable[[], Any]) -> None:
    """All of them, whatever the first says; one refusal is a refusal."""
    refusal = None
    for step in steps:
        try:
            step()
        except SparsifinerError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def _command_line(*arguments: str) -> None:
    """A verb of the command line, in this process; what it prints goes nowhere."""
    strict = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as a terminal's
    with contextlib.redirect_stdout(strict):
        command_line(list(arguments), standalone_mode=False)


class Weights(Target):
    """Weights of a host: safetensors, torch's archives, and pickles, some of which would run code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tensors = host().state_dict()
        contents = []
        for form in ({}, {"_use_new_zipfile_serialization": False}):
            made = io.BytesIO()
            torch.save({"model": tensors}, made, **form)
            contents.append(made.getvalue())
        # Tensors that are more than the bytes behind them, or of a kind that no weight is.
        odd: dict[str, Any] = {
            "head.weight": torch.zeros(1).expand(10**9, 16),
            "pos_embed": torch.zeros(1, 17, 16).to_sparse(),
            "cls_token": torch.empty(1, 2**40, device="meta"),
            "norm.bias": torch.zeros(16, dtype=torch.complex64),
            "head.bias": torch.tensor(1.0),
            "patch_embed.proj.bias": torch.zeros(0),
            "fc_norm.weight": torch.zeros(2, 2, dtype=torch.bool),
        }
        for name, value in odd.items():
            made = io.BytesIO()
            torch.save({**tensors, name: value}, made)
            contents.append(made.getvalue())
        self.files = [to_safetensors(tensors), *contents, pickle.dumps({"model": {"a": [1]}})]

    def good(self) -> list[Case]:
        return [Case(content, number) for number, content in enumerate(self.files[:3])]

    def make(self, draw: Random) -> Case:
        number = draw.choice([0, 0, 0, 1, 1, 1, 2, 2, 2, *range(3, len(self.files))])
        if number == 0:
            return Case(mutations.spoil_safetensors(self.files[0], draw, self.files), draw.choice([0, 1]))
        if number > 2 and draw.random() < 0.5:
            return Case(self.files[number], 1)
        return Case(mutations.spoil_pth(self.files[number], draw, self.files, self.marker), draw.choice([1, 1, 1, 0]))

    def run(self, case: Case) -> None:
        path = self.put(case.content, "case.pth" if case.choice else "case.safetensors")
        _each(lambda: read_weights(str(path)), lambda: create_host(NAME, str(path)))


class Configs(Target):
    """Settings in JSON, and a model converted with those that can be."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = host()
        tokens = sp.TokenConfig(0.5, "evit", [1], fuse=True)
        made = [
            sp.SparseConfig(0.3, n_down=4, tile=(2, 2)),
            sp.SparseConfig([0.3, 0.5], n_down=4, tokens=tokens),
            sp.SparseConfig(0.3, n_down=4, tile=[(2, 2), None]),
            CELLS,
        ]
        self.documents = [json.loads(config.to_json()) for config in made]

    def good(self) -> list[Case]:
        return [Case(json.dumps(document).encode(), 0) for document in self.documents]

    def make(self, draw: Random) -> Case:
        return Case(mutations.spoil_json(draw.choice(self.documents), draw), 0)

    def run(self, case: Case) -> None:
        config = sp.SparseConfig.from_json(case.content.decode("utf-8", "surrogateescape"))
        with torch.inference_mode():
            sp.sparsify(self.host, config)(torch.zeros(1, 3, SIZE, SIZE))


class Recipes(Target):
    """Recipes of training in TOML and JSON, and what is made of them before the first step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.host = host()
        recipe = Recipe(
            n_down=4, tile="2x2", elastic="0.1:0.5", token_keep=0.5, clip=1.0, ema=0.9, tau=0.1, batch_size=8
        )
        self.settings = json.loads(recipe.to_json())
        for name in range(CLASSES):
            self.put(pictures()[0], f"set/{name}/a.png")

    def good(self) -> list[Case]:
        return [Case(mutations.to_toml(self.settings).encode(), 0), Case(json.dumps(self.settings).encode(), 1)]

    def make(self, draw: Random) -> Case:
        if draw.random() < 0.6:
            return Case(mutations.spoil_toml(self.settings, draw), 0)
        return Case(mutations.spoil_json(self.settings, draw), 1)

    def run(self, case: Case) -> None:
        if case.choice:
            recipe = Recipe.from_json(case.content.decode("utf-8", "surrogateescape"))
        else:
            recipe = Recipe.read(self.put(case.content, "case.toml"))
        Recipe.from_json(recipe.to_json())
        sp.sparsify(self.host, config_for(recipe, self.host))
        from_files(self.folder / "set", self.host, recipe)[0, 0, 0]
        mixing(recipe, CLASSES)


def pictures() -> list[bytes]:
    """Small images of every kind that is read."""
    noise = torch.rand(3, 20, 24, generator=torch.Generator().manual_seed(0))
    photo = to_pil_image(noise)
    grey, alpha = photo.convert("L"), photo.convert("RGBA")
    alpha.putalpha(grey)
    wanted: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (photo, "PNG", {}),
        (alpha, "PNG", {}),
        (photo.quantize(16), "PNG", {"transparency": 3}),
        (Image.new("I;16", (20, 20), 999), "PNG", {}),
        (photo.convert("1"), "PNG", {}),
        (photo, "JPEG", {"progressive": True}),
        (photo, "JPEG", {"exif": _exif(), "icc_profile": b"x" * 200}),
        (photo.convert("CMYK"), "JPEG", {}),
        (photo, "WEBP", {}),
        (alpha, "WEBP", {"lossless": True, "exif": _exif()}),
        (photo, "WEBP", {"save_all": True, "append_images": [photo.rotate(90)]}),
        (photo, "GIF", {"save_all": True, "append_images": [photo.rotate(90)]}),
        (photo, "BMP", {}),
        (photo.quantize(16), "BMP", {}),
        (photo, "TIFF", {}),
        (photo, "TIFF", {"compression": "tiff_lzw"}),
        (photo, "TIFF", {"compression": "tiff_adobe_deflate"}),
        (photo.convert("1"), "TIFF", {"compression": "group4"}),
        (photo, "TIFF", {"compression": "jpeg", "save_all": True, "append_images": [photo]}),
    ]
    return [_file(*one) for one in wanted]


def _exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x829A] = 6, "x" * 20, 0.5
    return exif


def _file(image: Image.Image, kind: str, options: dict[str, Any]) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


class Images(Target):
    """Image files in class folders, with a list of classes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files, self.transform = pictures(), preprocessing(host())

    def good(self) -> list[Case]:
        return [Case(content, 0) for content in self.files]

    def make(self, draw: Random) -> Case:
        if draw.random() < 0.05:  # the list of classes instead
            if draw.random() < 0.2:
                return Case(draw.choice([b"pipe", b"/dev/zero", b"/dev/stdin", b"loop", b"/nowhere", b"/"]), 8)
            return Case(draw.choice([b"", b"a", b"\xff\xfe", b"b\nb\n", b"a\0b", b"a " * 10**6, draw.randbytes(50)]), 7)
        return Case(mutations.spoil_image(draw.choice(self.files), draw, self.files), draw.randrange(4))

    def run(self, case: Case) -> None:
        root, options = self.folder / "set", {}
        shutil.rmtree(root, ignore_errors=True)
        if case.choice == 7:
            options["class_map"] = self.put(case.content, "classes.txt")
        name = ("a.png", "b.jpg", "c.webp", "d.tiff")[case.choice % 4]
        place = self.put(self.files[0] if options else case.content, f"set/a/{name}")
        if case.choice == 8:  # something that is no file in the place of one
            place.unlink()
            _special(place, case.content.decode())
        _read(str(root), self.transform, case.choice % 2 == 0, **options)


def _special(place: Path, what: str) -> None:
    if what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place if what == "loop" else what)


def _read(data: str, transform: Any, skip: bool, **options: Any) -> None:
    for images, _ in open_images(data, transform, num_classes=1 if options else None, skip_unreadable=skip, **options):
        if not bool(torch.isfinite(images).all()):
            raise Surprise("images that are not finite")


class Tars(Target):
    """Tars of class folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        files, self.transform = pictures(), preprocessing(host())
        self.members = [("a/1.png", files[0]), ("a/2.jpg", files[5]), ("b/3.webp", files[8])]

    def good(self) -> list[Case]:
        return [Case(mutations.to_tar(self.members), 0)]

    def make(self, draw: Random) -> Case:
        return Case(mutations.spoil_tar(self.members, draw), draw.randrange(4))

    def run(self, case: Case) -> None:
        path = self.put(case.content, "case.TAR" if case.choice == 3 else "case.tar")
        try:
            _read(str(path), self.transform, case.choice == 0)
        finally:
            path.unlink()


class Shards(Target):
    """WebDataset shards: tars of images beside their labels."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files, self.transform = pictures(), preprocessing(host())

    def _members(self, label: bytes) -> list[mutations.Member]:
        labelled = [("a.png", self.files[0]), ("a.json", label), ("b.jpg", self.files[5]), ("b.cls", b"1")]
        return [*labelled, ("c.webp", self.files[8]), ("c.cls", b"0")]

    def good(self) -> list[Case]:
        return [Case(mutations.to_tar(self._members(b'{"label": 1}')), 0)]

    def make(self, draw: Random) -> Case:
        if draw.random() < 0.25:
            label = mutations.spoil_json({"label": 1, "text": "a", "more": [1, {"a": 2}]}, draw)
            return Case(mutations.to_tar(self._members(label)), draw.randrange(4))
        return Case(mutations.spoil_tar(self._members(b'{"label": 1}'), draw), draw.randrange(4))

    def run(self, case: Case) -> None:
        path = self.put(case.content, "shard-000.tar")
        data = f"wds/{path}" if case.choice else f"wds/{self.folder}/shard-{{000..000}}.tar"
        _read(data, self.transform, case.choice % 2 == 0)


class Runs(Target):
    """What an interrupted run left: its state, its tensors, its teacher's outputs, its findings."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.about = {"digest": "0" * 64, "images": 2, "mirrored": False}
        self.tensors = {"logits": torch.zeros(4, CLASSES), "tokens": torch.zeros(4, 17, 16)}
        self.state = dataclasses.asdict(state.RunState(2, 10, json.loads(Recipe().to_json()), 1, 64, 0.5))
        self.lines = b'{"about": "0", "key": "a", "found": {"a": 1}}\n' * 3

    def good(self) -> list[Case]:
        files = to_safetensors(self.tensors, {"teacher": json.dumps(self.about)})
        return [Case(json.dumps(self.state).encode(), 0), Case(files, 1), Case(files, 2), Case(self.lines, 3)]

    def make(self, draw: Random) -> Case:
        choice = draw.randrange(4)
        if choice == 0:
            return Case(mutations.spoil_json(self.state, draw), 0)
        if choice == 3:
            line = {"about": "0", "key": "a", "found": {"a": 1}}
            content = b"\n".join(mutations.spoil_json(line, draw) for _ in range(3))
            return Case(content if draw.random() < 0.5 else mutations.spoil_bytes(self.lines, draw), 3)
        good = to_safetensors(self.tensors, {"teacher": json.dumps(self.about)})
        return Case(mutations.spoil_safetensors(good, draw, (), "teacher"), choice)

    def run(self, case: Case) -> None:
        path = self.put(
            case.content, f"run/{(state.STATE, state.OPTIMISER, 'teacher.safetensors', 'found.jsonl')[case.choice]}"
        )
        if case.choice == 0:
            state.read_state(path.parent)
        elif case.choice == 1:
            state.read_tensors(path)
        elif case.choice == 2:
            CachedTeacher(path, self.about)
        else:
            Journal(path, {}).get("a")


class Uploads(Target):
    """Images sent to the page, and requests for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from starlette.testclient import TestClient

        from sparsifiner.explorer.app import create_app
        from sparsifiner.explorer.pictures import lens_of
        from sparsifiner.explorer.samples import Gallery, file_samples
        from sparsifiner.explorer.subject import Subject

        self.files = pictures()
        student = sp.sparsify(host(), sp.SparseConfig(0.3, n_down=4))
        lens = lens_of(student)
        samples, _ = file_samples([str(self.put(self.files[0], "gallery.png"))], lens)
        app = create_app(Subject(student, "fuzz", lens, Gallery(samples), list("abcd"), []))
        self.client = TestClient(app, base_url="http://127.0.0.1")

    def good(self) -> list[Case]:
        return [Case(content, 0) for content in self.files[:14]] + [Case(b"image=gallery.png", 1)]

    def make(self, draw: Random) -> Case:
        if draw.random() < 0.7:
            return Case(mutations.spoil_image(draw.choice(self.files), draw, self.files), 0)
        asked: dict[str, Any] = {
            "image": "gallery.png",
            "keep": 0.3,
            "tau": 0.1,
            "basis_threshold": 0.02,
            "tile": "2x2",
        }
        asked |= {"residual": "true", "token_keep": 0.5, "layer": 0, "head": 1, "query": 3}
        spoilt = mutations.spoil_document(asked, draw)
        pairs = spoilt if isinstance(spoilt, dict) else {"image": spoilt}
        plain = [(key, value.text if isinstance(value, mutations.Raw) else value) for key, value in pairs.items()]
        return Case(urlencode(plain, errors="replace").encode()[:60_000], draw.choice([1, 2, 3]))

    def run(self, case: Case) -> None:
        if case.choice:
            path = ("run", "view", "basis")[case.choice - 1]
            self._judge(self.client.get(f"/api/{path}?{case.content.decode()}"))
            return
        session = self.client.post("/api/sessions").json()["session"]
        try:
            answer = self.client.post(f"/api/sessions/{session}/images", content=case.content)
            if answer.status_code == 201:
                key = answer.json()["id"]
                self._judge(self.client.get("/api/run", params={"image": key}))
                self._judge(self.client.get(f"/api/images/{key}"))
            self._judge(answer)
        finally:
            self.client.post(f"/api/sessions/{session}/close")

    def _judge(self, answer: Any) -> None:
        if answer.status_code >= 500 or (answer.status_code >= 400 and set(answer.json()) != {"error"}):
            raise Surprise(f"status {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 400:
            raise SparsifinerError(answer.json()["error"])


TARGETS: dict[str, Callable[[Path], Target]] = {
    "checkpoint": Checkpoints,
    "weights": Weights,
    "config": Configs,
    "recipe": Recipes,
    "image": Images,
    "tar": Tars,
    "shard": Shards,
    "run": Runs,
    "upload": Uploads,
}
