import json
import os
import pickle
import resource

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import sparsifiner as sp
from sparsifiner import checkpoint, digits
from sparsifiner.checkpoint import describe
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import CheckpointError

from .toys import make_vit, sharpen

CONFIG = sp.SparseConfig([0.3, 0.2], n_down=6, tau=0.01, tile=(2, 2))
NAME = "vit_tiny_patch16_224"


@pytest.fixture
def student():
    model = timm.create_model(NAME, depth=2, img_size=80, num_classes=7)
    student = sp.sparsify(sharpen(model), CONFIG)
    with torch.no_grad():
        for layer in sparse_layers(student):
            layer.predictor.w_up.uniform_(0, 0.2)
    return student


@pytest.fixture
def host():
    return timm.create_model(NAME, depth=2, img_size=80, num_classes=7)


@pytest.fixture
def images():
    return torch.randn(2, 3, 80, 80)


def test_round_trip_with_the_host_given(student, host, images, tmp_path):
    path = tmp_path / "student.safetensors"
    sp.save(student, path)
    again = sp.load(path, model=host)
    assert torch.equal(again(images), student(images))
    assert sp.config_of(again) == CONFIG
    assert not again.training
    assert os.listdir(tmp_path) == ["student.safetensors"]  # nothing temporary is left


def test_round_trip_by_name_alone(tmp_path):
    model = sharpen(timm.create_model(NAME, img_size=48, num_classes=3, dynamic_img_size=True))
    student = sp.sparsify(model, sp.SparseConfig(0.4, n_down=5))
    sp.save(student, tmp_path / "a.safetensors")
    again = sp.load(tmp_path / "a.safetensors")
    for size in (48, 80):
        images = torch.randn(2, 3, size, size)
        assert torch.equal(again(images), student(images))


def test_predictors_only(student, host, images, tmp_path):
    path = tmp_path / "predictors.safetensors"
    sp.save(student, path, host_weights=False)
    with safe_open(path, "pt") as file:
        assert all(".predictor." in name for name in file.keys())  # noqa: SIM118
    with pytest.raises(CheckpointError, match="holds no weights of the host: pass the one"):
        sp.load(path)
    host.load_state_dict(sp.restore(student).state_dict())
    assert torch.equal(sp.load(path, model=host)(images), student(images))


def test_after_a_change_of_size(student, tmp_path):
    student.set_input_size((112, 80))
    sp.save(student, tmp_path / "a.safetensors")
    images = torch.randn(1, 3, 112, 80)
    host = timm.create_model(NAME, depth=2, img_size=(112, 80), num_classes=7)
    assert torch.equal(sp.load(tmp_path / "a.safetensors", model=host)(images), student(images))


def test_what_the_file_says_of_itself(student, tmp_path):
    sp.save(student, tmp_path / "a.safetensors")
    about = describe(tmp_path / "a.safetensors")
    assert about["library_version"] == sp.__version__
    assert about["host"] == "timm"
    assert about["model"]["architecture"] == NAME
    assert about["config"]["n_down"] == 6


def test_another_host_or_size_is_refused(student, images, tmp_path):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)
    arguments = {"depth": 2, "img_size": 80, "num_classes": 7}
    with pytest.raises(CheckpointError, match="belongs to vit_tiny_patch16_224, not to deit_tiny_patch16_224"):
        sp.load(path, model=timm.create_model("deit_tiny_patch16_224", **arguments))
    with pytest.raises(CheckpointError, match="belongs to timm vit_tiny_patch16_224, not to a VisionTransformerDist"):
        sp.load(path, model=timm.create_model("deit_tiny_distilled_patch16_224", **arguments))
    with pytest.raises(CheckpointError, match="is for images of 80 x 80, the model takes 96 x 96"):
        sp.load(path, model=timm.create_model(NAME, **(arguments | {"img_size": 96})))
    with pytest.raises(CheckpointError, match=r"head.bias is \(7,\) in the file and \(8,\) in the model: another size"):
        sp.load(path, model=timm.create_model(NAME, **(arguments | {"num_classes": 8})))
    with pytest.raises(CheckpointError, match="2 attention layers, this one has 3"):
        sp.load(path, model=timm.create_model(NAME, **(arguments | {"depth": 3})))


def test_a_host_made_with_other_arguments_is_refused_by_name(student, tmp_path):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)  # depth=2 is not in timm's name
    with pytest.raises(CheckpointError, match="pass model="):
        sp.load(path)


def test_a_model_without_a_name_needs_the_host(tmp_path, photos):
    student = sp.sparsify(make_vit(), sp.SparseConfig(0.4, n_down=5))
    sp.save(student, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"was not made by timm.create_model"):
        sp.load(tmp_path / "a.safetensors")
    assert torch.equal(sp.load(tmp_path / "a.safetensors", model=make_vit())(photos), student(photos))


def rewrite(path, change):
    """The same tensors under a changed description."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["sparsifiner"])
    change(about)
    save_file(tensors, path, metadata={"sparsifiner": json.dumps(about)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(format_version=99), "has format 99.* upgrade sparsifiner"),
        (lambda about: about.pop("config"), "its description lacks config"),
        (lambda about: about["config"].update(keep=7), "its settings are damaged: keep must be"),
        (lambda about: about["model"].update(architecture="no_such_vit"), "has no model 'no_such_vit'"),
        (lambda about: about.update(host="elsewhere"), "is of host 'elsewhere'"),
        (lambda about: about.pop("format_version"), "its description is damaged"),
        (lambda about: about.update(format_version=[1]), "its description is damaged"),
        (lambda about: about.update(host=["timm"]), "its description is damaged: host is"),
        (lambda about: about.update(grids=[[float("inf"), 5], [5, 5]]), "grids must be whole numbers"),
        (lambda about: about.update(grids=["55", "55"]), "grids must be whole numbers"),
        (lambda about: about.update(grids=[[0, 5], [5, 5]]), "grids must be whole numbers"),
        (lambda about: about["model"].update(img_size=None), "img_size must be height and width"),
        (lambda about: about["model"].update(architecture=["a"]), "has no model"),
        (lambda about: about["model"].update(global_pool="sideways"), "cannot make a vit_tiny.*Only avg"),
        (lambda about: about["model"].update(num_classes="many"), "timm .* cannot make a vit_tiny"),
        (lambda about: about["model"].update(checkpoint_path="/x"), "'checkpoint_path' is no argument of a model"),
    ],
)
def test_damaged_descriptions(student, tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message):
        sp.load(path)


def test_files_that_are_not_ours(student, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        sp.load(tmp_path / "nothing.safetensors")
    plain = tmp_path / "plain.safetensors"
    save_file({"a": torch.zeros(2)}, plain)
    with pytest.raises(CheckpointError, match=r"was not written by sparsifiner.save"):
        sp.load(plain)
    path = tmp_path / "whole.safetensors"
    sp.save(student, path)
    for size in (0, 7, 1000, path.stat().st_size - 1):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
            sp.load(cut)


def test_a_pickle_is_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    hostile = tmp_path / "hostile.safetensors"
    hostile.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError):
        sp.load(hostile)
    assert not (tmp_path / "sprung").exists()


def test_a_failed_write_leaves_the_old_file(student, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)
    before = path.read_bytes()

    def full_disk(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparsifiner.checkpoint.save_file", full_disk)
    with pytest.raises(CheckpointError, match="cannot write .*No space left on device"):
        sp.save(student, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_ctrl_c_leaves_the_old_file(student, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)
    before = path.read_bytes()
    monkeypatch.setattr("sparsifiner.checkpoint.save_file", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sp.save(student, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_folder_that_is_not_there(student, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        sp.save(student, tmp_path / "no" / "a.safetensors")


def test_stored_in_16_bits(student, tmp_path, images, host):
    sp.save(student, tmp_path / "half.safetensors", dtype=torch.bfloat16)
    sp.save(student, tmp_path / "whole.safetensors")
    sizes = [(tmp_path / name).stat().st_size for name in ("half.safetensors", "whole.safetensors")]
    assert sizes[0] < 0.7 * sizes[1]
    loaded = sp.load(tmp_path / "half.safetensors", model=host)
    assert all(tensor.dtype == torch.float32 for tensor in loaded.state_dict().values())
    torch.testing.assert_close(loaded(images), student.eval()(images), rtol=0.1, atol=0.1)


def test_a_folder_of_a_run_stands_for_its_student(student, tmp_path, host):
    sp.save(student, tmp_path / "student.safetensors")
    assert sp.load(tmp_path, model=host).state_dict().keys() == student.state_dict().keys()
    with pytest.raises(CheckpointError, match=r"student\.safetensors does not exist"):
        (tmp_path / "empty").mkdir()
        sp.load(tmp_path / "empty")


@pytest.mark.parametrize("name", checkpoint.ready())
def test_predictors_that_come_with_the_package(name):
    assert checkpoint.locate(name).stat().st_size < 2 * 10**6
    host = timm.create_model(name, pretrained=False).eval()
    student = sp.load(name, model=host)
    assert all(torch.equal(tensor, student.state_dict()[key]) for key, tensor in host.state_dict().items())
    with pytest.raises(CheckpointError, match="holds no weights of the host"):
        sp.load(name)


def test_there_are_predictors_for_deit_tiny():
    assert "deit_tiny_patch16_224" in checkpoint.ready()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_comes_back_in_the_types_it_had(student, tmp_path, host, dtype, mixed):
    student.to(dtype)
    if mixed:
        student.blocks[0].norm1.float()  # as some keep their norms; in float64, torch's do not take that
    if mixed and dtype is torch.float64:
        sp.save(student, tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError, match="types that do not go together .*: save the model in one type"):
            sp.load(tmp_path / "a.safetensors", model=host)
        return
    for stored in (None, torch.bfloat16):
        sp.save(student, tmp_path / "a.safetensors", dtype=stored)
        loaded = sp.load(tmp_path / "a.safetensors", model=host)
        assert {n: t.dtype for n, t in loaded.state_dict().items()} == {
            n: t.dtype for n, t in student.state_dict().items()
        }
        if stored is None:
            for name, tensor in student.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor)
    sp.save(student, tmp_path / "predictors.safetensors", host_weights=False)
    loaded = sp.load(tmp_path / "predictors.safetensors", model=host)  # which has types of its own
    assert all(tensor.dtype == torch.float32 for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("nonsense", ["no such type", "int64", "load", 5, None])
def test_nonsense_about_types(student, tmp_path, host, nonsense):
    path = tmp_path / "a.safetensors"
    sp.save(student, path)
    rewrite(path, lambda about: about.update(dtypes={"head.bias": nonsense}))
    with pytest.raises(CheckpointError, match=r"head\.bias cannot be of type"):
        sp.load(path, model=host)
    rewrite(path, lambda about: about.update(dtypes=nonsense))
    with pytest.raises(CheckpointError, match="dtypes is no object"):
        sp.load(path, model=host)


def test_files_of_version_01_have_the_types_of_the_host(student, tmp_path, host):
    path = tmp_path / "a.safetensors"
    sp.save(student, path, dtype=torch.bfloat16)
    rewrite(path, lambda about: about.pop("dtypes"))
    assert all(tensor.dtype == torch.float32 for tensor in sp.load(path, model=host).state_dict().values())


# A file of some kilobytes must not ask for more than that.


@pytest.fixture
def digits_file(tmp_path):
    path = tmp_path / "digits.safetensors"
    sp.save(sp.sparsify(timm.create_model(digits.NAME), sp.SparseConfig(0.3, n_down=4)), path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about["model"].update(img_size=[100_000, 100_000]), "pos_embed is .* another size"),
        (lambda about: about["model"].update(img_size=[10**30, 10**30]), "cannot make a vit_digits"),
        (lambda about: about["model"].update(num_classes=10**9), "head.* another size"),
        (lambda about: about["model"].update(in_chans=10**9), "cannot make a vit_digits"),
        (lambda about: about.update(grids=[[100_000, 100_000]] * 4), r"w_up is \(4, 4, 65\) in the file"),
        (lambda about: about.update(grids=[[8, 8]] * 10**5), "100000 attention layers"),
        (lambda about: about["config"].update(n_down=64), r"its settings and grid make it \(4, 64, 65\)"),
    ],
)
def test_descriptions_of_more_than_the_file_holds(digits_file, change, message):
    rewrite(digits_file, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message):
        sp.load(digits_file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_descriptions_that_python_gives_up_on(digits_file):
    with safe_open(digits_file, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for text in ("[" * 100_000, "9" * 5000, "[]", "null", "{"):
        save_file(tensors, digits_file, metadata={"sparsifiner": text})
        with pytest.raises(CheckpointError, match="its description is damaged"):
            describe(digits_file)


def test_predictors_that_are_not_there(digits_file):
    with safe_open(digits_file, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = file.metadata()
    del tensors["blocks.2.attn.predictor.w_up"]
    save_file(tensors, digits_file, metadata=about)
    with pytest.raises(CheckpointError, match=r"lacks the predictor of blocks\.2\.attn"):
        sp.load(digits_file)


@pytest.mark.parametrize("host_weights", [True, False])
def test_a_model_made_for_cells(images, tmp_path, host_weights):
    model = sharpen(timm.create_model(NAME, depth=2, img_size=80, num_classes=7))
    student = sp.sparsify(model, sp.SparseConfig(0.3, pattern="cells", tile=(2, 2), dense=[1])).eval()
    path = tmp_path / "cells.safetensors"
    sp.save(student, path, host_weights=host_weights)
    assert describe(path)["grids"] == [[5, 5], [5, 5]]
    again = sp.load(path, model=model)
    assert torch.equal(again(images), student(images))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert sp.config_of(again) == sp.config_of(student)
    if not host_weights:
        with pytest.raises(CheckpointError, match="holds no weights of the host"):
            sp.load(path)


def test_cells_beside_predictors(student, host, images, tmp_path):
    sp.reconfigure(student, pattern="cells", keep=0.3)
    sp.save(student.eval(), path := tmp_path / "both.safetensors")
    again = sp.load(path, model=host)
    assert torch.equal(again(images), student(images))
    for model in (again, student):
        sp.reconfigure(model, pattern="learned")
    assert torch.equal(again(images), student(images))

    sp.save(student, earlier := tmp_path / "earlier.safetensors")  # by predictors: what is of cells does not matter
    rewrite(earlier, lambda about: about["config"].update(refine=0.5))
    assert torch.equal(sp.load(earlier, model=host)(images), student(images))
    rewrite(earlier, lambda about: about["config"].update(pattern="cells"))
    with pytest.raises(CheckpointError, match="'refine' in the config is of a version that weighed the keys of a cell"):
        sp.load(earlier, model=host)

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if not name.endswith("1.attn.predictor.w_up")}  # noqa: SIM118
        save_file(tensors, path, metadata=file.metadata())
    with pytest.raises(CheckpointError, match=r"lacks the predictor of blocks\.1\.attn"):
        sp.load(path, model=host)


def test_a_file_that_says_learned_and_holds_no_predictors(host, tmp_path):
    sp.save(sp.sparsify(host, sp.SparseConfig(0.3, n_down=6, pattern="cells")), path := tmp_path / "a.safetensors")
    rewrite(path, lambda about: about["config"].update(pattern="learned"))
    with pytest.raises(CheckpointError, match=r"lacks the predictor of blocks\.0\.attn"):
        sp.load(path, model=host)
    rewrite(path, lambda about: about.update(grids=[[5, 5]]))
    with pytest.raises(CheckpointError, match="a model with 1 attention layers, this one has 2"):
        sp.load(path, model=host)
