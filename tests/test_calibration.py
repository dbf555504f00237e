import pytest
import torch

import sparsifiner as sp
from sparsifiner import calibration
from sparsifiner.calibration import fit_attention
from sparsifiner.convert import sparse_layers
from sparsifiner.data.batches import as_batches
from sparsifiner.errors import ConfigError, DataError
from sparsifiner.ops import reference

from .toys import make_vit

CONFIG = sp.SparseConfig(0.3, n_down=6, tau=0.05, basis_threshold=0.01)


def natural(count, size=(20, 20)):
    """Smooth random images: neighbours alike, as in photographs."""
    coarse = torch.randn(count, 3, size[0] // 4, size[1] // 4)
    return torch.nn.functional.interpolate(coarse, size=size, mode="bicubic")


@pytest.fixture
def student(vit):
    return sp.sparsify(vit, CONFIG)


def qk_of(student, images):
    """Queries and keys of every layer in the dense model."""
    seen = []
    layers = sparse_layers(student)
    for layer in layers:
        layer.observers.append(lambda o: seen.append((o.q.double(), o.k.double())))
    with sp.dense_mode(student), torch.no_grad():
        student(images)
    for layer in layers:
        layer.observers.clear()
    return seen


def test_the_fit_is_the_ridge_solution(student):
    images = natural(20)
    expected = []
    for layer, (q, k) in zip(sparse_layers(student), qk_of(student, images), strict=True):
        a_down = reference.coefficients(q, k, layer.predictor.w_down.double(), layer.scale)[:, :, 1:]
        attention = reference.full_attention(q, k, layer.scale)[:, :, 1:]
        rows, targets = (x.transpose(0, 1).flatten(1, 2) for x in (a_down, attention))
        gram = rows.mT @ rows
        penalty = 1e-3 * gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(6)
        expected.append(torch.linalg.inv(gram + penalty) @ rows.mT @ targets)
    fit_attention(student, images, ridge=1e-3)
    for layer, solution in zip(sparse_layers(student), expected, strict=True):
        torch.testing.assert_close(layer.predictor.w_up.double(), solution, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("queries", [256, 7])
def test_chunks_and_batches_do_not_change_the_fit(vit, monkeypatch, queries):
    monkeypatch.setattr(calibration, "QUERIES", queries)
    images = natural(20)
    fits = []
    for chunk, tokens, batches in ((1 << 20, 1 << 14, images), (1, 60, list(images.split(3)))):
        monkeypatch.setattr(calibration, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(calibration, "BATCH_TOKENS", tokens)
        student = sp.sparsify(vit, CONFIG)
        fit_attention(student, batches)
        fits.append(sparse_layers(student)[1].predictor.w_up)
    torch.testing.assert_close(*fits, rtol=1e-3, atol=1e-5)


def test_chunks_do_not_change_the_gradient_of_a_step(vit, monkeypatch):
    student = sp.sparsify(vit, CONFIG)
    held = calibration._Held(student, 8)
    with torch.no_grad():
        calibration._fit_attention(student, natural(8), 1e-4, None, held)
    layer = sparse_layers(student)[0]
    sample, gradients = held.take(layer), []
    for chunk in (1 << 20, 1):
        monkeypatch.setattr(calibration, "CHUNK_ELEMENTS", chunk)
        descent = calibration._Descent(layer, sample, 0)
        descent._differentiate([5, 0, 2])
        gradients.append((descent.w_down.grad, descent.w_up.grad))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tile", [None, (3, 2)])  # the last is cut at the border
def test_a_sample_of_the_queries_fits_as_well_as_all(vit, monkeypatch, tile):
    images, others = natural(128), natural(32)
    errors = {}
    for queries in (25, 6, 0):
        student = sp.sparsify(vit, CONFIG.replace(tile=tile))
        if queries:
            monkeypatch.setattr(calibration, "QUERIES", queries)
            sp.calibrate(student, images)
        with torch.no_grad():
            difference = student.forward_features(others) - vit.forward_features(others)
        errors[queries] = difference.square().mean().item()
    assert errors[6] < 1.1 * errors[25]
    assert errors[6] < errors[0]


def test_sampled_queries_are_whole_groups_all_over_the_grid_and_others_in_each_image(vit, monkeypatch):
    layer = sparse_layers(sp.sparsify(vit, CONFIG))[0]
    assert torch.equal(calibration._sampled_queries(layer, 3), torch.arange(1, 26)[:, None])
    monkeypatch.setattr(calibration, "QUERIES", 5)
    drawn = [calibration._sampled_queries(layer, image) for image in range(40)]
    for queries in drawn:  # one of each row of the 5 x 5 grid
        assert ((queries.flatten() - 1) // 5).tolist() == [0, 1, 2, 3, 4]
    assert set(torch.cat(drawn).flatten().tolist()) == set(range(1, 26))
    assert torch.equal(drawn[7], calibration._sampled_queries(layer, 7))
    tiled = sparse_layers(sp.sparsify(vit, CONFIG.replace(tile=(2, 2))))[0]
    assert calibration._sampled_queries(tiled, 0).shape == (2, 4)  # of nine tiles that 25 queries are in


def test_spread_takes_one_of_each_part():
    random = torch.Generator().manual_seed(0)
    assert calibration._spread(9, 9, random).tolist() == list(range(9))
    drawn = torch.stack([calibration._spread(3, 10, random) for _ in range(200)])
    assert [sorted(set(column.tolist())) for column in drawn.T] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_the_error_is_that_of_the_output(vit):
    """The loss of a step against the layer's own output with and without what it drops."""
    images = natural(6)
    student = sp.sparsify(vit, CONFIG)
    sp.calibrate(student, images)
    held = calibration._Held(student, 6)
    with torch.no_grad():
        calibration._fit_attention(student, images, 1e-4, None, held)
    layer = sparse_layers(student)[0]
    q, k = qk_of(student, images)[0]
    sample = held.take(layer)
    loss = calibration._Descent(layer, sample, 0)._loss(sample)
    v = sample.v.transpose(0, 1).double()
    a_down = reference.coefficients(q, k, layer.predictor.w_down.double(), layer.scale)[:, :, 1:]
    w_up = layer.predictor.w_up.double()
    mask = layer.predict(q.float(), k.float())[0].mask()[:, :, 1:]
    attention = reference.full_attention(q, k, layer.scale)[:, :, 1:]
    kept = torch.where(mask, attention, 0)
    estimate = torch.where(mask, 0, a_down @ w_up)
    output = (kept / kept.sum(-1, keepdim=True) * (1 - estimate.sum(-1, keepdim=True)) + estimate) @ v
    mixing = layer.adapter.mixing(layer.host).double()
    expected = ((output - attention @ v).transpose(1, 2).flatten(2) @ mixing.mT).square().sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0)


def test_one_image_is_enough(student):
    assert sp.calibrate(student, natural(1)).images == 1


def test_refining_brings_the_output_closer():
    vit = make_vit(depth=4)
    images, others = natural(256), natural(32)
    errors = {}
    for steps in ("none", "ridge", "refined"):
        student = sp.sparsify(vit, CONFIG)
        if steps != "none":
            sp.calibrate(student, images, refine=steps == "refined")
        with torch.no_grad():
            difference = student.forward_features(others) - vit.forward_features(others)
        errors[steps] = difference.square().mean().item()
    assert errors["refined"] < 0.85 * errors["ridge"]
    assert errors["refined"] < 0.85 * errors["none"]


def test_deterministic(vit):
    images = natural(40)
    results = []
    for _ in range(2):
        student = sp.sparsify(vit, CONFIG)
        sp.calibrate(student, images)
        results.append(
            torch.cat([p.flatten() for layer in sparse_layers(student) for p in layer.predictor.parameters()])
        )
    assert torch.equal(*results)


def test_calibrating_again_forgets_the_first_time(vit):
    student, fresh = sp.sparsify(vit, CONFIG), sp.sparsify(vit, CONFIG)
    images = natural(32)
    sp.calibrate(student, natural(16))
    sp.calibrate(student, images)
    sp.calibrate(fresh, images)
    for again, once in zip(sparse_layers(student), sparse_layers(fresh), strict=True):
        assert torch.equal(again.predictor.w_down, once.predictor.w_down)
        assert torch.equal(again.predictor.w_up, once.predictor.w_up)


def test_tensor_loader_and_generator_give_the_same(vit):
    images = natural(32)
    labels = torch.zeros(32)
    sources = (
        images,
        list(images.split(16)),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16),
        ((batch, None) for batch in images.split(16)),
    )
    results = []
    for source in sources:
        student = sp.sparsify(vit, CONFIG)
        report = sp.calibrate(student, source)
        assert report.images == 32
        results.append(sparse_layers(student)[0].predictor.w_up)
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_host_weights_and_mode_stay(vit, student):
    student.train()
    sp.calibrate(student, natural(8))
    assert student.training
    for name, value in vit.state_dict().items():
        assert torch.equal(student.state_dict()[name], value)
    assert all(parameter.grad is None for parameter in student.parameters())
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert not any(layer.observers or layer.is_dense() for layer in sparse_layers(student))


def test_prefix_keys_do_not_use_up_the_budget(student):
    images = natural(16)
    sp.calibrate(student, images)
    sp.reconfigure(student, tau=0.0, basis_threshold=0.0)
    with sp.capture(student, layers=[0]) as seen:
        student(images)
    counts = seen[0].mask[:, :, 1:].sum(-1)
    budget = sparse_layers(student)[0].budget()
    assert counts.max() <= budget + 2
    assert counts.float().mean() > budget + 0.5  # nearly always B patches and the class token


def test_report(student):
    report = sp.calibrate(student, natural(40))
    assert report.images == 40
    assert report.seconds > 0
    assert len(report.layers) == 2
    assert 0 < report.recall <= 1
    assert 0 < report.layers[0].coefficient_density < 1
    assert "calibrated on 40 images" in str(report)
    assert report.to_dict()["layers"][1]["recall"] == report.layers[1].recall


def test_recall_grows_with_the_budget(vit):
    images = natural(32)
    recalls = []
    for keep in (0.1, 0.3, 0.6):
        student = sp.sparsify(vit, CONFIG.replace(keep=keep))
        recalls.append(sp.calibrate(student, images).recall)
    assert recalls == sorted(recalls)


def test_progress_is_told(student):
    told = []

    def start(title, total):
        told.append([title, total, 0])

        def advance(done):
            told[-1][2] += done

        return advance

    sp.calibrate(student, natural(20), progress=start)
    assert told == [["fitting the attention", 20, 20], ["fitting the output", 64, 64]]


def test_calibrating_at_another_size_makes_it_the_predictors_own(vit):
    student = sp.sparsify(vit, CONFIG)
    student.set_input_size((28, 32))
    sp.calibrate(student, natural(16, (28, 32)))
    assert all(layer.predictor.grid == (7, 8) for layer in sparse_layers(student))
    assert sparse_layers(student)[0].basis_threshold == CONFIG.basis_threshold


def test_a_model_of_any_size_is_calibrated_at_its_own():
    student = sp.sparsify(make_vit(dynamic_img_size=True), CONFIG)
    student(natural(1, (32, 32)))  # an image of another size came before
    sp.calibrate(student, natural(16))
    with pytest.raises(DataError, match="these images make 65 tokens, the model's own size makes 26"):
        sp.calibrate(student, natural(16, (32, 32)))


def test_held_images_are_spread_over_the_stream(vit, monkeypatch):
    student = sp.sparsify(vit, CONFIG)
    per_image = 2 * (26 + 26 + 25) * 24 * 4
    monkeypatch.setattr(calibration, "HELD_BYTES", 4 * per_image)
    taken = []
    descend = calibration._Descent.__init__

    def watch(self, layer, held, seed):
        taken.append(len(held.members))
        descend(self, layer, held, seed)

    monkeypatch.setattr(calibration._Descent, "__init__", watch)
    sp.calibrate(student, natural(21))  # every sixth: 0, 6, 12, 18
    assert taken == [4, 4]


def test_dense_layers_and_bfloat16_models(photos):
    student = sp.sparsify(make_vit(), CONFIG.replace(keep=[1.0, 0.3])).to(torch.bfloat16)
    sp.calibrate(student, natural(16).to(torch.bfloat16))
    assert bool(torch.isfinite(student(photos.to(torch.bfloat16))).all())


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.empty(0, 3, 20, 20), "no images"),
        ([], "no images"),
        (iter([]), "no images"),
        (torch.full((2, 3, 20, 20), torch.nan), "image 0 holds NaN"),
        ([torch.zeros(3, 3, 20, 20), torch.full((2, 3, 20, 20), torch.inf)], "image 3 holds NaN or infinite"),
        (torch.zeros(2, 3, 24, 24), "images are 24 x 24 but the model takes 20 x 20"),
        (
            torch.zeros(3, 20, 20),
            r"expected a tensor \[batch, channels, height, width\], got shape \(3, 20, 20\)",
        ),
        (torch.zeros(2, 3, 20, 20, dtype=torch.uint8), "images are torch.uint8"),
        (["a.jpg"], "got str"),
    ],
)
def test_bad_images_are_refused_and_nothing_is_changed(student, images, message):
    sp.calibrate(student, natural(16))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    with pytest.raises(DataError, match=message):
        sp.calibrate(student, images)
    for name, value in student.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(layer.observers or layer.is_dense() for layer in sparse_layers(student))


def test_weights_that_are_not_finite_are_named(student):
    with torch.no_grad():
        student.blocks[0].attn.qkv.weight[0] = torch.nan
    with pytest.raises(DataError, match="attention is not finite on these images: are its weights"):
        sp.calibrate(student, natural(4))


def test_a_dense_model_and_a_bad_ridge_are_refused(vit, student):
    from sparsifiner.errors import UnsupportedModelError

    with pytest.raises(UnsupportedModelError, match="is not a converted model"):
        sp.calibrate(vit, natural(2))
    with pytest.raises(ConfigError, match="ridge must be more than 0"):
        sp.calibrate(student, natural(2), ridge=0)


def test_batches_keep_the_order():
    images = natural(5)
    assert torch.equal(torch.cat(list(as_batches(images, 2))), images)


def test_cells_need_no_calibration(vit, photos):
    for student in (
        sp.sparsify(vit, sp.SparseConfig(0.3, pattern="cells")),
        sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5)),
    ):
        sp.reconfigure(student, pattern="cells")
        with pytest.raises(ConfigError, match="there is nothing to calibrate, use the model as it is"):
            sp.calibrate(student, photos)
