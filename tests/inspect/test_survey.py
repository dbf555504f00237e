"""What of a model would be converted is told without its weights, and is what is converted."""

import json

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import sparsifiner as sp
from sparsifiner.cli.main import app
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.survey import survey
from sparsifiner.models import outline

from ..toys import make_eva, make_vit

SAM = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32, "patch_size": 8} | {
    "num_hidden_layers": 3,
    "global_attn_indexes": [1],
    "window_size": 2,
    "pretrain_image_size": 16,
}


@pytest.mark.parametrize("make", [make_vit, make_eva])
def test_a_survey_is_what_conversion_makes(make):
    model = make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = survey(model)
    student = sp.sparsify(model, sp.SparseConfig(0.5, pattern="cells"))
    count = sp.count_flops(student)
    assert (found.layers, found.tokens, found.grid) == (len(sparse_layers(student)), 26, (5, 5))
    assert (found.attention, found.total) == (count.dense_attention, count.dense_total)
    assert found.ceiling == pytest.approx(found.total / (found.total - found.attention))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    held = survey(nn.ModuleDict({"inside": model}))
    assert (held.part, held.encoder, held.total) == ("inside", type(model).__name__, found.total)
    assert "ModuleDict, of which its inside" in str(held)


def test_layers_that_stay_dense_are_named_with_the_reason(tmp_path):
    transformers.Sam3ViTConfig(**SAM, architectures=["Sam3ViTModel"]).save_pretrained(tmp_path)
    found = survey(outline(str(tmp_path)))
    windows = "its attention works inside windows of 2 x 2 tokens"
    assert found.left_dense == {"layers.0.attention": windows, "layers.2.attention": windows}
    assert found.layers == 1
    assert f"2 stay dense (layers.0.attention to layers.2.attention): {windows}" in str(found)
    assert found.attention == 2 * 16 * 16 * 32


def run(*arguments):
    result = CliRunner().invoke(app, ["info", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout


def test_the_command_line_tells_it(tmp_path):
    shown = run("vit_small_patch16_dinov3", "--image-size", 512)
    assert "Eva: 12 attention layers would be sparse" in shown
    assert "tokens: 1029 at 512 x 512 pixels (32 x 32 patches and 5 others)" in shown
    found = json.loads(run("vit_small_patch16_dinov3", "--image-size", 512, "--json"))
    assert found["attention"] == 12 * 2 * 1029**2 * 384
    assert found["refused"] is None
    refused = json.loads(run("resnet18", "--json"))
    assert refused == {"model": "ResNet", "refused": refused["refused"]}
    assert "none of its modules is called attention" in run("resnet18")
    backbone = {"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone | {"image_size": 28}, architectures=["DepthAnythingForDepthEstimation"]
    )
    config.save_pretrained(tmp_path)
    shown = run(tmp_path, "--image-size", 56)
    assert "DepthAnythingForDepthEstimation, of which its backbone, a Dinov2Backbone: 2 attention layers" in shown
    assert "(4 x 4 patches and 1 others)" in shown
    assert "no tokens can be dropped: its feature maps are made of all tokens" in shown


def test_names_and_configs_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="timm has no such model: did you mean"):
        outline("deit_tiny_patch16_225")
    with pytest.raises(ConfigError, match="timm cannot make resnet18 for images of 64"):
        outline("resnet18", 64)
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match="transformers cannot make a model of"):
        outline(str(tmp_path))
