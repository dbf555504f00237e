"""What was gained is said as it is."""

import dataclasses

import timm
import torch

import sparsifiner as sp
from sparsifiner.inspect.gain import Gain, gain_of, in_words

GAIN = Gain(
    tokens=1025, images=8, batch=4, threads=2, dense=20.0, sparse=10.0, dense_attention=12.0, sparse_attention=3.0,
    dense_top1=90.0, sparse_top1=89.5, agreement=97.0,
)  # fmt: skip


def test_ratios_and_words():
    assert (GAIN.speed_up, GAIN.attention_speed_up, GAIN.ceiling) == (2.0, 4.0, 2.5)
    small = dataclasses.replace(GAIN, tokens=65, sparse=40.0)
    worse = dataclasses.replace(GAIN, tokens=4097, sparse_top1=80.0)
    told = "2.0x as fast as dense at 1,025 tokens (89.5 % right, dense 90.0 %)"
    assert in_words([small, GAIN]) == f"Faster at equal accuracy: the whole model is {told}."
    assert "But not faster at equal accuracy: 2.0x as fast as dense at 4,097" in in_words([GAIN, worse])
    assert in_words([small]).startswith("Not faster at equal accuracy: 0.5x")
    assert not dataclasses.replace(GAIN, dense_top1=None).is_equal  # of 97 %


def test_it_measures_a_model_of_classes():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=3).eval()
    student = sp.sparsify(model, sp.suggest_config(model, 0.5))
    images = torch.randn(3, 3, 64, 64)
    gain = gain_of(student, [(images, torch.full((3,), -1))], seconds=0.01)
    assert (gain.tokens, gain.images, gain.batch) == (17, 3, 3)
    assert gain.dense_top1 is None
    assert min(gain.speed_up, gain.attention_speed_up, gain.ceiling) > 0
    assert gain.to_dict()["speed_up"] == gain.speed_up
