"""What a call brings for queries and keys: turned by where they stand, also where some tokens are gone."""

import dataclasses

import pytest
import torch
from torch.nn import functional

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.nn.rotary import Rotary, turn_halves

PATCHES, WIDTH = 25, 8


def rotary(*heads):
    angles = torch.randn(*heads, PATCHES, WIDTH // 2, generator=torch.Generator().manual_seed(2))
    angles = torch.cat([angles, angles], dim=-1)
    return Rotary(turn_halves, (angles.cos(), angles.sin()))


def some_cells(batch=2, count=12):
    return torch.stack([torch.randperm(PATCHES)[:count].sort().values for _ in range(batch)])


def test_halves_are_turned_as_complex_numbers():
    x, rope = torch.randn(2, 3, 4 + PATCHES, WIDTH), rotary()
    cosines, sines = (table[:, : WIDTH // 2] for table in rope.tables)
    numbers = torch.complex(x[:, :, 4:, : WIDTH // 2], x[:, :, 4:, WIDTH // 2 :]) * torch.complex(cosines, sines)
    out = rope(x)
    torch.testing.assert_close(out[:, :, 4:], torch.cat([numbers.real, numbers.imag], dim=-1))
    assert torch.equal(out[:, :, :4], x[:, :, :4])
    torch.testing.assert_close(rope(x[:, :, 4:]), out[:, :, 4:])  # without a prefix
    assert rope(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3)], ids=str)  # one for all, by head, by image, by both
def test_tokens_that_are_left_keep_their_places(shape):
    x, rope, cells = torch.randn(2, 3, 1 + PATCHES, WIDTH), rotary(*shape), some_cells()
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.int64), cells + 1], dim=1)
    index = tokens[:, None, :, None].expand(-1, 3, -1, WIDTH)
    assert torch.equal(rope.left(cells)(x.gather(2, index)), rope(x).gather(2, index))


def test_a_layer_turns_what_is_left_with_its_own_rows(vit, photos):
    """And does not run the host's attention, which would turn all; whether it is dense or not."""
    rope, student = rotary(), sp.sparsify(vit, sp.SparseConfig(keep=1.0, n_down=5))
    layer = sparse_layers(student)[0]
    plain = layer.adapter

    def qkv(module, x, context):
        q, k, v = plain.qkv(module, x, None)
        return context(q), context(k), v

    layer.adapter = dataclasses.replace(plain, qkv=qkv, arguments=lambda module, x, **_: (x, rope, None))
    student(photos)  # begins a call
    layer.grid.drop(some_cells(len(photos)))
    x = torch.randn(len(photos), 13, 24)
    q, k, v = plain.qkv(layer.host, x, None)
    q, k = (rope.left(layer.grid.cells)(part) for part in (q, k))
    dense = plain.project(layer.host, functional.scaled_dot_product_attention(q, k, v), x, None)
    torch.testing.assert_close(layer(x), dense)
    for pattern in ("learned", "cells"):
        sp.reconfigure(student, keep=0.2, pattern=pattern, tau=0.0, basis_threshold=0.0)
        assert torch.equal(layer(x), plain.project(layer.host, layer.attend(q, k, v), x, None))
        assert not torch.allclose(layer(x), dense, atol=1e-3)
