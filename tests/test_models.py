import argparse
import logging
import pickle
import warnings
import zipfile

import pytest
import timm
import torch
from safetensors.torch import save_file

from sparsifiner.errors import CheckpointError, ConfigError
from sparsifiner.models import create_host, read_weights

NAME = "vit_tiny_patch16_224"
SMALL = {"depth": 1, "img_size": 32}


@pytest.fixture
def state():
    return timm.create_model(NAME, **SMALL, num_classes=5).state_dict()


def test_unknown_names_get_near_ones():
    with pytest.raises(ConfigError, match=r"no model 'deit_tiny_patch16_225'.* did you mean deit_tiny_patch16_224"):
        create_host("deit_tiny_patch16_225")
    with pytest.raises(ConfigError, match="list_models"):
        create_host("zzzzzzzz")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "pth", "pth.tar under model", "pth.tar under state_dict"])
def test_weights_from_a_file(state, tmp_path, kind, parallel):
    suffix, _, wrapper = kind.partition(" under ")
    path = tmp_path / f"weights.{suffix}"
    saved = {f"module.{name}": value for name, value in state.items()} if parallel else state
    if suffix == "safetensors":
        save_file(saved, path)
    elif wrapper:  # as training scripts write it
        rest = {"epoch": 3, "arch": "lvvit_s", "args": argparse.Namespace(lr=0.1), "optimizer": {"state": {}}}
        torch.save({wrapper: saved, **rest}, path)
    else:
        torch.save(saved, path)
    model = create_host(NAME, str(path), **SMALL)
    assert not model.training
    assert model.num_classes == 5
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_weights_at_another_image_size_are_resampled(state, tmp_path):
    save_file(state, tmp_path / "w.safetensors")
    model = create_host(NAME, str(tmp_path / "w.safetensors"), depth=1, img_size=64)
    assert model.pos_embed.shape[1] == 17
    assert torch.equal(model.head.weight, state["head.weight"])


def test_weights_of_another_model_are_refused(state, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"does not fit vit_small_patch16_224: \S+ is \(.*192.*\) in the file"):
        create_host("vit_small_patch16_224", str(path), **SMALL)
    with pytest.raises(CheckpointError, match="it lacks blocks.1"):
        create_host(NAME, str(path), depth=2, img_size=32)
    save_file({**state, "extra": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="it has extra, which the model has not"):
        create_host(NAME, str(path), **SMALL)


def test_files_that_are_no_weights(state, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        create_host(NAME, str(tmp_path / "no.safetensors"))
    for name in ("cut.pth", "cut.safetensors"):
        path = tmp_path / name
        torch.save(state, path) if name.endswith("pth") else save_file(state, path)
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(CheckpointError, match="is not a whole file of weights"):
            create_host(NAME, str(path))
    for content in (
        [1, 2],
        {"state_dict": [1]},
        {"state_dict": {"module.head.weight": 3}},
        {"model": {}, "state_dict": state},  # the first of the two counts
        {"state_dict": {"state_dict": state}},
        {3: torch.ones(1)},
        {"module.": torch.ones(1), 3: torch.ones(1)},
    ):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(CheckpointError, match="is not a state dict|it lacks"):
            create_host(NAME, str(tmp_path / "other.pth"))


def test_a_hostile_pickle_is_refused_unopened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    (tmp_path / "hostile.pth").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="which is never loaded"):
        create_host(NAME, str(tmp_path / "hostile.pth"))
    torch.save({"model": Trap()}, tmp_path / "hostile2.pth")
    with pytest.raises(CheckpointError, match="which is never loaded"):
        create_host(NAME, str(tmp_path / "hostile2.pth"))
    torch.save({"state_dict": {}, "args": argparse.Namespace(trap=Trap())}, tmp_path / "hostile3.pth")
    with pytest.raises(CheckpointError, match="which is never loaded"):
        create_host(NAME, str(tmp_path / "hostile3.pth"))
    assert not (tmp_path / "sprung").exists()


def test_no_network_is_said_plainly(monkeypatch, capfd, recwarn):
    def refuse(*args, **kwargs):
        client = logging.getLogger("huggingface_hub.utils._http")
        client.warning("no route; Retrying in 1s [Retry 1/5]")
        warnings.warn("no route", stacklevel=1)
        raise ConnectionError("no route")

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.addHandler(handler := logging.StreamHandler())

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(CheckpointError, match="cannot fetch the weights of .* give a file with --weights"):
        create_host(NAME, "hub")
    logger.removeHandler(handler)
    assert capfd.readouterr().err == ""  # one line is enough, and that is the error's
    assert not recwarn.list
    assert logger.level == level


def test_random_weights_by_name():
    assert create_host(NAME, "random", **SMALL).num_classes == 1000


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(1).expand(10**12, 192),  # four bytes that stand for terabytes
        torch.zeros(5, 192).to_sparse(),
        torch.empty(2**40, 192, device="meta"),
    ],
)
def test_tensors_that_are_not_what_they_seem(state, tmp_path, odd):
    torch.save(state | {"head.weight": odd}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="expected whole tensors by name"):
        create_host(NAME, str(tmp_path / "a.pth"))


def test_a_head_that_is_a_number(state, tmp_path):
    save_file(state | {"head.weight": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"head.weight is \(\) in the file"):
        create_host(NAME, str(tmp_path / "a.safetensors"), **SMALL)


def test_positions_that_cannot_be_resampled(state, tmp_path):
    save_file(state | {"pos_embed": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="does not fit vit_tiny"):
        create_host(NAME, str(tmp_path / "a.safetensors"), **SMALL)


def test_an_archive_that_unpacks_to_more_than_it_is(state, tmp_path):
    torch.save(state, tmp_path / "good.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as old, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + bytes(10**7), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="it would be larger unpacked"):
        create_host(NAME, str(tmp_path / "bomb.pth"), **SMALL)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02X\xff\xff\xff\xffa.",  # text of 4 GiB
        b"\x80\x02X\x01\x00\x00\x00\xff.",  # text that is none
        b"\x80\x02j\x09\x00\x00\x00.",  # what was never remembered
        b"\x80\x02e.",
        b"",
    ],
)
def test_pickles_that_stumble(tmp_path, content):
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a whole file of weights") as caught:
        read_weights(str(tmp_path / "a.pth"))
    assert not isinstance(caught.value.__context__, MemoryError)
