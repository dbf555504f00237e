"""Every member of the family: converted at keep 1 it is the host, sparse it runs, restored it is the host."""

import functools

import pytest
import timm
import torch

import sparsifiner as sp
from sparsifiner.convert import find_host, sparse_layers
from sparsifiner.errors import ConfigError, DataError, UnsupportedModelError

from ..toys import make_eva, make_vit, sharpen

FAMILY = {
    "deit tiny": {"name": "deit_tiny_patch16_224"},
    "deit small": {"name": "deit_small_patch16_224"},
    "deit base": {"name": "deit_base_patch16_224"},
    "deit distilled, two prefix tokens": {"name": "deit_tiny_distilled_patch16_224"},
    "deit-3, layer scale": {"name": "deit3_small_patch16_224"},
    "vit, patch 32": {"name": "vit_tiny_patch16_224", "patch_size": 32},
    "vit, patch 14": {"name": "vit_tiny_patch16_224", "patch_size": 14, "img_size": 112},
    "dinov2": {"name": "vit_small_patch14_dinov2", "img_size": 112},
    "dinov2 with registers": {"name": "vit_small_patch14_reg4_dinov2", "img_size": 112},
    "average pooling, no class token": {
        "name": "vit_base_patch16_siglip_224",
        "global_pool": "avg",
        "img_size": 96,
    },
    "attention pooling": {"name": "vit_base_patch16_siglip_224", "img_size": 96},
    "clip, norm before the blocks": {"name": "vit_base_patch32_clip_224", "img_size": 96},
    "parallel blocks": {"name": "vit_small_patch16_18x2_224"},
    "eva, no rotary embedding": {"name": "eva_giant_patch14_224", "img_size": 56, "embed_dim": 88, "num_heads": 2},
    "eva-02, swiglu and norms inside": {
        "name": "eva02_base_patch14_224",
        "img_size": 56,
        "embed_dim": 48,
        "num_heads": 3,
    },
    "dinov3": {"name": "vit_small_patch16_dinov3", "img_size": 96},
    "perception encoder": {"name": "vit_pe_core_tiny_patch16_384", "img_size": 96},
    "rope-vit, a table a layer": {"name": "vit_small_patch16_rope_mixed_224", "img_size": 96},
    "rope and registers": {"name": "vit_medium_patch16_rope_reg1_gap_256", "img_size": 96},
}


def build(name: str, **arguments):
    arguments = {"num_classes": 5} | arguments
    if "depth" not in arguments:
        arguments["depth"] = 2
    return sharpen(timm.create_model(name, **arguments))


def check(model, size):
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected = model(images)
        student = sp.sparsify(model, sp.SparseConfig(keep=1.0, n_down=4))
        assert torch.equal(student(images), expected)
        sp.reconfigure(student, keep=0.2, tau=0.0, basis_threshold=0.0)
        sparse = student(images)
        assert sparse.shape == expected.shape
        assert bool(torch.isfinite(sparse).all())
        assert not torch.equal(sparse, expected)
        restored = sp.restore(student)
        assert torch.equal(restored(images), expected)
    assert list(restored.state_dict()) == list(model.state_dict())
    ours = {name for name in student.state_dict() if name not in model.state_dict()}
    assert all(".predictor.w_" in name for name in ours)
    assert len(ours) == 2 * len(sparse_layers(student))
    return student


@pytest.mark.parametrize("member", FAMILY)
def test_family(member):
    arguments = dict(FAMILY[member])
    model = build(arguments.pop("name"), **arguments)
    check(model, model.patch_embed.img_size)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_heads": 2, "embed_dim": 20},  # head dimension 10
        {"num_heads": 1},
        {"img_size": (12, 28)},
        {"patch_size": (2, 5)},
        {"qk_norm": True, "norm_layer": torch.nn.LayerNorm},
        {"scale_attn_norm": True, "norm_layer": torch.nn.LayerNorm},
        {"reg_tokens": 4},
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "reg_tokens": 2, "global_pool": "avg"},
        {"no_embed_class": True},
        {"init_values": 0.5},
        {"qkv_bias": False},
        {"num_classes": 0},
        {"block_fn": timm.models.vision_transformer.ResPostBlock},
    ],
    ids=str,
)
def test_variants(arguments):
    model = make_vit(**arguments)
    check(model, model.patch_embed.img_size)


def test_attention_that_gates_its_output():
    model = make_vit()
    for block in model.blocks:
        block.attn = timm.layers.attention.Attention(24, num_heads=3, gated=True)
    sharpen(model)
    student = check(model, (20, 20))
    layer = sparse_layers(student)[0]
    x = torch.randn(2, 26, 24)
    q, k, v = layer.adapter.qkv(layer.host, x, None)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(layer.adapter.project(layer.host, heads, x, None), layer.host(x))


EVA = [
    {},
    {"use_rot_pos_emb": False},
    {"rope_type": "mixed"},
    {"rope_type": "mixed", "class_token": False},
    {"rope_type": "dinov3", "rope_rotate_half": True, "num_reg_tokens": 4, "use_abs_pos_emb": False},
    {"rope_type": "mrope", "rope_mrope_section": (1, 1, 2)},
    {"img_size": (12, 28), "patch_size": (2, 4)},
    {"qkv_fused": False, "scale_attn_inner": True},
    {"qkv_bias": False},
    {"swiglu_mlp": True, "scale_mlp": True},
    {"swiglu_mlp": True, "init_values": 0.5},
    {"init_values": 0.5, "attn_only_layer_scale": True},
    {"use_post_norm": True},
    {"qk_norm": True, "norm_layer": torch.nn.LayerNorm},
    {"attn_type": "rope"},
    {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1, "embed_dim": 48},
    {"global_pool": "map"},
    {"global_pool": "token", "num_classes": 0},
]


def follows_its_host(student, images):
    """Queries, keys and values of each layer, rotated and all, make with dense attention what the host makes."""

    def compare(layer, arguments, settings, expected):
        x, context, _ = layer.adapter.arguments(layer.host, *arguments, **settings)
        q, k, v = layer.adapter.qkv(layer.host, x, context)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
        torch.testing.assert_close(layer.adapter.project(layer.host, heads, x, context), expected)
        seen.append(layer)

    seen = []
    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in sparse_layers(student)]
    with sp.dense_mode(student), torch.inference_mode():
        student(images)
    for hook in hooks:
        hook.remove()
    assert seen == sparse_layers(student)


@pytest.mark.parametrize("arguments", EVA, ids=str)
def test_eva(arguments):
    model = make_eva(**arguments)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    student = check(model, model.patch_embed.img_size)
    twin = sp.restore(student)
    results = []
    for backend in ("cpu", "reference"):
        sp.reconfigure(student, backend=backend)
        with torch.inference_mode():
            results.append(student(images))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert (results[0] - twin(images)).abs().max() > 1e-3
    follows_its_host(student, images)


@pytest.mark.parametrize("arguments", [{}, {"rope_type": "mixed"}, {"use_post_norm": True}], ids=str)
@pytest.mark.parametrize("pattern", ["learned", "cells"])
def test_what_eva_does_with_rotary_tables_else(arguments, pattern, tmp_path):
    """Training, compilation, other sizes, features, tokens that are dropped; checkpoints of models that have a name."""
    model = make_eva(**arguments, dynamic_img_size=True)
    student = sp.sparsify(model, sp.SparseConfig(0.3, n_down=5, tau=0.0, basis_threshold=0.0, pattern=pattern))
    images = torch.randn(2, 3, 20, 20)
    student.train()
    student(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    student.eval()
    torch.compiler.reset()
    compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), student(images), rtol=1e-4, atol=1e-5)
        (last,) = student.forward_intermediates(images, indices=1, intermediates_only=True)
        torch.testing.assert_close(last, sp.feature_map(student, images)[0])
        wide = torch.randn(2, 3, 12, 36)
        with sp.dense_mode(student):
            torch.testing.assert_close(student(wide), model(wide))
        assert not torch.allclose(student(wide), model(wide), atol=1e-4)
        everything = student(images)
        for tokens in (sp.TokenConfig(0.6, blocks=(0,), fuse="official"), sp.TokenConfig(0.6, blocks=(0, 1))):
            sp.reconfigure(student, tokens=tokens)
            dropped = student(images)
            assert not torch.allclose(dropped, everything, atol=1e-4)
            layer = sparse_layers(student)[1]
            assert layer.grid.cells.shape[1] == (15 if len(tokens.blocks) == 1 else 9)
            sp.reconfigure(student, dense=(1,))  # a dense layer among tokens that were dropped turns them too
            assert bool(torch.isfinite(student(images)).all())
            sp.reconfigure(student, dense=(), tokens=None)


def test_dropped_tokens_are_rotated_by_their_own_places():
    """Dense attention over the tokens that are left is the host's, with all others masked out."""
    model = make_eva(rope_type="dinov3", num_reg_tokens=2)
    config = sp.SparseConfig(1.0, n_down=5, tokens=sp.TokenConfig(0.6, blocks=(0,), fuse=False))
    student, images = sp.sparsify(model, config), torch.randn(2, 3, 20, 20)
    seen = {}
    student.blocks[1].register_forward_hook(lambda block, inputs, output: seen.update(x=inputs[0], out=output))
    with torch.no_grad():
        student(images)
        cells, rope = student.blocks[1].attn.grid.cells, model.rope.get_embed()
        tokens = torch.cat([torch.arange(3).expand(2, -1), cells + 3], dim=1)
        x = torch.zeros(2, 28, 24).scatter(1, tokens[..., None].expand(-1, -1, 24), seen["x"])
        mask = torch.zeros(2, 1, 28, 28, dtype=torch.bool).scatter(3, tokens[:, None, None].expand(-1, 1, 28, -1), True)
        expected = model.blocks[1](x, rope=rope, attn_mask=mask)
    torch.testing.assert_close(seen["out"], expected.gather(1, tokens[..., None].expand(-1, -1, 24)))


def test_blocks_that_do_both_halves_at_once():
    block = timm.models.vision_transformer.ParallelScalingBlock
    for settings in ({}, {"fuse_out_proj": True}):
        model = make_vit(block_fn=functools.partial(block, **settings), qkv_bias=bool(settings), init_values=0.5)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        student = check(model, (20, 20))
        follows_its_host(student, torch.randn(2, 3, 20, 20))
        student.train()(torch.randn(2, 3, 20, 20)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        sp.calibrate(student, torch.randn(4, 3, 20, 20))
        assert sp.count_flops(student).total > 0
        with pytest.raises(UnsupportedModelError, match="cannot be dropped in a ParallelScalingBlock"):
            sp.reconfigure(student, tokens=sp.TokenConfig(0.5))


def test_masks_are_refused_by_rotary_attention_too():
    student = sp.sparsify(make_eva(), sp.SparseConfig(0.3, n_down=5))
    images, mask = torch.randn(1, 3, 20, 20), torch.ones(26, 26, dtype=torch.bool)
    with pytest.raises(ConfigError, match="takes no attention mask"):
        student(images, attn_mask=mask)
    with pytest.raises(ConfigError, match="takes no attention mask"):
        student(images, is_causal=True)
    with sp.dense_mode(student):
        torch.testing.assert_close(student(images, attn_mask=mask), student(images))


def test_unfused_attention_is_the_same_host():
    model = make_vit()
    for block in model.blocks:
        block.attn.fused_attn = False
    check(model, (20, 20))


WINDOWS = "its attention already works inside shifted windows, not over all tokens"
RELATIVE = "it adds a relative-position bias to the attention logits"
NONE = "none of its modules is called attention"
OTHER = "it is not a timm VisionTransformer or Eva"

# One of each kind, small ones; what was said of them was read in timm's sources.
REFUSED = {
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "qwen3_vit_88m_enc": OTHER,
    "beit_base_patch16_224": RELATIVE,
    "vit_relpos_small_patch16_224": RELATIVE,
    "samvit_base_patch16": RELATIVE,
    "coatnet_nano_rw_224": RELATIVE,  # of one class with MaxViT, without its windows
    "efficientformer_l1": RELATIVE,
    "efficientformerv2_s0": RELATIVE,
    "levit_128s": RELATIVE,
    "tiny_vit_5m_224": RELATIVE,
    "mvitv2_tiny": RELATIVE,
    "maxvit_nano_rw_256": "inside windows and grids",
    "davit_tiny": "inside windows and over channels",
    "cait_xxs24_224": "talking-heads",
    "xcit_nano_12_p16_224": "over channels",
    "shvit_s1": "its attention has one head",
    "efficientvit_b0": "its attention is linear",
    "efficientvit_m0": "its heads run one after the other",
    "pit_ti_224": OTHER,
    "caformer_s18": OTHER,
    "pvt_v2_b0": OTHER,
    "naflexvit_base_patch16_gap": "it pads images of many sizes to one length",
    "mobilevit_xxs": OTHER,
    "resnest14d": OTHER,  # its "split attention" is of channels
    "resnet18": NONE,
    "mixer_s32_224": NONE,
    "convformer_s18": NONE,
    "focalnet_tiny_srf": NONE,
    "vit_dpwee_patch16_reg1_gap_256": "its blocks .DiffParallelScalingBlock. hold no attention module of a known kind",
    "vit_dwee_patch16_reg1_gap_256": "its blocks .Block. hold no attention module of a known kind",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_converted_hear_why(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]) as caught:
        sp.sparsify(model, sp.SparseConfig(0.5))
    assert "supported: timm's VisionTransformer and Eva families" in str(caught.value)
    assert "Hugging Face" not in str(caught.value)  # the host that knows the library speaks
    assert "\n" not in str(caught.value)


def test_models_of_no_library_hear_why():
    from torchvision.models import vit_b_16

    with torch.device("meta"):
        foreign = vit_b_16()
    with pytest.raises(UnsupportedModelError, match="it is not a model of timm or transformers") as caught:
        find_host(foreign)
    assert "timm's VisionTransformer and Eva families" in str(caught.value)
    assert "Hugging Face's ViT" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="holds a model.*this is done with its module, a VisionTransformer"):
        find_host(torch.nn.DataParallel(make_vit()))


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"]
)
def test_features_only_is_converted_inside(name, tmp_path):
    net = timm.create_model(name, img_size=64, depth=3, features_only=True).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = net(images)
        student = sp.sparsify(net, sp.SparseConfig(1.0, n_down=4))
        assert all(torch.equal(one, other) for one, other in zip(student(images), expected, strict=True))
        sp.reconfigure(student, keep=0.2)
        sp.calibrate(student, images)
        sparse = student(images)
        assert not torch.allclose(sparse[-1], expected[-1], atol=1e-5)
        restored = sp.restore(student)(images)
        assert all(torch.equal(one, other) for one, other in zip(restored, expected, strict=True))
        sp.save(student, tmp_path / "net.safetensors")
        loaded = sp.load(tmp_path / "net.safetensors", model=net)
        assert all(torch.equal(one, other) for one, other in zip(loaded(images), sparse, strict=True))


def test_tracing_by_torch_fx_is_refused_with_what_to_do():
    from torchvision.models.feature_extraction import create_feature_extractor

    student = sp.sparsify(make_vit(), sp.SparseConfig(0.3, n_down=5)).eval()
    with pytest.raises(UnsupportedModelError, match=r"sparsifiner.feature_map.*student.forward_intermediates"):
        create_feature_extractor(student, ["blocks.1"])
    with pytest.raises(UnsupportedModelError, match="cannot be traced by torch.fx"):
        torch.fx.symbolic_trace(student)
    images = torch.randn(2, 3, 20, 20)
    (features,) = student.forward_intermediates(images, indices=1, intermediates_only=True)
    torch.testing.assert_close(features, sp.feature_map(student, images)[0])
    extractor = create_feature_extractor(sp.restore(student), ["blocks.1"])  # the host again can
    assert extractor(images)["blocks.1"].shape == (2, 26, 24)


def test_vits_that_cannot_be_converted_hear_why():
    with pytest.raises(UnsupportedModelError, match="patch_drop_rate=0"):
        find_host(make_vit(patch_drop_rate=0.5))
    with pytest.raises(UnsupportedModelError, match="attn_drop_rate=0"):
        find_host(make_vit(attn_drop_rate=0.1))
    with pytest.raises(UnsupportedModelError, match="patch_drop_rate=0"):
        find_host(make_eva(patch_drop_rate=0.5))
    with pytest.raises(UnsupportedModelError, match="attn_drop_rate=0"):
        find_host(make_eva(attn_drop_rate=0.1))
    with pytest.raises(UnsupportedModelError, match="expected a torch module, got str"):
        find_host("deit_tiny_patch16_224")  # pyright: ignore[reportArgumentType]


def test_set_input_size_resamples_the_predictors():
    model = make_vit()
    student = sp.sparsify(model, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, basis_threshold=0.0))
    for size in ((28, 20), (40, 40), (20, 20)):
        student.set_input_size(size)
        images = torch.randn(2, 3, *size)
        assert bool(torch.isfinite(student(images)).all())
        model.set_input_size(size)
        with sp.dense_mode(student):
            torch.testing.assert_close(student(images), model(images))


def test_dynamic_image_size():
    model = make_vit(dynamic_img_size=True)
    student = sp.sparsify(model, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, basis_threshold=0.0))
    results = {}
    for size in ((20, 20), (12, 36), (32, 20), (20, 20)):
        images = torch.ones(1, 3, *size)
        out = student(images)
        assert bool(torch.isfinite(out).all())
        if size in results:
            assert torch.equal(out, results[size])  # sizes in between leave no trace
        results[size] = out
        with sp.dense_mode(student):
            torch.testing.assert_close(student(images), model(images))
    with pytest.raises(DataError, match="21 x 20, not a whole number of 4 x 4 patches"):
        student(torch.ones(1, 3, 21, 20))


def test_copies_watch_their_own_grid():
    import copy

    student = sp.sparsify(make_vit(dynamic_img_size=True), sp.SparseConfig(keep=0.3, n_down=5))
    twin = copy.deepcopy(student)
    twin(torch.ones(1, 3, 32, 20))
    assert sparse_layers(student)[0].grid.size == (5, 5)
    assert sparse_layers(twin)[0].grid.size == (8, 5)


def test_a_wrong_image_size_is_refused():
    student = sp.sparsify(make_vit(), sp.SparseConfig(keep=0.3, n_down=5))
    with pytest.raises(DataError, match="images are 24 x 20 but the model takes 20 x 20"):
        student(torch.ones(1, 3, 24, 20))
