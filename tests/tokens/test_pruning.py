"""Tokens dropped for real, against straightforward code that is written here anew."""

import copy
import math

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch.nn import functional

import sparsifiner as sp
from sparsifiner.config import BlockTokens
from sparsifiner.convert import conversion_of, sparse_layers
from sparsifiner.distillation.straight import straight_through
from sparsifiner.errors import ConfigError, UnsupportedModelError
from sparsifiner.inspect.compare import DENSE, Evaluation
from sparsifiner.inspect.statistics import measure
from sparsifiner.nn.grid import TokenGrid
from sparsifiner.tokens.dynamicvit import TokenScorer, ratio_loss
from sparsifiner.tokens.install import pruning_blocks

from ..toys import make_vit, sharpen

DEPTH, BLOCKS = 6, (1, 3)


@pytest.fixture
def host():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=48, patch_size=8, embed_dim=24, depth=DEPTH, num_heads=3, num_classes=7
    ).eval()
    with torch.no_grad():  # sharper attention than fresh weights have, so that scores are apart
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)
    return model


@pytest.fixture
def photos():
    return torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(1))


def pruned(host, keep=0.6, attention=1.0, **tokens):
    config = sp.suggest_config(
        host, attention, pattern="learned", tokens=sp.TokenConfig(keep, **({"blocks": BLOCKS} | tokens))
    )
    return sp.sparsify(host, config)


def plain_evit(model, images, keep, blocks, fuse):
    """EViT as its paper says, one image at a time, with the whole attention matrix."""
    results = []
    for image in images:
        x = model.patch_embed(image[None])
        x = model.norm_pre(model._pos_embed(x))[0]  # [n, D]
        cells, fused_present = list(range(len(x) - 1)), False
        for number, block in enumerate(model.blocks):
            y = block.norm1(x)
            heads = block.attn.num_heads
            q, k, v = block.attn.qkv(y).view(len(y), 3, heads, -1).permute(1, 2, 0, 3)
            attention = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)  # [heads, n, n]
            x = x + block.attn.proj((attention @ v).transpose(0, 1).flatten(1))
            if number in blocks:
                first = 2 if fused_present else 1
                paid = attention[:, 0].mean(0)
                patches = list(range(first, len(x)))
                count = math.ceil(keep * len(patches) - 1e-9)
                best = sorted(sorted(patches, key=lambda i: (-paid[i].item(), i))[:count])
                cells = [cells[i - first] for i in best]
                rest = [i for i in range(1, len(x)) if i not in best]
                parts = [x[:1]] + ([(paid[rest, None] * x[rest]).sum(0, keepdim=True)] if fuse else []) + [x[best]]
                x, fused_present = torch.cat(parts), fuse
            x = x + block.mlp(block.norm2(x))
        results.append((model.head(model.norm(x)[0]), cells))
    logits, cells = zip(*results, strict=True)
    return torch.stack(logits), torch.tensor(cells)


def official_evit(model, images, keep, blocks):
    """EViT with fusing as its own code does it: after the class token all are alike, an earlier fused one too."""
    results = []
    for image in images:
        x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]  # [n, D]
        places, merged = list(range(len(x) - 1)), [False] * (len(x) - 1)  # of all but the class token
        for number, block in enumerate(model.blocks):
            q, k, v = block.attn.qkv(block.norm1(x)).view(len(x), 3, block.attn.num_heads, -1).permute(1, 2, 0, 3)
            attention = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
            x = x + block.attn.proj((attention @ v).transpose(0, 1).flatten(1))
            paid, others = attention[:, 0, 1:].mean(0), x[1:]
            left = math.ceil(keep * len(others))
            if number in blocks and left < len(others):
                order = paid.argsort(descending=True).tolist()
                best, rest = order[:left], order[left:]
                fused = (paid[rest, None] * others[rest]).sum(0, keepdim=True)
                x = torch.cat([x[:1], others[best], fused])
                places = [places[i] for i in best] + [places[rest[0]]]
                merged = [merged[i] for i in best] + [True]
            x = x + block.mlp(block.norm2(x))
        results.append((model.head(model.norm(x)[0]), places[:-1], merged[:-1]))
    logits, places, merged = zip(*results, strict=True)
    return torch.stack(logits), torch.tensor(places), torch.tensor(merged)


def test_evit_that_ranks_fused_tokens_is_the_official_code(host):
    photos = torch.randn(12, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    config = sp.TokenConfig(0.6, blocks=(1, 3, 4), fuse="official")
    student = sp.sparsify(host, sp.suggest_config(host, 1.0, pattern="learned", tokens=config))
    with torch.no_grad():
        logits, places, merged = official_evit(host, photos, 0.6, (1, 3, 4))
        found = student(photos)
        ours = pruned(host, blocks=(1, 3, 4), fuse=True)(photos)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, logits, atol=1e-3)
    grid = conversion_of(student).grid
    order = places.argsort(1)
    assert torch.equal(grid.cells, places.gather(1, order))
    assert torch.equal(grid.merged(), merged.gather(1, order))
    assert set(merged.any(1).tolist()) == {True, False}  # in some images a fused token was kept, in some none
    assert all(len(set(row.tolist())) == len(row) for row in places)


def test_official_fusing_is_counted_as_published():
    """139, 99 and 71 tokens beside DeiT's class token at 0.7; 139, 98 and 69 if fused tokens are no patches."""
    for fuse, expected in (("official", [139, 99, 71]), (True, [139, 98, 69]), (False, [138, 97, 68])):
        counts = sp.TokenConfig(0.7, fuse=fuse).layer_tokens(196, 1, 12)
        assert [counts[block].feed_forward - 1 for block in (3, 6, 9)] == expected
        assert counts[9].prefix == 1 + bool(fuse)


def test_official_fusing_where_nothing_is_dropped_fuses_nothing(host, photos):
    config = sp.TokenConfig(0.99, blocks=BLOCKS, fuse="official")  # the rounding keeps all 36
    student = sp.sparsify(host, sp.suggest_config(host, 1.0, pattern="learned", tokens=config))
    torch.testing.assert_close(student(photos), host(photos))
    assert [seen.attention for seen in config.layer_tokens(36, 1, DEPTH)] == [37] * DEPTH


def hard_sample(logits, noise):
    """Gumbel-softmax whose value is 0 or 1 and whose gradient is the softmax's, with noise drawn before."""
    soft = torch.softmax(logits + noise, dim=-1)
    return functional.one_hot(soft.argmax(-1), 2) - soft.detach() + soft


def official_dynamicvit(model, images, scorers, noise):
    """DynamicViT's forward in training: all tokens stay, and in the masked softmax each still attends to itself."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    batch, n, _ = x.shape
    stages, there, policy = iter(zip(scorers, noise, strict=True)), torch.ones_like(x[:, 1:, 0]), None
    for number, block in enumerate(model.blocks):
        if number in (3, 6, 9):
            scorer, drawn = next(stages)
            there = hard_sample(scorer(x[:, 1:], there), drawn)[..., 0] * there
            policy = torch.cat([torch.ones_like(x[:, :1, 0]), there], dim=1)[:, None, None].expand(-1, 1, n, n)
            policy = policy + (1 - policy) * torch.eye(n, dtype=x.dtype)
        q, k, v = block.attn.qkv(block.norm1(x)).view(batch, n, 3, block.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        if policy is not None:
            weights = weights * policy + 1e-6 / n
        attention = weights / weights.sum(-1, keepdim=True)
        x = x + block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)[:, 0])


@pytest.mark.parametrize("fuse", [False, True])
def test_evit_with_dense_attention_is_the_plain_implementation(host, photos, fuse):
    student = pruned(host, fuse=fuse)
    with torch.no_grad():
        logits, cells = plain_evit(host, photos, 0.6, BLOCKS, fuse)
        found = student(photos)
    assert torch.equal(conversion_of(student).grid.cells, cells)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, host(photos), atol=1e-3)  # something was dropped


@pytest.mark.parametrize(
    "tokens", [{}, {"fuse": True}, {"fuse": "official", "blocks": (1, 2, 4)}, {"method": "dynamicvit"}]
)
@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_kernels_and_lists_agree_on_what_is_left(host, photos, tokens, tile):
    student = pruned(host, attention=0.2, **tokens)
    sp.calibrate(student, photos)
    seen = []
    for residual in (True, False):
        for backend in ("reference", "eager", "cpu"):
            sp.reconfigure(student, tile=tile, residual=residual, backend=backend)
            with torch.no_grad():
                seen.append(student(photos))
            torch.testing.assert_close(student(photos), seen[-1], rtol=1e-4, atol=1e-5)  # lists, not one call
            torch.testing.assert_close(seen[-1], seen[3 * (not residual)], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(seen[0], seen[3], atol=1e-4)


def test_sparse_attention_after_dropping_is_that_of_the_tokens_left(host, photos):
    """Columns of the predictor are those of the kept positions; checked with the reference on a hand-made layer."""
    student = pruned(host, attention=0.2)
    sp.calibrate(student, photos)
    seen = {}
    for index in (2, 5):
        layer = sparse_layers(student)[index]

        def watch(observation, index=index):
            grid = observation.layer.grid
            seen[index] = (observation, grid.cells.clone())

        layer.observers.append(watch)
    student(photos)
    for index, (observation, cells) in seen.items():
        layer = sparse_layers(student)[index]
        w_down, w_up = layer.predictor.w_down, layer.predictor.w_up
        for image in range(len(photos)):
            columns = torch.cat([torch.zeros(1, dtype=torch.long), cells[image] + 1])
            a_down = torch.softmax(
                observation.q[image, :, 1:] @ (w_down[:, :, columns] @ observation.k[image]).mT * layer.scale, -1
            )
            torch.testing.assert_close(observation.residual.a_down[image], a_down, rtol=1e-4, atol=1e-6)
            scores = (
                torch.where(a_down > layer.config.tau, a_down, 0)
                @ torch.where(w_up > layer.basis_threshold, w_up, 0)[:, :, columns]
            )
            mask = observation.connectivity.mask()[image]
            budget = math.ceil(0.2 * 37)
            for head in range(3):
                for row in range(len(columns) - 1):
                    best = sorted(range(len(columns)), key=lambda j: (-scores[head, row, j].item(), j))[:budget]
                    wanted = {j for j in best if scores[head, row, j] > 0} | {0, row + 1}
                    assert set(mask[head, row + 1].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize(
    "tokens", [{}, {"fuse": True}, {"fuse": "official", "blocks": (1, 2, 4)}, {"method": "dynamicvit"}]
)
def test_an_image_is_the_same_alone_and_in_any_batch(host, photos, tokens):
    student = pruned(host, attention=0.3, **tokens)
    sp.calibrate(student, photos)
    with torch.no_grad():
        together = student(photos)
        for size in (1, 3):
            apart = torch.cat([student(part) for part in photos.split(size)])
            torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)


def test_official_fusing_is_counted_as_it_runs(host, photos):
    student = pruned(host, keep=0.6, attention=0.3, fuse="official", blocks=(0, 2, 4))
    counts = [layer.tokens for layer in measure(student, photos)]
    assert counts == [37, 24, 24, 16, 16, 11]
    seen = sp.config_of(student).tokens.layer_tokens(36, 1, DEPTH)
    assert [layer.attention for layer in seen] == counts


def test_tokens_are_really_gone(host, photos):
    student = pruned(host, keep=0.5, attention=0.3, fuse=True)
    counts = [layer.tokens for layer in measure(student, photos)]
    assert counts == [37, 37, 1 + 1 + 18, 20, 1 + 1 + 9, 11]
    expected = sp.TokenConfig(0.5, blocks=BLOCKS, fuse=True).layer_tokens(36, 1, DEPTH)
    assert [seen.attention for seen in expected] == counts
    assert expected[1] == BlockTokens(1, 37, 20)
    dynamic = sp.TokenConfig(0.5, "dynamicvit", blocks=BLOCKS).layer_tokens(36, 1, DEPTH)
    assert [seen.attention for seen in dynamic] == [37, 19, 19, 10, 10, 10]


def test_a_budget_that_covers_what_is_left_is_dense(host, photos):
    student = pruned(host, keep=0.5, attention=0.4)  # 15 keys: more than the 10 tokens at the end, not the 19 before
    kinds = {}
    for number, layer in enumerate(sparse_layers(student)):
        layer.observers.append(lambda seen, number=number: kinds.__setitem__(number, seen.connectivity is None))
    student(photos)
    assert [kinds[i] for i in range(DEPTH)] == [False, False, False, False, True, True]


def test_keep_one_drops_nothing(host, photos):
    for method in ("evit", "dynamicvit"):
        assert torch.equal(pruned(host, keep=1.0, method=method)(photos), host(photos))


def test_dense_mode_and_restore_keep_all_tokens(host, photos):
    student = pruned(host, attention=0.3)
    with sp.dense_mode(student):
        assert torch.equal(student(photos), host(photos))
    assert conversion_of(student).grid.cells is None
    student(photos)
    assert conversion_of(student).grid.cells is not None
    dense = sp.restore(student)
    assert torch.equal(dense(photos), host(photos))
    assert list(dense.state_dict()) == list(host.state_dict())
    assert not pruning_blocks(dense)


@pytest.mark.parametrize("method", ["evit", "dynamicvit"])
def test_dense_mode_is_counted_as_it_runs(host, photos, method):
    """The dense row of a comparison had the multiply-adds of the model that drops tokens."""
    student = pruned(host, method=method, attention=0.3)
    counts = sp.count_flops(student)
    assert counts.total < counts.dense_total
    with sp.dense_mode(student):
        counts = sp.count_flops(student)
    assert counts.total == counts.dense_total
    row = Evaluation(student, [(photos, torch.zeros(len(photos), dtype=torch.long))]).row(DENSE)
    assert row.total_macs == counts.dense_total
    assert row.attention_macs == counts.dense_attention


def test_names_of_parameters_stay(host):
    student = pruned(host, method="dynamicvit")
    ours = [name for name in student.state_dict() if ".predictor." in name or ".scorer." in name]
    assert [name for name in student.state_dict() if name not in ours] == list(host.state_dict())
    assert sum(".scorer." in name for name in ours) == 2 * 10


def test_reconfigure_changes_what_is_dropped(host, photos):
    student = pruned(host, attention=0.3)
    sp.reconfigure(student, tokens=None)
    without = student(photos)
    assert torch.equal(without, sp.sparsify(host, sp.suggest_config(host, 0.3, pattern="learned"))(photos))
    sp.reconfigure(student, tokens=sp.TokenConfig(0.5, blocks=BLOCKS))
    student(photos)
    assert conversion_of(student).grid.cells.shape[1] == 9
    sp.reconfigure(student, tokens=sp.TokenConfig(0.9, blocks=BLOCKS))
    student(photos)
    assert conversion_of(student).grid.cells.shape[1] == 30
    sp.reconfigure(student, tokens=sp.TokenConfig(0.5, "dynamicvit"))
    scorer = pruning_blocks(student)[0].scorer
    sp.reconfigure(student, tokens=sp.TokenConfig(0.7, "dynamicvit"))
    assert pruning_blocks(student)[0].scorer is scorer  # what was trained is not lost by another rate
    assert [block.number for block in pruning_blocks(student)] == [1, 3, 4]
    sp.reconfigure(student, tokens=None)
    sp.reconfigure(student, tokens=sp.TokenConfig(0.5))
    sp.reconfigure(student, tokens=sp.TokenConfig(0.7, "dynamicvit"))
    assert pruning_blocks(student)[0].scorer is scorer  # nor by trying something else


@pytest.mark.parametrize("tokens", [{"method": "dynamicvit"}, {"fuse": "official"}])
def test_checkpoints_hold_what_is_dropped(host, photos, tmp_path, tokens):
    student = pruned(host, attention=0.3, **tokens)
    for host_weights in (True, False):
        sp.save(student, tmp_path / "a.safetensors", host_weights=host_weights)
        again = sp.load(tmp_path / "a.safetensors", model=host)
        assert torch.equal(again(photos), student(photos))
        assert sp.config_of(again) == sp.config_of(student)


def test_another_image_size_begins_anew(host):
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, patch_size=8, embed_dim=24, depth=4, num_heads=3,
                              num_classes=7, dynamic_img_size=True).eval()  # fmt: skip
    student = sp.sparsify(model, sp.suggest_config(model, 0.3, pattern="learned", tokens=sp.TokenConfig(0.5)))
    with torch.no_grad():
        small = student(torch.ones(2, 3, 48, 48))
        student(torch.ones(1, 3, 64, 72))
        assert conversion_of(student).grid.cells.max() < 8 * 9
        assert torch.equal(student(torch.ones(2, 3, 48, 48)), small)


def test_without_a_class_token_the_mean_patch_chooses(photos):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, patch_size=8, embed_dim=24, depth=2, num_heads=3,
                              num_classes=7, class_token=False, global_pool="avg").eval()  # fmt: skip
    student = sp.sparsify(
        model, sp.suggest_config(model, 1.0, pattern="learned", tokens=sp.TokenConfig(0.5, blocks=(0,)))
    )
    with torch.no_grad():
        student(photos)
        x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(photos)))
        q, k, _ = model.blocks[0].attn.qkv(x).view(4, 36, 3, 3, 8).permute(2, 0, 3, 1, 4)
        paid = torch.softmax(q.mean(2, keepdim=True) @ k.mT / math.sqrt(8), -1).mean(1)[:, 0]
    expected = paid.topk(18).indices.sort().values
    assert torch.equal(conversion_of(student).grid.cells, expected)


def test_impossible_requests_are_refused(host):
    with pytest.raises(ConfigError, match="blocks 0 to 5"):
        sp.sparsify(host, sp.suggest_config(host, 1.0, pattern="learned", tokens=sp.TokenConfig(0.5, blocks=(6,))))
    for wrong in (
        {"keep": 0},
        {"keep": 0.5, "method": "tome"},
        {"keep": 0.5, "blocks": (3, 1)},
        {"keep": 0.5, "fuse": 1},
        {"keep": 0.5, "fuse": "yes"},
    ):
        with pytest.raises(ConfigError):
            sp.TokenConfig(**wrong)
    with pytest.raises(ConfigError, match="EViT"):
        sp.TokenConfig(0.5, "dynamicvit", fuse="official")
    parallel = make_vit(block_fn=ParallelThingsBlock)
    sp.sparsify(parallel, sp.suggest_config(parallel, 0.3, pattern="learned"))
    with pytest.raises(UnsupportedModelError, match="one after the other"):
        sp.sparsify(parallel, sp.suggest_config(parallel, 0.3, pattern="learned", tokens=sp.TokenConfig(0.5)))


@pytest.mark.parametrize("fuse", [True, "official"])
def test_gradients_reach_everything_that_is_kept(host, photos, fuse):
    student = pruned(host, attention=0.3, fuse=fuse)
    sp.calibrate(student, photos)
    student(photos).square().sum().backward()
    missing = [name for name, p in student.named_parameters() if p.grad is None]
    assert missing == []
    with torch.no_grad():
        expected = student(photos)
    torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)


class TestDynamicViT:
    @pytest.mark.parametrize(("attention", "residual"), [(1.0, True), (0.3, False), (0.3, True)])
    def test_weighing_tokens_out_is_removing_them(self, host, photos, monkeypatch, attention, residual):
        """Training weighs tokens out and inference removes them: the same where the choice is the same."""
        student = pruned(host, attention=attention, method="dynamicvit")
        sp.calibrate(student, photos)
        sp.reconfigure(student, residual=residual)
        chosen = []
        drop = TokenGrid.drop

        def note(grid, kept, num_fused=0):
            drop(grid, kept, num_fused)
            chosen.append(grid.cells)

        with torch.no_grad():
            monkeypatch.setattr(TokenGrid, "drop", note)
            removed = student(photos)
            again = iter(chosen)

            def impose(scorer, x, grid, config):  # what inference chose, by weight
                there = torch.zeros(len(x), 36).scatter_(1, next(again), 1.0)
                grid.weigh(torch.cat([torch.ones(len(x), 1), there], 1))
                return x

            monkeypatch.setattr(TokenScorer, "prune", impose)
            weighed = student(photos)
        assert [cells.shape[1] for cells in chosen] == [22, 14]
        assert conversion_of(student).grid.presence is not None
        torch.testing.assert_close(weighed, removed, rtol=2e-3, atol=2e-4)  # 1e-6 of each dropped token stays

    def test_masked_softmax(self):
        from sparsifiner.ops.attention import log_presence, with_presence

        q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64).unbind(0)
        presence = torch.tensor([[1.0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.float64)
        weights = torch.exp(q @ k.mT * 0.7)
        wanted = weights * (presence[:, None, None] + 1e-6)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        biased = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=log_presence(presence)[:, None, None], scale=0.7
        )
        torch.testing.assert_close(biased, wanted @ v)
        q2, k2, v2 = with_presence(q, k, v, presence, 0.7)
        featured = functional.scaled_dot_product_attention(q2, k2, v2, scale=0.7)[..., :4]
        torch.testing.assert_close(featured, biased)

    def test_gradient_of_presence(self):
        """At a token that is out, the gradient says what taking it in would do."""
        from sparsifiner.ops.attention import log_presence

        q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64).unbind(0)
        presence = torch.tensor([[1.0, 1, 0, 1, 1]], dtype=torch.float64, requires_grad=True)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=log_presence(presence)[:, None, None])
        out[0, 0, 0, 0].backward()
        weights = torch.exp(q[0, 0, 0] @ k[0, 0].T / 2)
        total = (weights * presence[0]).sum()
        output = (weights * presence[0]) @ v[0, 0, :, 0] / total
        expected = weights * (v[0, 0, :, 0] - output) / total
        torch.testing.assert_close(presence.grad[0], expected, rtol=1e-4, atol=1e-5)

    def test_scorers_get_the_gradients_of_the_official_code(self, monkeypatch):
        """Twelve blocks, tokens dropped in 3, 6 and 9; without the diagonal they were 10 % off here."""
        torch.manual_seed(0)
        settings = {"img_size": 48, "patch_size": 8, "embed_dim": 24, "depth": 12, "num_heads": 3, "num_classes": 7}
        model = sharpen(timm.create_model("vit_tiny_patch16_224", **settings)).double()
        student = sp.sparsify(
            model, sp.suggest_config(model, 1.0, pattern="learned", tokens=sp.TokenConfig(0.7, "dynamicvit"))
        ).train()
        scorers = [block.scorer for block in pruning_blocks(student)]
        assert [block.number for block in pruning_blocks(student)] == [3, 6, 9]
        photos = torch.randn(3, 3, 48, 48, dtype=torch.float64)
        noise = [-torch.empty(3, 36, 2, dtype=torch.float64).exponential_().log() for _ in scorers]
        with torch.no_grad():
            model.head.weight.normal_(std=0.5)
            student.head.weight.copy_(model.head.weight)
            for scorer in scorers:
                scorer.decide[-1].bias.copy_(torch.tensor([0.7, -0.7]))

        def gradients(logits):
            (logits * torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 7)).sum().backward()
            found = [torch.cat([p.grad.flatten() for p in scorer.parameters()]) for scorer in scorers]
            student.zero_grad()
            return found

        drawn = iter(noise)
        monkeypatch.setattr(functional, "gumbel_softmax", lambda logits, hard: hard_sample(logits, next(drawn)))
        logits = student(photos)
        ours = gradients(logits)
        expected = official_dynamicvit(model, photos, scorers, noise)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(ours, gradients(expected), strict=True):
            assert (mine - theirs).norm() < 1e-4 * theirs.norm()
            assert functional.cosine_similarity(mine, theirs, dim=0) > 1 - 1e-8

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"residual": False},
            {"tile": (2, 3)},
            {"tile": (2, 3), "residual": False},
            {"pattern": "window"},
            {"pattern": "linformer"},
        ],
    )
    def test_backends_agree_in_training(self, host, photos, changes):
        student = pruned(host, attention=0.3, method="dynamicvit")
        sp.calibrate(student, photos)
        student.train()
        seen = []
        for backend in ("reference", "eager", "cpu"):
            sp.reconfigure(student, backend=backend, **changes)
            torch.manual_seed(3)
            student.zero_grad()
            logits = student(photos)
            logits.square().sum().backward()
            seen.append([logits, *(p.grad for block in pruning_blocks(student) for p in block.scorer.parameters())])
            for mine, first in zip(seen[-1], seen[0], strict=True):
                torch.testing.assert_close(mine, first, rtol=1e-3, atol=1e-3 * first.abs().max().item())

    def test_a_linformer_lets_a_token_see_itself(self, host, photos):
        student = pruned(host, method="dynamicvit")
        sp.reconfigure(student, pattern="linformer")
        layer, grid = sparse_layers(student)[2], conversion_of(student).grid
        with torch.no_grad():
            for weights in layer.predictor.parameters():
                weights.copy_(torch.rand_like(weights) / 10)
            q, k, v = torch.randn(3, 4, 3, 37, 8).unbind(0)
            there = torch.cat([torch.ones(4, 1), (torch.rand(4, 36) < 0.5).float()], 1)
            grid.weigh(there)
            found = layer.attend(q, k, v)
            w_down, w_up = layer.predictor.w_down * there[:, None, None], layer.predictor.w_up
            columns = there[:, None, None] + (1 - there[:, None, None]) * torch.eye(37)
            estimate = torch.softmax(q @ (w_down @ k).mT * layer.scale, -1) @ w_up * columns
            weights = torch.exp(q @ k.mT * layer.scale) * columns
            exact = weights / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(found[:, :, 1:], (estimate @ v)[:, :, 1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[:, :, :1], (exact @ v)[:, :, :1], rtol=1e-4, atol=1e-4)

    def test_straight_through_weighs_tokens_too(self, host, photos):
        """Its value is that of the layer; the class token saw what was dropped."""
        student = pruned(host, attention=0.3, method="dynamicvit")
        sp.calibrate(student, photos)
        layer, grid = sparse_layers(student)[2], conversion_of(student).grid
        q, k, v = torch.randn(3, 4, 3, 37, 8).unbind(0)
        grid.begin((6, 6))
        grid.weigh(torch.cat([torch.ones(4, 1), (torch.rand(4, 36) < 0.5).float()], 1))
        torch.testing.assert_close(straight_through(layer, q, k, v), layer.attend(q, k, v), rtol=1e-4, atol=1e-5)

    def test_scorer(self):
        scorer = TokenScorer(8).double()
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        there = torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
        y = functional.gelu(
            scorer.enter[1](functional.layer_norm(x, (8,), scorer.enter[0].weight, scorer.enter[0].bias))
        )
        whole = torch.stack([y[0, [0, 2, 3], 4:].mean(0), y[1, :, 4:].mean(0)])
        features = torch.cat([y[..., :4], whole[:, None].expand(-1, 5, -1)], -1)
        torch.testing.assert_close(scorer(x, there), scorer.decide(features).log_softmax(-1))
        assert scorer(x).exp().sum(-1).allclose(torch.ones(2, 5, dtype=torch.float64))

    def test_training_pass(self, host, photos):
        student = pruned(host, attention=0.3, method="dynamicvit")
        sp.calibrate(student, photos)
        student.train()
        torch.manual_seed(3)
        logits = student(photos)
        grid = conversion_of(student).grid
        assert grid.cells is None
        assert set(grid.presence.unique().tolist()) <= {0.0, 1.0}
        first, second = grid.latest.shares
        assert bool((second <= first).all())
        assert torch.equal(second, grid.presence[:, 1:].mean(1))
        loss = ratio_loss(grid.latest.shares, sp.config_of(student).tokens)
        assert first.unique().numel() > 1  # or the batch's mean would be as good
        official = sum(((share - want) ** 2).mean() for share, want in ((first, 0.6), (second, 0.36)))
        torch.testing.assert_close(loss, official / 2)
        (logits.square().sum() + loss).backward()
        for block in pruning_blocks(student):
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in block.scorer.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"token_keep": 0.6},
        {"token_keep": 0.6, "token_fuse": True, "keep": 1.0},
        {"token_keep": 0.6, "token_fuse_official": True},
        {"token_keep": 0.6, "token_method": "dynamicvit"},
        {"token_keep": 0.6, "token_method": "dynamicvit", "residual": False},
        {"pattern": "linformer"},
        {"pattern": "axial", "residual": False},
        {"token_keep": 0.6, "attention_weight": 1.0},
        {"token_keep": 0.6, "straight_through": True},
    ],
)
def test_distillation_with_dropped_tokens(host, photos, changes):
    recipe = sp.Recipe(
        **(
            {"keep": 0.3, "phase1_epochs": 1, "phase2_epochs": 2, "batch_size": 4, "label_weight": 0.0, "mixup": 0.0}
            | {"cutmix": 0.0, "phase1_warmup_epochs": 0, "phase2_warmup_epochs": 0, "calibration_images": 4}
            | ({"phase1_epochs": 0} if changes.get("keep") == 1.0 else {})
            | changes
        )
    )
    from sparsifiner.distillation.recipe import config_for

    student = sp.sparsify(host, config_for(recipe, host))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    report = sp.distill(student, photos, recipe)
    last = report.lines[-1]
    assert ("ratio" in last) == (changes.get("token_method") == "dynamicvit")
    assert math.isfinite(last["loss"])
    assert math.isfinite(last["token"])
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert any(".scorer." in name for name in changed) == ("ratio" in last)
    assert "blocks.0.mlp.fc1.weight" in changed


def test_tokens_that_are_left_are_not_laid_out_as_if_they_were_all(vit):
    """timm's own method does not notice: 12 of 25 patches of 24 channels are 25 of another number, if it divides."""
    from timm.models._features import FeatureGetterNet

    photos = torch.randn(6, 3, 20, 20)
    student = sp.sparsify(vit, sp.SparseConfig(0.5, n_down=4, tokens=sp.TokenConfig(0.5, blocks=(1,)))).eval()
    for model in (student, copy.deepcopy(student)):
        with pytest.raises(ConfigError, match=r"sparsifiner.feature_map\(student, images\) puts them back"):
            model.forward_intermediates(photos)
        with pytest.raises(ConfigError, match="lays out all tokens and this model drops some"):
            FeatureGetterNet(model, out_indices=[1], prune=False)(photos)
        left = model.forward_intermediates(photos, output_fmt="NLC", intermediates_only=True)
        assert [tokens.shape[1] for tokens in left] == [25, 13]
        with sp.dense_mode(model):
            assert model.forward_intermediates(photos)[1][1].shape == (6, 24, 5, 5)
    dense = sp.restore(student)
    assert torch.equal(dense.forward_intermediates(photos)[0], vit.forward_intermediates(photos)[0])
    sp.reconfigure(student, tokens=None)
    assert student.forward_intermediates(photos)[1][1].shape == (6, 24, 5, 5)
