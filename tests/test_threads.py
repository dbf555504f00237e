"""What belongs to a call belongs to no other: several threads, nested calls, calls that fail half way."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import sparsifiner as sp
from sparsifiner.convert import conversion_of, sparse_layers

from .toys import make_vit, sharpen

CONFIG = sp.SparseConfig(keep=0.3, n_down=5, tau=0.0)
# The same number of patches in other places, and other numbers.
SIZES = [(20, 20), (100, 4), (4, 100), (32, 16), (8, 12)]


def make_dinov2():
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        image_size=20, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_labels=7,
        initializer_range=0.3,
    )  # fmt: skip
    return sharpen(transformers.Dinov2ForImageClassification(config))


HOSTS = {"timm": lambda: make_vit(dynamic_img_size=True), "huggingface": make_dinov2}
FORMS = {
    "per query": {},
    "tiles": {"tile": (2, 2)},
    "pattern": {"pattern": "window"},
    "low rank": {"pattern": "linformer"},
    "evit": {"tokens": sp.TokenConfig(0.6, blocks=[0])},
    "evit fused": {"tokens": sp.TokenConfig(0.6, blocks=[0], fuse=True)},
    "dynamicvit": {"tokens": sp.TokenConfig(0.6, "dynamicvit", blocks=[0])},
    "eager": {"backend": "eager"},
}


def logits(model, images):
    out = model(images)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.fixture(params=HOSTS)
def host(request):
    return HOSTS[request.param]()


@pytest.fixture
def pictures():
    return [torch.randn(2, 3, *size) for size in SIZES]


@contextlib.contextmanager
def waiting(student, parties):
    """Calls of so many threads wait for each other before every layer, so that they run through each other."""
    barrier = threading.Barrier(parties)

    def wait(*_):
        barrier.wait(timeout=30)

    handles = [layer.register_forward_pre_hook(wait) for layer in sparse_layers(student)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def together(jobs):
    """Each job in a thread of its own, at once; their results, or what they raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(job) for job in jobs]]


@pytest.mark.parametrize("form", FORMS)
def test_threads_with_images_of_different_sizes(host, pictures, form):
    student = sp.sparsify(host, CONFIG.replace(**FORMS[form]))
    with torch.inference_mode():
        expected = [logits(student, images) for images in pictures]

    def call(images):
        with torch.inference_mode():
            return [logits(student, images) for _ in range(3)]

    with waiting(student, len(pictures)):
        found = together([lambda images=images: call(images) for images in pictures])
    for one, several in zip(expected, found, strict=True):
        assert all(torch.equal(one, other) for other in several)


def test_threads_that_train(host, pictures):
    """Presence, shares and gradients of each call are its own."""
    student = sp.sparsify(host, CONFIG.replace(tokens=sp.TokenConfig(0.6, "dynamicvit", blocks=[0]))).train()
    grid = conversion_of(student).grid

    def call(images):
        out = logits(student, images)
        call = grid.latest
        assert call.presence.shape == (2, 1 + images.shape[2] * images.shape[3] // 16)
        assert call.presence.grad_fn is not None
        return torch.autograd.grad(out.sum() + call.shares[0].sum(), list(student.parameters()), allow_unused=True)

    with waiting(student, len(pictures)):
        for gradients in together([lambda images=images: call(images) for images in pictures]):
            assert all(gradient is None or bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_looking_and_dense_mode_are_of_one_thread(host, pictures):
    student = sp.sparsify(host, CONFIG)
    with torch.inference_mode():
        sparse = logits(student, pictures[0])
        with sp.dense_mode(student):
            dense = logits(student, pictures[0])

    @torch.inference_mode()
    def look():
        with sp.dense_mode(student), sp.capture(student, layers=[0]) as seen:
            return logits(student, pictures[0]), seen[0].full_map.shape[-1]

    @torch.inference_mode()
    def call():
        return logits(student, pictures[0]), None

    with waiting(student, 2):
        (first, tokens), (second, _) = together([look, call])
    assert tokens == 26
    assert torch.equal(first, dense)
    assert torch.equal(second, sparse)


@pytest.mark.parametrize("form", ["per query", "evit"])
@pytest.mark.parametrize("fails", [False, True])
@torch.inference_mode()
def test_a_call_within_a_call(host, pictures, form, fails):
    student = sp.sparsify(host, CONFIG.replace(**FORMS[form]))
    expected = [logits(student, images) for images in pictures]
    last = sparse_layers(student)[-1]
    inner = []

    def nested(*_):
        handle.remove()
        if fails:
            broken = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("half way")))
            with pytest.raises(RuntimeError, match="half way"):
                student(pictures[1])
            broken.remove()
        else:
            inner.append(logits(student, pictures[1]))

    handle = last.register_forward_pre_hook(nested)
    assert torch.equal(logits(student, pictures[0]), expected[0])
    assert fails or torch.equal(inner[0], expected[1])
    assert conversion_of(student).grid.latest.size == (5, 5)
    for images, wanted in zip(pictures, expected, strict=True):
        assert torch.equal(logits(student, images), wanted)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@torch.inference_mode()
def test_a_call_that_failed_half_way_leaves_nothing(host, pictures, error):
    student = sp.sparsify(host, CONFIG.replace(tokens=sp.TokenConfig(0.6, blocks=[0])))
    expected = logits(student, pictures[3])
    features, kept = sp.feature_map(student, pictures[3])
    handle = sparse_layers(student)[-1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error("half way")))
    with pytest.raises(error, match="half way"):
        student(pictures[0])
    handle.remove()
    assert torch.equal(logits(student, pictures[3]), expected)
    assert conversion_of(student).grid.latest.size == (8, 4)
    again = sp.feature_map(student, pictures[3])
    assert torch.equal(again[0], features)
    assert torch.equal(again[1], kept)


def test_compiled_models_in_threads(pictures):
    torch.compiler.reset()  # what other tests compiled of the same code counts against one limit
    student = sp.sparsify(make_vit(dynamic_img_size=True), CONFIG)
    compiled = torch.compile(student, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        expected = [logits(student, images) for images in pictures]
        for images, wanted in zip(pictures, expected, strict=True):  # compiled one after the other
            torch.testing.assert_close(compiled(images), wanted)
        with sp.dense_mode(student):
            dense = student(pictures[0])
            torch.testing.assert_close(compiled(pictures[0]), dense)
        assert not torch.allclose(dense, expected[0], atol=1e-4)

    @torch.no_grad()
    def call(images):
        return [compiled(images) for _ in range(5)]

    found = together([lambda images=images: call(images) for images in pictures])
    for one, several in zip(expected, found, strict=True):
        for other in several:
            torch.testing.assert_close(other, one)
