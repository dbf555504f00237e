"""transformers' models: converted at keep 1 they are the host, sparse they are what their timm twins are."""

import copy
import functools
import importlib.util
import json
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from typer.testing import CliRunner

import sparsifiner as sp
from sparsifiner import checkpoint, hosts
from sparsifiner.cli.main import app
from sparsifiner.convert import find_host, host_of, sparse_layers
from sparsifiner.data.images import preprocessing
from sparsifiner.distillation import phases, state
from sparsifiner.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError
from sparsifiner.hosts import huggingface
from sparsifiner.inspect import compare

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 48}
VISION = SHAPE | MLP | {"projection_dim": 6}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}
# What a family's config has beside `SHAPE` and `MLP`.
OWN = {
    "CLIPV": {"projection_dim": 6},
    "MetaClip2V": {"projection_dim": 6},
    "Dinov2W": {"mlp_ratio": 2, "num_register_tokens": 3},
    "Dinov2": {"mlp_ratio": 2},
    "DINOv3": {"num_register_tokens": 3},
    "DPT": {"is_hybrid": False},
    "VitPose": {"image_size": [32, 32], "patch_size": [8, 8], "mlp_ratio": 2},
    "Yolos": {"image_size": [32, 32], "num_detection_tokens": 3},
    "Sam3": {"num_hidden_layers": 3, "global_attn_indexes": [0, 2], "window_size": 2, "pretrain_image_size": 16},
}
PREFIX = {
    "DeiT": 2,
    "Dinov2W": 4,
    "DINOv3": 4,
    "Yolos": 4,
    "Siglip": 0,
    "IJepa": 0,
    "VitPose": 0,
    "Sam3": 0,
    "Aimv2": 0,
}
SPARSE = sp.SparseConfig(keep=0.4, n_down=4, tau=0.0, basis_threshold=0.0)


def own(table, name, default):
    return next((table[start] for start in table if name.startswith(start)), default)


def make(name="ViTForImageClassification", *arguments, **settings):
    kind = getattr(transformers, name)
    if hasattr(kind.config_class, "sub_configs") and "vision_config" in kind.config_class.sub_configs:
        config = kind.config_class(vision_config=VISION | settings, text_config=TEXT, num_labels=5)
    else:
        config = kind.config_class(**({"num_labels": 5} | SHAPE | MLP | own(OWN, name, {}) | settings))
    torch.manual_seed(0)
    model = kind(config, *arguments)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros, no ones: every weight must be in its place
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.3)
    return model.eval()


def photos(count=3, size=(32, 32)):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def tensors(output):
    """By name, those in tuples too."""
    found = {}
    for name, value in output.items():
        found |= {f"{name}.{i}": part for i, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
    return found


def same(one, other):
    one, other = tensors(one), tensors(other)
    assert list(one) == list(other)
    return all(torch.equal(one[name], other[name]) for name in one)


def logits(model, images):
    return host_of(model).logits(model, model(images))


# Others are only known as parts of larger models.
NAMES = [name for name in huggingface.MEMBERS if hasattr(transformers, name)]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def student():
    return sp.sparsify(make(), SPARSE)


# Conversion


def check(model, images):
    with torch.no_grad():
        expected = model(images)
        student = sp.sparsify(model, sp.SparseConfig(keep=1.0, n_down=4))
        assert len(sparse_layers(student)) == 2
        assert same(student(images), expected)
        sp.reconfigure(student, keep=0.3, tau=0.0, basis_threshold=0.0)
        sparse = student(images)
        found, wanted = tensors(sparse), tensors(expected)
        assert not any(torch.equal(found[field], wanted[field]) for field in wanted)
        assert all(bool(torch.isfinite(found[field]).all()) for field in wanted)
        assert same(copy.deepcopy(student)(images), sparse)
        restored = sp.restore(student)
        assert same(restored(images), expected)
        assert same(model(images), expected)
    assert list(restored.state_dict()) == list(model.state_dict())
    assert type(restored) is type(model)
    ours = set(student.state_dict()) - set(model.state_dict())
    assert len(ours) == 2 * 2
    assert all(".predictor.w_" in key for key in ours)
    return student


def test_members(name):
    student = check(make(name), photos())
    layer = sparse_layers(student)[0]
    prefix = own(PREFIX, name, 1)
    assert (layer.grid.size, layer.grid.num_prefix) == ((4, 4), prefix)
    host = host_of(student)
    assert host.name == "huggingface"
    assert host.class_token(student) == (prefix > 0)
    assert host.image_size(student) == (32, 32)
    assert host.num_classes(student) == (5 if "Classification" in name else 0)
    follows_its_host(student, photos())


def follows_its_host(student, images):
    """Queries, keys and values of each layer make with dense attention what the host makes of them."""

    def compare(layer, arguments, settings, expected):
        x, context, _ = layer.adapter.arguments(layer.host, *arguments, **settings)
        q, k, v = layer.adapter.qkv(layer.host, x, context)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
        out = layer.adapter.project(layer.host, heads, x, context)
        assert isinstance(out, tuple) == isinstance(expected, tuple)
        out, expected = (part[0] if isinstance(part, tuple) else part for part in (out, expected))
        torch.testing.assert_close(out, expected)
        seen.append(layer)

    seen = []
    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in sparse_layers(student)]
    with sp.dense_mode(student), torch.no_grad():
        student(images)
    for hook in hooks:
        hook.remove()
    assert seen == sparse_layers(student)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_size": [16, 40]},
        {"qkv_bias": False},
        {"num_attention_heads": 1},
        {"num_labels": 0},
        {"hidden_size": 20},  # head dimension 5
    ],
    ids=str,
)
def test_variants(settings):
    size = tuple(settings.get("image_size", (32, 32)))
    student = check(make(**settings), photos(size=size))
    assert sparse_layers(student)[0].grid.size == (size[0] // 8, size[1] // 8)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_attention_of_transformers_is_the_host(implementation):
    model = make()
    model.set_attn_implementation(implementation)
    check(model, photos())
    student, x = sp.sparsify(model, SPARSE), torch.randn(1, 17, 32)
    with sp.dense_mode(student):
        out, weights = sparse_layers(student)[0](x, None)
    expected_out, expected_weights = model.vit.layers[0].attention(x, None)
    assert torch.equal(out, expected_out)
    if implementation == "eager":
        assert torch.equal(weights, expected_weights)
    else:
        assert weights is None is expected_weights


def test_derived_classes_are_what_they_derive_from():
    class Mine(transformers.ViTForImageClassification):
        pass

    model = make()
    model.__class__ = Mine
    check(model, photos())


def test_backends_agree(name):
    student, images = sp.sparsify(make(name), SPARSE), photos()
    sp.calibrate(student, images)
    results = []
    for backend in ("cpu", "eager"):
        sp.reconfigure(student, backend=backend)
        with torch.inference_mode():
            results.append(logits(student, images))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    with sp.dense_mode(student), torch.inference_mode():
        assert (logits(student, images) - results[0]).abs().max() > 1e-3  # sparse, and not by a little


def test_copies_watch_their_own_grid():
    student = sp.sparsify(make("Dinov2Model"), SPARSE)
    twin = copy.deepcopy(student)
    twin(photos(size=(48, 32)))
    assert sparse_layers(twin)[0].grid.size == (6, 4)
    assert sparse_layers(student)[0].grid.size == (4, 4)


def test_gradients_reach_everything(student):
    for keep in (0.4, 1.0):
        sp.reconfigure(student, keep=keep)
        student.train()
        student.zero_grad()
        student(photos(), labels=torch.tensor([0, 1, 2])).loss.backward()
        missing = [name for name, parameter in student.named_parameters() if parameter.grad is None]
        assert all(".predictor." in name for name in missing)
        assert len(missing) == (0 if keep < 1 else 4)


# The timm twins


def twin_settings(**settings):
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    return shape | settings


def norm(eps):
    return functools.partial(nn.LayerNorm, eps=eps)


# From their names to timm's, tried in this order; q, k and v are put together afterwards.
COMMON = [
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"(?:encoder\.)?layers?\.(\d+)\.attention\.o_proj", r"blocks.\1.attn.proj"),
    (r"(?:encoder\.)?layers?\.(\d+)\.attention\.(\w)_proj", r"blocks.\1.attn.\2"),
    (r"(?:encoder\.)?layers?\.(\d+)\.mlp", r"blocks.\1.mlp"),
    (r"(?:encoder\.)?layers?\.(\d+)\.norm(\d)", r"blocks.\1.norm\2"),
    (r"(?:encoder\.)?layers?\.(\d+)\.layer_scale(\d)\.lambda1", r"blocks.\1.ls\2.gamma"),
    (r"layers\.(\d+)\.layernorm_before", r"blocks.\1.norm1"),
    (r"layers\.(\d+)\.layernorm_after", r"blocks.\1.norm2"),
    (r"layernorm", "norm"),
    (r"(?:cls_)?classifier", "head"),
    (r"distillation_classifier", "head_dist"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.class_embedding", "cls_token"),
    (r"embeddings\.position_embedding\.weight", "pos_embed"),
    (r"embeddings\.patch_embedding", "patch_embed.proj"),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj", r"blocks.\1.attn.proj"),
    (r"encoder\.layers\.(\d+)\.self_attn\.(\w)_proj", r"blocks.\1.attn.\2"),
    (r"encoder\.layers\.(\d+)\.layer_norm(\d)", r"blocks.\1.norm\2"),
    (r"pre_layrnorm", "norm_pre"),
    (r"post_layernorm", "norm"),
    (r"visual_projection", "head"),
]


def timm_names(weights):
    renamed = {}
    for name, tensor in weights.items():
        name = re.sub(r"^(vit|deit|dinov2|vision_model)\.", "", name)
        if name == "embeddings.mask_token":
            continue  # for pre-training only
        pattern, new = next((old, new) for old, new in COMMON if re.match(rf"{old}(\.|$)", name))
        renamed[re.sub(rf"^{pattern}", new, name)] = tensor
    for name in [name for name in renamed if ".attn.q." in name]:
        parts = [renamed.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        renamed[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return renamed


def vit_twin(weights):
    return VisionTransformer(**twin_settings(num_classes=5, norm_layer=norm(1e-12))), weights


def deit_twin(weights):
    return VisionTransformerDistilled(**twin_settings(num_classes=5, norm_layer=norm(1e-12))), weights


def dinov2_twin(weights):
    return VisionTransformer(
        **twin_settings(num_classes=0, mlp_ratio=2, init_values=1.0, norm_layer=norm(1e-6))
    ), weights


def registers_twin(weights):
    settings = twin_settings(num_classes=0, mlp_ratio=2, init_values=1.0, norm_layer=norm(1e-6))
    positions = weights["pos_embed"]  # timm has none for the prefix: its class token has its own added
    weights |= {"cls_token": weights["cls_token"] + positions[:, :1], "pos_embed": positions[:, 1:]}
    return VisionTransformer(**settings, reg_tokens=3, no_embed_class=True), weights


def clip_twin(weights):
    settings = twin_settings(num_classes=6, pre_norm=True, act_layer="quick_gelu", norm_layer=norm(1e-5))
    weights |= {"cls_token": weights["cls_token"][None, None], "pos_embed": weights["pos_embed"][None]}
    return VisionTransformer(**settings), weights | {"head.bias": torch.zeros(6)}


TWINS = {
    "ViTForImageClassification": vit_twin,
    "DeiTForImageClassificationWithTeacher": deit_twin,
    "Dinov2Model": dinov2_twin,
    "Dinov2WithRegistersModel": registers_twin,
    "CLIPVisionModelWithProjection": clip_twin,
}


@pytest.fixture(params=TWINS)
def twins(request):
    """Of both libraries, in double precision: one choice that rounding tips would hide what is to be seen."""
    theirs = make(request.param)
    ours, weights = TWINS[request.param](timm_names(theirs.state_dict()))
    ours.load_state_dict(weights)
    return theirs.double(), ours.double().eval()


@torch.no_grad()
def test_twins_agree(twins):
    theirs, ours = twins
    images = photos(8).double()
    torch.testing.assert_close(logits(theirs, images), ours(images))
    students = [sp.sparsify(model, SPARSE) for model in twins]
    reports = [sp.calibrate(student, images) for student in students]
    for one, other in zip(reports[0].layers, reports[1].layers, strict=True):
        assert one.recall == pytest.approx(other.recall, abs=1e-9)
        assert one.connections == other.connections
    dropping = [{"tokens": sp.TokenConfig(0.5, blocks=(0,), fuse=fuse)} for fuse in (False, True)]
    for changes in ({}, {"residual": False}, {"tile": (2, 2)}, {"keep": 0.2}, *dropping):
        for student in students:
            sp.reconfigure(student, **changes)
        results = [logits(student, images) for student in students]
        torch.testing.assert_close(*results, atol=1e-7, rtol=1e-7)
        assert (results[0] - logits(theirs, images)).abs().max() > 1e-3


def test_twins_cost_the_same(twins):
    images = photos().double()
    counts = [sp.count_flops(sp.sparsify(model, SPARSE)).to_dict() for model in twins]
    assert counts[0] == counts[1]
    assert all(counts[0][part] > 0 for part in ("attention", "predictor", "projections", "mlp", "other"))
    measured = [sp.count_flops(sp.sparsify(model, SPARSE), images, convention="measured") for model in twins]
    assert measured[0].to_dict() == measured[1].to_dict()


# Calibration, distillation, evaluation


@torch.no_grad()
def test_calibration_fits_the_attention(name):
    student, images = sp.sparsify(make(name), SPARSE.replace(residual=False)), photos(32)

    def error():
        with sp.capture(student, layers=[0]) as seen:
            student(images)
        patches = slice(seen[0].num_prefix, None)
        return (seen[0].estimate - seen[0].full_map)[:, :, patches, patches].square().mean()

    before = error()
    assert sp.calibrate(student, images).images == 32
    assert error() < 0.98 * before  # least squares; noise has little to predict


def test_capture_sees_the_true_attention():
    model = make("CLIPVisionModel")
    model.set_attn_implementation("eager")
    images = photos(1)
    expected = model(images, output_attentions=True).attentions
    student = sp.sparsify(model, SPARSE)
    with sp.capture(student) as seen, torch.no_grad():
        student(images)
    torch.testing.assert_close(seen[0].full_map, expected[0])
    assert not torch.equal(seen[0].sparse_map, seen[0].full_map)


QUICK = sp.Recipe(
    keep=0.3,
    phase1_epochs=1,
    phase1_warmup_epochs=0.5,
    phase1_learning_rate=1e-2,
    phase2_epochs=1,
    phase2_warmup_epochs=0.5,
    phase2_learning_rate=1e-3,
    batch_size=8,
    save_every=1,
    log_every=1,
)


def test_distillation(tmp_path):
    student = sp.sparsify(make("DeiTForImageClassificationWithTeacher"), SPARSE)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    data = photos(16), torch.arange(16) % 5
    report = sp.distill(student, data, QUICK, out=tmp_path)  # with mixup: it needs the number of classes
    assert report.steps == {1: 2, 2: 2}
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in report.lines)
    still = [name for name, tensor in student.state_dict().items() if torch.equal(tensor, before[name])]
    assert still == []
    loaded = sp.load(tmp_path)
    images = photos(2)
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, student.eval()(images).logits)


def test_distillation_goes_on_where_it_was(tmp_path):
    """Tokens that only pre-training uses have no gradient and no place in the optimiser."""
    data, whole = photos(16), sp.sparsify(make("Dinov2Model"), SPARSE)
    recipe = QUICK.replace(label_weight=0.0, phase1_epochs=0, start="given", mixup=0.0, cutmix=0.0)
    cut = copy.deepcopy(whole)
    sp.distill(whole, data, recipe, out=tmp_path / "whole")
    first = state.found(tmp_path / "whole")[0]
    report = sp.distill(cut, data, recipe, out=tmp_path / "cut", resume=first)
    assert report.steps == {2: 2}
    assert same(whole.state_dict(), cut.state_dict())


def test_unused_weights_are_those_without_a_gradient(name):
    arguments = (True, True) if name in ("ViTModel", "DeiTModel") else ()
    model = make(name, *arguments)
    logits(model, photos()).square().sum().backward()
    missing = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    assert find_host(model).unused(model) == missing
    last = name.startswith(("CLIP", "Siglip", "MetaClip2")) and name.endswith("ForImageClassification")
    assert bool(missing) == (bool(arguments) or last or name.lower().startswith("dino"))


def test_weight_decay_spares_embeddings(name):
    student = sp.sparsify(make(name), SPARSE)
    names = phases.learns(student, QUICK, 2, {key for key, _ in student.named_parameters()})
    groups = phases.parameter_groups(student, QUICK, 2, names)
    decayed = {key for group in groups if group["weight_decay"] for key in group["names"]}
    matrices = {
        f"{path}.weight" for path, module in student.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    }
    matrices |= {key for key in names if key.endswith(("w_up", "in_proj_weight"))}
    assert decayed == matrices - host_of(student).unused(student)


def test_evaluation_of_both(student):
    batches = [(photos(4), torch.tensor([0, 1, 2, 3]))]
    dense = compare.predict_all(make(), batches)
    with torch.no_grad():
        assert torch.equal(dense.logits, make()(batches[0][0]).logits)
    rows = compare.compare(student, batches, [compare.RESIDUAL, compare.ORACLE], [0.5])
    assert [row.form for row in rows] == ["dense", "residual", "exact top-B"]
    assert rows[0].agreement == 100
    assert rows[0].top1 == dense.top1
    assert rows[1].divergence > 0


def test_predictions_of_models_without_a_head():
    images = photos()
    with torch.no_grad():
        for name, field in (("ViTModel", "pooler_output"), ("CLIPVisionModelWithProjection", "image_embeds")):
            model = make(name)
            assert torch.equal(logits(model, images), model(images)[field])
        model = make("ViTModel", False)
        assert torch.equal(logits(model, images), model(images).last_hidden_state[:, 0])
        model.config.return_dict = False
        with pytest.raises(ConfigError, match="returned a tuple: set its config's return_dict to True"):
            logits(model, images)


# Image sizes


def test_dinov2_takes_any_size():
    model = make("Dinov2ForImageClassification")
    student = sp.sparsify(model, SPARSE)
    results = {}
    for size in ((32, 32), (16, 48), (45, 32), (32, 32)):  # 45: the host ignores what makes no patch
        images = torch.ones(1, 3, *size)
        with torch.no_grad():
            out = student(images).logits
            if size in results:
                assert torch.equal(out, results[size])
            results[size] = out
            assert sparse_layers(student)[0].grid.size == (size[0] // 8, size[1] // 8)
            with sp.dense_mode(student):
                assert torch.equal(student(images).logits, model(images).logits)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTModel", "CLIPForImageClassification"])
def test_other_sizes_where_the_host_is_told(name):
    model = make(name)
    student = sp.sparsify(model, SPARSE)
    images = photos(size=(48, 32))
    with pytest.raises(DataError, match="images are 48 x 32 but the model takes 32 x 32: resize them, or call it with"):
        student(images)
    with torch.no_grad():
        assert bool(torch.isfinite(student(images, interpolate_pos_encoding=True)[0]).all())
        assert sparse_layers(student)[0].grid.size == (6, 4)
        with sp.dense_mode(student):
            assert same(student(images, interpolate_pos_encoding=True), model(images, interpolate_pos_encoding=True))
        assert sparse_layers(student)[0].predictor.grid == (4, 4)
        student(pixel_values=photos())
        assert sparse_layers(student)[0].grid.size == (4, 4)


def test_dinov2_can_be_calibrated_at_another_size(tmp_path):
    model, images = make("Dinov2ForImageClassification"), photos(size=(48, 48))
    student = sp.sparsify(model, SPARSE)
    with pytest.raises(DataError, match="these images make 37 tokens, the model's own size makes 17.*image_size"):
        sp.calibrate(student, images)
    model.config.image_size = (48, 48)
    assert find_host(model).image_size(model) == (48, 48)
    student = sp.sparsify(model, SPARSE)
    sp.calibrate(student, images)
    assert sparse_layers(student)[0].predictor.w_up.shape == (4, 4, 37)
    sp.save(student, tmp_path / "a.safetensors")
    loaded = sp.load(tmp_path / "a.safetensors")
    assert find_host(model).image_size(loaded) == (48, 48)
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, student(images).logits)
    with pytest.raises(CheckpointError, match="is for images of 48 x 48, the model takes 32 x 32.*config.image_size"):
        sp.load(tmp_path / "a.safetensors", model=make("Dinov2ForImageClassification"))


# Checkpoints


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("somebody wants the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("offline")
def test_checkpoints(name, tmp_path):
    model, images, path = make(name), photos(), tmp_path / "student.safetensors"
    student = sp.sparsify(model, SPARSE)
    sp.calibrate(student, images)
    sp.save(student, path)
    loaded = sp.load(path)
    assert same(loaded.state_dict(), student.state_dict())
    with torch.no_grad():
        assert same(loaded(images), student(images))
    assert sp.config_of(loaded) == sp.config_of(student)
    assert loaded.config.id2label == model.config.id2label
    sp.save(student, path, host_weights=False)
    with pytest.raises(CheckpointError, match=f"holds no weights of the host.*huggingface {name}"):
        sp.load(path)
    with torch.no_grad():
        assert same(sp.load(path, model=model)(images), student(images))


def test_checkpoints_know_what_the_config_does_not(tmp_path):
    model = make(image_size=[16, 40])
    model.config.image_size = 99  # without any effect on a model that is made
    sp.save(sp.sparsify(model, SPARSE), tmp_path / "c.safetensors")
    assert host_of(model).image_size(sp.load(tmp_path / "c.safetensors")) == (16, 40)
    model = make("ViTModel", False, True).bfloat16()
    model.config.dtype = torch.bfloat16
    sp.save(sp.sparsify(model, SPARSE), tmp_path / "a.safetensors")
    loaded = sp.load(tmp_path / "a.safetensors")
    assert loaded.pooler is None
    assert loaded.embeddings.mask_token is not None
    assert loaded.embeddings.mask_token.dtype == torch.bfloat16
    model = make("CLIPForImageClassification")
    model.config.vision_config.dtype = "float64"
    sp.save(sp.sparsify(model, SPARSE), tmp_path / "b.safetensors")
    loaded = sp.load(tmp_path / "b.safetensors")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def rewrite(path, **changes):
    """The file with another description of its model."""
    description, weights = checkpoint.describe(path), load_file(path)
    description["model"] |= changes
    save_file(weights, path, {checkpoint.FORMAT: checkpoint.json.dumps(description)})


def test_checkpoints_that_cannot_be_loaded(student, tmp_path, monkeypatch):
    path = tmp_path / "student.safetensors"
    sp.save(student, path)
    with pytest.raises(CheckpointError, match="belongs to huggingface ViTForImageClassification, not to a DeiTModel"):
        sp.load(path, model=make("DeiTModel"))
    with pytest.raises(CheckpointError, match="is for images of 32 x 32, the model takes 48 x 48"):
        sp.load(path, model=make(image_size=48))
    good = json.loads(student.config.to_json_string(use_diff=False))
    rewrite(path, config=good | {"hidden_size": "many"})
    with pytest.raises(CheckpointError, match="cannot make a ViTForImageClassification of the config in the file") as e:
        sp.load(path)
    assert "\n" not in str(e.value)
    for name in ("ViTMAEModel", "AutoModel", "pipeline", None):
        rewrite(path, architecture=name)
        with pytest.raises(CheckpointError, match=f"{name!r} is no class of transformers .*load\\(path, model=...\\)"):
            sp.load(path)
    for change, message in (
        ({"_attn_implementation": "somebody/kernel"}, "_attn_implementation is not taken from files"),
        ({"num_hidden_layers": 10**9}, "is not of a model of 2 layers"),
        ({"num_labels": 10**9}, "a number that cannot be, 1000000000"),
        ({"hidden_size": float("inf")}, "a number that cannot be, inf"),
    ):
        rewrite(path, architecture="ViTForImageClassification", config=good | change)
        with pytest.raises(CheckpointError, match=message):
            sp.load(path)
    without_transformers(monkeypatch)
    with pytest.raises(CheckpointError, match=r"known are: timm; pip install 'sparsifiner\[huggingface\]' adds it"):
        sp.load(path)


# What is refused


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model"])
def test_masks_are_only_for_dense_layers(name):
    model, images = make(name), photos(1)
    student = sp.sparsify(model, SPARSE)
    mask = torch.ones(1, 17)
    with torch.no_grad():
        whole = student(images, attention_mask=None).last_hidden_state
        mask[:, 5] = 0
        with pytest.raises(ConfigError, match="takes no attention mask"):
            student(images, attention_mask=mask)
        with sp.dense_mode(student):
            masked = student(images, attention_mask=mask)
        assert same(masked, model(images, attention_mask=mask))
        assert not torch.equal(masked.last_hidden_state, whole)
    with pytest.raises(ConfigError, match="takes no attention mask"):
        sparse_layers(student)[0](torch.randn(1, 17, 32), is_causal=True)


def test_attention_weights_are_only_of_dense_layers(name):
    model, images = make(name), photos(1)
    model.set_attn_implementation("eager")
    student = sp.sparsify(model, SPARSE)
    with torch.no_grad():
        expected = model(images, output_attentions=True).attentions
        depth = host_of(student).blocks(student)
        assert len(expected) == len(depth)
        with pytest.raises(ConfigError, match=r"no weights to output: look at it with sparsifiner.capture"):
            student(images, output_attentions=True)
        assert len(student(images, output_hidden_states=True).hidden_states) == len(depth) + 1
        with sp.dense_mode(student):
            weights = student(images, output_attentions=True).attentions
        restored = sp.restore(student)(images, output_attentions=True).attentions
        assert [len(found) for found in (weights, restored)] == [len(depth)] * 2
        for found in (weights, restored):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_attention_weights_that_the_config_asks_for():
    model = make()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    student = sp.sparsify(model, SPARSE)
    with pytest.raises(ConfigError, match="no weights to output"):
        student(photos())
    with torch.no_grad():
        assert student(photos(), output_attentions=False).attentions is None
        with sp.dense_mode(student):
            assert len(student(photos()).attentions) == 2


def test_attention_dropout():
    with pytest.raises(UnsupportedModelError, match="make it with attention_probs_dropout_prob=0"):
        find_host(make(attention_probs_dropout_prob=0.1))
    with pytest.raises(UnsupportedModelError, match="make it with attention_dropout=0"):
        find_host(make("CLIPVisionModel", attention_dropout=0.1))
    model = make()
    model.vit.layers[1].attention.attention_dropout = 0.1
    with pytest.raises(UnsupportedModelError, match="attention dropout"):
        find_host(model)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("SwinModel", {"embed_dim": 8, "depths": [1], "num_heads": [1]}, "inside shifted windows"),
        ("BeitModel", SHAPE | MLP | {"use_relative_position_bias": True}, "relative-position bias"),
        ("BeitModel", SHAPE | MLP, "it is not one of the models of transformers that are known"),  # without that bias
        ("DINOv3ConvNextModel", {}, "none of its modules is called attention"),
        ("ViTMAEModel", SHAPE | MLP, "it shuffles the patches.*load its weights into a ViTModel"),
        ("Siglip2VisionModel", SHAPE | MLP | {"num_patches": 16}, "pads them, with a mask.*is a SiglipModel"),
        ("VitDetModel", SHAPE | {"use_relative_position_embeddings": True}, "relative-position bias"),
    ],
)
def test_models_that_cannot_be_converted_hear_why(name, settings, reason):
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**settings))
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        sp.sparsify(model, SPARSE)
    assert "supported: Hugging Face's ViT, DeiT" in str(caught.value)
    assert "timm" not in str(caught.value)  # the host that knows the library speaks
    assert "\n" not in str(caught.value)


# Larger models: what to call them with beside images, what they hold and where.
TOWER = SHAPE | MLP | {"num_channels": 3}
DINO = {"model_type": "dinov2", "mlp_ratio": 2, "out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
NECK = {"neck_hidden_sizes": [8, 8], "fusion_hidden_size": 8, "reassemble_factors": [2, 1]}
WORDS = {"input_ids": torch.tensor([[1, 2, 3]] * 3)}
HOLDERS = {
    "CLIPModel": ({"vision_config": VISION, "text_config": TEXT}, WORDS, "vision_model"),
    "SiglipModel": ({"vision_config": VISION, "text_config": TEXT | {"projection_size": 32}}, WORDS, "vision_model"),
    "MetaClip2Model": ({"vision_config": VISION, "text_config": TEXT | {"eos_token_id": 3}}, WORDS, "vision_model"),
    "OwlViTForObjectDetection": (
        {"vision_config": VISION, "text_config": TEXT | {"max_position_embeddings": 4}, "projection_dim": 8},
        WORDS,
        "owlvit.vision_model",
    ),
    "ViTForMaskedImageModeling": (SHAPE | MLP | {"encoder_stride": 8}, {}, "vit"),
    "YolosForObjectDetection": (SHAPE | MLP | OWN["Yolos"] | {"num_labels": 3}, {}, "vit"),
    "DepthAnythingForDepthEstimation": (
        {"backbone_config": SHAPE | DINO, "patch_size": 8, "reassemble_hidden_size": 32} | NECK,
        {},
        "backbone",
    ),
    "DPTForDepthEstimation": (
        SHAPE | MLP | NECK | {"backbone_out_indices": [0, 1], "num_hidden_layers": 2, "ignore_index": 1},
        {},
        "dpt",
    ),
    "VitPoseForPoseEstimation": (
        {"backbone_config": SHAPE | OWN["VitPose"] | {"model_type": "vitpose_backbone", "out_features": ["stage2"]}},
        {},
        "backbone",
    ),
    "TimmWrapperModel": ({"architecture": "test_vit", "model_args": {"img_size": 32}}, {}, "timm_model"),
}


def hold(name):
    settings, more, place = HOLDERS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model, {"pixel_values": photos()} | more, place


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("pattern", ["learned", "cells"])
def test_what_larger_models_hold_is_converted(name, pattern, tmp_path):
    model, arguments, place = hold(name)
    suggested = sp.suggest_config(model, 0.3, pattern=pattern)
    student = sp.sparsify(model, suggested.replace(keep=1.0))
    before = [type(part) for part in model.modules()]
    assert type(student) is type(model)
    with torch.no_grad():
        expected = model(**arguments)[0]
        assert torch.equal(student(**arguments)[0], expected)
        sp.reconfigure(student, keep=0.3)
        if pattern == "learned":
            assert sp.calibrate(student, photos(8)).images == 8
        sparse = student(**arguments)[0]
        assert bool(torch.isfinite(sparse).all())
        assert not torch.equal(sparse, expected)
        with sp.dense_mode(student):
            assert torch.equal(student(**arguments)[0], expected)
        assert torch.equal(copy.deepcopy(student)(**arguments)[0], sparse)
        with sp.capture(student, layers=[0]) as seen:
            assert torch.equal(student(**arguments)[0].isfinite(), sparse.isfinite())
        assert seen[0].full_map.shape[0] == 3
        restored = sp.restore(student)
        assert torch.equal(restored(**arguments)[0], expected)
    assert [type(part) for part in restored.modules()] == before
    assert list(restored.state_dict()) == list(model.state_dict())
    part = student.get_submodule(place)
    assert sp.count_flops(student).to_dict() == sp.count_flops(part).to_dict()
    features, _ = sp.feature_map(student, photos())
    assert features.shape[0] == 3
    with pytest.raises(UnsupportedModelError, match="it is sparse|is sparse already"):
        sp.sparsify(student, suggested)
    with pytest.raises(UnsupportedModelError, match=f"tokens cannot be dropped inside a {name}"):
        sp.reconfigure(student, tokens=sp.TokenConfig(0.5))
    with pytest.raises(UnsupportedModelError, match=f"only its {place} is converted: this is done with that part"):
        sp.distill(student, photos())
    path = tmp_path / "held.safetensors"
    sp.save(student, path)
    with torch.no_grad():
        assert torch.equal(sp.load(path, model=model)(**arguments)[0], sparse)
        if name == "TimmWrapperModel":
            with pytest.raises(CheckpointError, match=r"was not made by timm.create_model.*load\(path, model=...\)"):
                sp.load(path)
        else:
            assert torch.equal(sp.load(path)(**arguments)[0], sparse)


def test_models_with_a_language_model_are_loaded_into_one(tmp_path):
    text = {"model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16} | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = VISION | {"model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=39, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    words = torch.tensor([[1, *[39] * 16, 2]])
    student = sp.sparsify(model, sp.suggest_config(model, 0.3))
    with torch.no_grad():
        expected, out = (net(input_ids=words, pixel_values=photos(1)).logits for net in (model, student))
        assert not torch.equal(out, expected)
        with sp.dense_mode(student):
            assert torch.equal(student(input_ids=words, pixel_values=photos(1)).logits, expected)
        assert torch.equal(student(input_ids=words[:, :1]).logits, model(input_ids=words[:, :1]).logits)  # no image
        sp.save(student, tmp_path / "llava.safetensors")
        assert torch.equal(
            sp.load(tmp_path / "llava.safetensors", model=model)(input_ids=words, pixel_values=photos(1)).logits, out
        )
    message = r"'LlavaForConditionalGeneration' is no class.*make the model yourself and pass it as load\(path, model"
    with pytest.raises(CheckpointError, match=message):
        sp.load(tmp_path / "llava.safetensors")


def test_a_model_that_holds_several_is_to_be_told_apart():
    pair = nn.ModuleList([make(), make("Dinov2Model")])
    with pytest.raises(UnsupportedModelError, match=r"several encoders that can be converted \(0, 1\): convert each"):
        sp.sparsify(pair, SPARSE)


def test_what_a_larger_model_holds_may_be_refused():
    model, _, _ = hold("CLIPModel")
    model.vision_model.encoder.layers[0].self_attn.dropout = 0.1
    with pytest.raises(
        UnsupportedModelError, match=r"its vision_model, a CLIPVisionModel, cannot: it uses attention d"
    ):
        sp.sparsify(model, SPARSE)


def test_layers_in_windows_stay_and_the_report_says_so():
    from sparsifiner.report.html import _about

    student = sp.sparsify(make("Sam3ViTModel"), SPARSE)
    kinds = [type(layer.attention).__name__ for layer in student.layers]
    assert kinds == ["SparseAttention", "Sam3ViTRoPEAttention", "SparseAttention"]
    assert "1 (its attention works inside windows of 2 x 2 tokens)" in _about(student)
    assert "not converted" not in _about(sp.sparsify(make(), SPARSE))


def test_weights_of_a_vit_mae_fit_a_vit():
    """As its refusal says."""
    theirs = make("ViTMAEModel", mask_ratio=0.0)
    ours = make("ViTModel", False)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        expected = theirs(photos(), noise=torch.arange(16.0).expand(3, -1)).last_hidden_state
        torch.testing.assert_close(ours(photos()).last_hidden_state, expected)
    assert sparse_layers(sp.sparsify(ours, SPARSE))


def test_a_clip_tower_is_put_back_in_its_place():
    model = make("CLIPModel")
    images, words = photos(2), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        dense = model(words, images).logits_per_image
        model.vision_model = sp.sparsify(model.vision_model, sp.SparseConfig(1.0, n_down=4))
        assert torch.equal(model(words, images).logits_per_image, dense)
        sp.reconfigure(model.vision_model, keep=0.3)
        assert not torch.equal(model(words, images).logits_per_image, dense)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "Dinov2Model", "CLIPVisionModel"])
def test_an_older_transformers_is_to_be_upgraded(name, monkeypatch):
    member, model = huggingface.MEMBERS[name], make(name)
    tower = model.get_submodule(member.tower)
    first = ".".join(map(str, member.family.since))
    assert find_host(model).name == "huggingface"
    for block in tower.get_submodule(member.family.blocks):
        setattr(block, member.family.place, nn.Identity())
    with pytest.raises(UnsupportedModelError, match=f"its blocks hold no {member.family.attention.kind}"):
        find_host(model)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    message = f"transformers 5.3.0 builds it as before {first}: upgrade, pip install 'transformers>={first}'"
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        find_host(model)
    delattr(tower, member.family.blocks.partition(".")[0])  # blocks elsewhere altogether
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        find_host(model)


# Without transformers


def without_transformers(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))


def test_the_table_has_what_is_installed(monkeypatch):
    assert list(hosts.table()) == ["timm", "video", "huggingface"]
    without_transformers(monkeypatch)
    assert list(hosts.table()) == ["timm"]
    with pytest.raises(UnsupportedModelError, match="it is not a model of timm .supported"):
        find_host(make())


def test_timm_models_do_not_import_transformers():
    code = """
        import sys, timm, torch, sparsifiner as sp
        model = timm.create_model("test_vit", num_classes=3)
        student = sp.sparsify(model, sp.SparseConfig(0.5, n_down=4))
        student(torch.zeros(1, 3, 160, 160))
        sp.count_flops(student)
        try:
            sp.sparsify(torch.nn.Linear(1, 1), sp.SparseConfig(0.5))
        except sp.SparsifinerError as error:
            assert "it is not a model of timm or transformers" in str(error), error
        print("transformers" in sys.modules)
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.fixture(scope="module")
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 15, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((450, 300), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "CLIP", "Bit"])  # Bit's is DINOv2's
def test_image_files_are_made_ready_as_the_processor_would(kind, picture):
    own = {"size": {"shortest_edge": 256}} if kind == "Bit" else {}
    processor = getattr(transformers, f"{kind}ImageProcessor")(**own)
    model = make(image_size=224, patch_size=32)
    model.pretrained_cfg = huggingface.data_config(processor)
    found = preprocessing(sp.sparsify(model, SPARSE))(picture)
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    assert found.shape == expected.shape == (3, 224, 224)
    assert (found - expected).abs().max() < 0.05  # rounding to 8 bits, in PIL and in torchvision
    assert expected.std() > 0.4


def test_processors_that_are_more_than_that_are_refused():
    for settings, message in (
        ({"do_normalize": False}, "do_normalize is off"),
        ({"rescale_factor": 1 / 127.5}, "rescales by"),
        ({"size": {"shortest_edge": 224}}, "images of many sizes"),
        ({"resample": 5}, "resizes by"),
    ):
        with pytest.raises(ConfigError, match=message):
            huggingface.data_config(transformers.ViTImageProcessor(**settings))


def test_checkpoints_keep_how_images_are_made_ready(picture, tmp_path):
    """So the command line reads image files for transformers' models too, and does not guess where it cannot know."""
    for name in ("ant", "bee", "cat", "dog", "elk"):
        (tmp_path / "images" / name).mkdir(parents=True)
        picture.rotate(ord(name[0])).save(tmp_path / "images" / name / "0.png")
    model = make()
    sp.save(sp.sparsify(model, SPARSE), tmp_path / "silent.safetensors")
    arguments = ["--data", str(tmp_path / "images"), "--json"]
    refused = CliRunner().invoke(app, ["eval", str(tmp_path / "silent.safetensors"), *arguments])
    assert isinstance(refused.exception, DataError)
    assert "does not say how its images are made ready" in str(refused.exception)

    model.pretrained_cfg = huggingface.data_config(transformers.ViTImageProcessor(size={"height": 32, "width": 32}))
    sp.save(sp.sparsify(model, SPARSE), tmp_path / "student.safetensors")
    loaded = sp.load(tmp_path / "student.safetensors")
    assert loaded.pretrained_cfg == model.pretrained_cfg
    result = CliRunner().invoke(app, ["eval", str(tmp_path / "student.safetensors"), *arguments])
    dense = json.loads(result.stdout)["rows"][0]
    transform = preprocessing(loaded)
    with torch.no_grad():
        pixels = [transform(Image.open(path)) for path in sorted((tmp_path / "images").glob("*/*"))]
        right = model(torch.stack(pixels)).logits.argmax(1) == torch.arange(5)
    assert dense["top1"] == pytest.approx(100 * right.double().mean().item())
    assert dense["images"] == 5


@pytest.mark.parametrize(
    "nonsense",
    ["all of them", [1, 2], {"mean": "grey", "std": [1, 1, 1]}, {"crop_pct": "most"}, {"interpolation": "magic"}, {}],
)
def test_a_checkpoint_with_nonsense_for_its_images_is_refused(nonsense, tmp_path):
    student = sp.sparsify(make(), SPARSE)
    student.pretrained_cfg = nonsense
    sp.save(student, tmp_path / "student.safetensors")
    with pytest.raises(CheckpointError, match="images cannot be made ready as the file says"):
        sp.load(tmp_path / "student.safetensors")
