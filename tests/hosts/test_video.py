"""Encoders of clips: converted at keep 1 they are the host, sparse they are what the reference says."""

import copy
import math
import pickle

import pytest
import torch
import transformers

import sparsifiner as sp
from sparsifiner.convert import find_host, host_of, sparse_layers
from sparsifiner.data.images import preprocessing
from sparsifiner.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError
from sparsifiner.inspect.features import feature_map
from sparsifiner.inspect.statistics import measure
from sparsifiner.inspect.survey import survey
from sparsifiner.ops import reference

SHAPE = {"patch_size": 8, "tubelet_size": 2, "num_hidden_layers": 2, "num_labels": 5}
PREDICTOR = {
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 1,
    "pred_num_mask_tokens": 2,
}
CONFIGS = {
    "VideoMAE": (
        transformers.VideoMAEConfig,
        SHAPE
        | {"image_size": 32, "num_frames": 8, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    ),
    # Heads of 20: six features turn with the frame, six with the row, six with the column, and two with nothing.
    "VJEPA2": (
        transformers.VJEPA2Config,
        SHAPE
        | PREDICTOR
        | {"crop_size": 32, "frames_per_clip": 8, "hidden_size": 40, "num_attention_heads": 2, "mlp_ratio": 2.0}
        | {"num_pooler_layers": 1},
    ),
}
NAMES = ("VideoMAEModel", "VideoMAEForVideoClassification", "VJEPA2Model", "VJEPA2ForVideoClassification")
CELLS = {"pattern": "cells", "cells": ((1, 2, 2), (2, 2, 4)), "tile": (2, 2, 2)}
LEARNED = {"pattern": "learned", "n_down": 8, "tau": 0.0, "basis_threshold": 0.0}


def make(name="VideoMAEModel", **settings):
    config, own = next(CONFIGS[start] for start in CONFIGS if name.startswith(start))
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**(own | settings)))
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros, no ones: every weight must be in its place
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.3)
    return model.eval()


def clips(count=2, frames=8, size=(32, 32)):
    return torch.randn(count, frames, 3, *size, generator=torch.Generator().manual_seed(1))


def out(model, inputs, **settings):
    """What is compared with a teacher; V-JEPA 2's own predictor, which stays dense, is left out."""
    return host_of(model).logits(model, model(inputs, **host_of(model).settings(model), **settings))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize("form", [CELLS, LEARNED], ids=["cells", "learned"])
@torch.no_grad()
def test_members(name, form, tmp_path):
    """Dense bit for bit where it is dense, the reference's output where it is not, and the same from a file."""
    model, inputs = make(name), clips()
    expected = out(model, inputs)
    student = sp.sparsify(model, sp.SparseConfig(keep=1.0, **form))
    layers = sparse_layers(student)
    assert len(layers) == 2
    assert (layers[0].grid.size, layers[0].grid.num_prefix) == ((4, 4, 4), 0)
    assert torch.equal(out(student, inputs), expected)
    sp.reconfigure(student, keep=0.25)
    found = {}
    for backend in ("reference", "eager", "cpu"):
        sp.reconfigure(student, backend=backend)
        found[backend] = out(student, inputs)
        torch.testing.assert_close(found[backend], found["reference"], rtol=1e-4, atol=1e-4)
    assert (found["cpu"] - expected).abs().max() > 1e-2  # sparse, and not by a little
    with sp.dense_mode(student):
        assert torch.equal(out(student, inputs), expected)
    assert torch.equal(out(copy.deepcopy(student), inputs), found["cpu"])
    restored = sp.restore(student)
    assert type(restored) is type(model)
    assert list(restored.state_dict()) == list(model.state_dict())
    assert torch.equal(out(restored, inputs), expected)
    sp.save(student, tmp_path / "a.safetensors")
    assert torch.equal(out(sp.load(tmp_path / "a.safetensors"), inputs), found["cpu"])
    sp.save(student, tmp_path / "b.safetensors", host_weights=False)
    assert torch.equal(out(sp.load(tmp_path / "b.safetensors", model=model), inputs), found["cpu"])


@torch.no_grad()
def test_what_a_layer_attends_to(name):
    """Its output is attention over the very queries, keys and values that the host's own attention sees."""
    model, inputs = make(name), clips(1)
    student, seen = sp.sparsify(model, sp.SparseConfig(0.25, **CELLS)), []
    for layer in sparse_layers(student):
        layer.core = lambda layer, q, k, v: seen.append(1) or reference.full_attention(q, k, layer.scale) @ v
    torch.testing.assert_close(out(student, inputs), out(model, inputs), rtol=1e-4, atol=1e-4)
    assert len(seen) == 2


def test_gradients_reach_everything(name):
    student = sp.sparsify(make(name), sp.SparseConfig(0.4, **LEARNED)).train()
    inputs = clips()
    out(student, inputs).square().sum().backward()
    unused = host_of(student).unused(student)
    missing = {name for name, parameter in student.named_parameters() if parameter.grad is None}
    assert missing == unused
    student.zero_grad()
    sp.reconfigure(student, backend="reference", **CELLS)
    results = []
    for backend in ("reference", "cpu"):
        sp.reconfigure(student, backend=backend)
        student.zero_grad()
        out(student, inputs).square().sum().backward()
        results.append([p.grad for n, p in student.named_parameters() if p.grad is not None])
    largest = max(float(one.abs().max()) for one in results[0])  # some, of keys' biases, are nothing but rounding
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * largest)


def test_counts(name):
    """The parts add up to torch's own count of the host, whose predictor is left out; fewer tokens cost less."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make(name)
    student = sp.sparsify(model, sp.SparseConfig(1.0, **CELLS))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out(model, clips(1))
    count = sp.count_flops(student)
    assert count.total == count.dense_total == counter.get_total_flops() / 2
    width = student.config.hidden_size
    assert count.projections == 2 * 4 * 64 * width * width
    assert count.attention == 2 * 2 * 64 * 64 * width
    assert count.mlp == 2 * 2 * 64 * width * (48 if "MAE" in name else 2 * width)
    sp.reconfigure(student, keep=0.25)
    sparse = sp.count_flops(student, clips(2), convention="measured")
    assert 0 < sparse.attention < count.attention
    sp.reconfigure(student, tokens=sp.TokenConfig(0.5, blocks=[0]))
    assert sp.count_flops(student).mlp == count.mlp / 2


@pytest.mark.parametrize("fuse", [False, True, "official"])
@torch.no_grad()
def test_dropped_tokens(name, fuse):
    """What is left is attended to as the reference says; a dense layer turns queries by where they stood."""
    tokens = sp.TokenConfig(0.5, blocks=[0], fuse=fuse)
    student = sp.sparsify(make(name), sp.SparseConfig(0.25, tokens=tokens, backend="reference", **CELLS))
    inputs = clips()
    expected = out(student, inputs)
    sp.reconfigure(student, backend="cpu")
    torch.testing.assert_close(out(student, inputs), expected, rtol=1e-4, atol=1e-4)
    layer = sparse_layers(student)[1]
    sp.reconfigure(student, keep=1.0)
    dense = out(student, inputs)
    layer.core = lambda layer, q, k, v: reference.full_attention(q, k, layer.scale) @ v
    torch.testing.assert_close(dense, out(student, inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_features_on_the_grid(name):
    student = sp.sparsify(make(name), sp.SparseConfig(0.5, tokens=sp.TokenConfig(0.5, blocks=[1]), **CELLS))
    features, kept = feature_map(student, clips())
    assert features.shape == (2, student.config.hidden_size, 4, 4, 4)
    assert kept.shape == (2, 4, 4, 4)
    assert kept.flatten(1).sum(1).tolist() == [32, 32]


@torch.no_grad()
def test_masked_patches_are_dropped_tokens():
    """VideoMAE takes masked patches out: cells hold what is left of them."""
    model, inputs = make(), clips()
    masked = torch.zeros(2, 64, dtype=torch.bool)
    masked[0, ::2], masked[1, 13:45] = True, True
    student = sp.sparsify(model, sp.SparseConfig(1.0, **CELLS))
    expected = model(inputs, masked).last_hidden_state
    assert torch.equal(student(inputs, masked).last_hidden_state, expected)
    sp.reconfigure(student, keep=0.2, backend="reference")
    sparse = student(inputs, bool_masked_pos=masked).last_hidden_state
    assert (sparse - expected).abs().max() > 1e-2
    sp.reconfigure(student, backend="cpu")
    torch.testing.assert_close(student(inputs, masked).last_hidden_state, sparse, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_vjepa_takes_clips_of_any_size():
    model = make("VJEPA2Model")
    student = sp.sparsify(model, sp.SparseConfig(1.0, **LEARNED))
    for frames, size in ((8, (32, 32)), (12, (48, 40)), (1, (32, 32)), (5, (35, 24))):
        inputs = clips(1, frames, size)
        assert torch.equal(out(student, inputs), out(model, inputs))
        count = max(frames, 2) // 2
        assert sparse_layers(student)[0].grid.size == (count, size[0] // 8, size[1] // 8)
    sp.reconfigure(student, keep=0.3, backend="reference")
    inputs = clips(1, 12, (48, 40))
    expected = out(student, inputs)  # predictors of 4 x 4 x 4 patches, resampled to 6 x 6 x 5
    sp.reconfigure(student, backend="cpu")
    torch.testing.assert_close(out(student, inputs), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_predictor_of_vjepa_stays_dense():
    model, inputs = make("VJEPA2Model"), clips()
    assert list(host_of(model).left_dense(model)) == ["predictor.layer.0.attention"]
    classifier = make("VJEPA2ForVideoClassification")
    assert "it is the pooler's" in " ".join(host_of(classifier).left_dense(classifier).values())
    said = str(survey(model))
    assert "tokens: 64 at 8 frames of 32 x 32 pixels (4 x 4 x 4 patches and 0 others)" in said
    assert "1 stay dense (predictor.layer.0.attention): it is the predictor's" in said
    student = sp.sparsify(model, sp.SparseConfig(1.0, **CELLS))
    assert all("predictor" not in site.name for site in host_of(student).sites(model))
    expected = model(inputs).predictor_output.last_hidden_state
    assert torch.equal(student(inputs).predictor_output.last_hidden_state, expected)
    sp.reconfigure(student, keep=0.25)
    assert student(inputs).predictor_output.last_hidden_state.shape == expected.shape


def test_calibration_fits_the_attention():
    student = sp.sparsify(make("VJEPA2Model"), sp.SparseConfig(0.3, **LEARNED))
    inputs = clips(6)
    before = measure(student, inputs)
    report = sp.calibrate(student, inputs)
    assert report.images == 6
    assert sum(layer.recall for layer in measure(student, inputs)) > sum(layer.recall for layer in before)


@torch.no_grad()
def test_what_is_suggested(name):
    model = make(name)
    student = sp.sparsify(model, sp.suggest_config(model, 0.3))
    config = sp.config_of(student)
    assert (config.pattern, config.tile, config.cells) == ("cells", (2, 2, 4), ((2, 1, 2), (4, 2, 4)))
    assert torch.isfinite(out(student, clips())).all()
    learned = sp.suggest_config(model, 0.3, pattern="learned")
    assert learned.n_down <= 64
    assert torch.isfinite(out(sp.sparsify(model, learned), clips())).all()


def test_what_is_suggested_for_short_clips():
    model = make("VJEPA2Model", frames_per_clip=4)
    assert sp.suggest_config(model, 0.3).cells == ((2, 1, 2),)
    model = make("VJEPA2Model", frames_per_clip=2)
    assert sp.suggest_config(model, 0.3).cells == ((1, 1, 2),)
    assert torch.isfinite(out(sp.sparsify(model, sp.suggest_config(model, 0.3)), clips(1, 2))).all()


@pytest.mark.parametrize("pattern", ["window", "axial", "strided", "bigbird", "linformer"])
@torch.no_grad()
def test_fixed_patterns(pattern):
    model, inputs = make(), clips(1)
    student = sp.sparsify(model, sp.SparseConfig(0.2, n_down=8, pattern=pattern, backend="reference"))
    expected = out(student, inputs)
    sp.reconfigure(student, backend="cpu")
    torch.testing.assert_close(out(student, inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["VideoMAEForVideoClassification", "VJEPA2ForVideoClassification"])
@torch.no_grad()
def test_compiles_as_one_graph(kind):
    student, inputs = sp.sparsify(make(kind), sp.SparseConfig(0.3, **CELLS)), clips(1)
    compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs).logits, student(inputs).logits, rtol=1e-4, atol=1e-4)


def test_distillation_of_clips():
    student = sp.sparsify(make("VJEPA2Model"), sp.SparseConfig(0.3, **CELLS))
    settings = {
        "phase1_epochs": 0,
        "phase2_epochs": 1,
        "batch_size": 2,
        "pattern": "cells",
        "log_every": 1,
        "label_weight": 0.0,
    }
    lines = sp.distill(student, clips(4), sp.Recipe(mixup=0.0, cutmix=0.0, **settings)).lines
    assert all(math.isfinite(line["loss"]) for line in lines)
    with pytest.raises(ConfigError, match="mixup and cutmix mix images: set both to 0 for clips"):
        sp.distill(student, clips(4), sp.Recipe(**settings))


def test_attention_weights_are_only_of_dense_layers(name):
    model, inputs = make(name), clips(1)
    model.set_attn_implementation("eager")
    student = sp.sparsify(model, sp.SparseConfig(0.3, **CELLS))
    with torch.no_grad():
        expected = model(inputs, output_attentions=True).attentions
        assert len(expected) == 2
        with pytest.raises(ConfigError, match=r"no weights to output: look at it with sparsifiner.capture"):
            student(inputs, output_attentions=True)
        assert len(student(inputs, output_hidden_states=True).hidden_states) == 3
        with sp.dense_mode(student):
            weights = student(inputs, output_attentions=True).attentions
        restored = sp.restore(student)(inputs, output_attentions=True).attentions
        for found in (weights, restored):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_bad_input(tmp_path):
    student = sp.sparsify(make(), sp.SparseConfig(0.3, **CELLS))
    with pytest.raises(DataError, match="clips are 6 frames of 32 x 32 but the model takes 8 of 32 x 32"):
        student(clips(1, 6))
    with pytest.raises(DataError, match=r"expected clips \[batch, frames, channels, height, width\], got a tensor of"):
        student(clips(1)[0])
    with pytest.raises(DataError, match="takes clips of 8 frames, which are not read from image files"):
        preprocessing(student)
    jepa = sp.sparsify(make("VJEPA2Model"), sp.SparseConfig(0.3, **CELLS))
    with pytest.raises(ConfigError, match="sees whole clips: set keep=1.0, or call it without position_mask"):
        sparse_layers(jepa)[0](torch.randn(1, 64, 40), position_mask=torch.arange(64)[None])
    for kind, setting in (("VideoMAEModel", 0.1), ("VJEPA2Model", 0.1)):
        with pytest.raises(UnsupportedModelError, match="make it with attention_probs_dropout_prob=0"):
            find_host(make(kind, attention_probs_dropout_prob=setting))
    decoder = {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2}
    config = transformers.VideoMAEConfig(**CONFIGS["VideoMAE"][1], **decoder)
    whole = sp.sparsify(transformers.VideoMAEForPreTraining(config), sp.SparseConfig(0.3, **CELLS))
    assert len(sparse_layers(whole)) == 2  # of the encoder in it
    sp.save(student, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="belongs to video VideoMAEModel, not to a VJEPA2Model"):
        sp.load(tmp_path / "a.safetensors", model=make("VJEPA2Model"))
    with pytest.raises(ConfigError, match="cells of 8 x 2 x 2 patches are larger than the grid of 4 x 4 x 4"):
        sp.reconfigure(student, cells=((8, 2, 2),)) or student(clips(1))


def test_a_grid_of_an_image_has_no_frames():
    from ..toys import make_vit

    for settings in ({"tile": (2, 2, 2), "n_down": 4}, {"pattern": "cells", "cells": ((2, 2, 2),)}):
        with pytest.raises(ConfigError, match="2 x 2 x 2 patches is 2 frames deep and the model's grid of 5 x 5 "):
            sp.sparsify(make_vit(), sp.SparseConfig(0.3, **settings))


@torch.no_grad()
def test_pickles_give_the_same(name):
    tokens = sp.TokenConfig(method="dynamicvit", keep=0.5, fuse=False, blocks=(1,))
    student = sp.sparsify(make(name), sp.SparseConfig(0.3, tokens=tokens, **CELLS))
    twin = pickle.loads(pickle.dumps(student))  # our own bytes
    assert torch.equal(out(twin, clips()), out(student, clips()))


def test_copies_watch_their_own_grid():
    student = sp.sparsify(make("VJEPA2Model"), sp.SparseConfig(0.3, **CELLS))
    twin = copy.deepcopy(student)
    out(twin, clips(1, 4, (48, 32)))
    assert sparse_layers(twin)[0].grid.size == (2, 6, 4)
    assert sparse_layers(student)[0].grid.size == (4, 4, 4)


def test_capture_sees_the_true_attention(name):
    model, inputs = make(name), clips(1)
    model.set_attn_implementation("eager")
    student = sp.sparsify(model, sp.SparseConfig(0.3, **CELLS))
    with torch.no_grad():
        weights = model(inputs, output_attentions=True).attentions[0]
        with sp.capture(student, layers=[0]) as seen:
            out(student, inputs)
    torch.testing.assert_close(seen[0].full_map, weights, rtol=1e-4, atol=1e-5)
    assert seen[0].grid == (4, 4, 4)
    used = seen[0].sparse_map * (1 - seen[0].estimate.sum(-1, keepdim=True)) + seen[0].estimate
    torch.testing.assert_close(used.sum(-1), torch.ones(used.shape[:3]), rtol=1e-4, atol=1e-5)
