"""`torch.func` through the operators and through whole models, against ordinary autograd."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsifiner as sp
from sparsifiner.errors import BackendError
from sparsifiner.ops.attention import Residual, predict, sparse_attention

BACKENDS = ["eager", "cpu"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=[None, (2, 2)])
def tile(request):
    return request.param


@pytest.fixture
def layer(backend, tile):
    """A layer as a function of all it has derivatives for, and such inputs."""
    q, k, v = (torch.randn(2, 2, 13, 4) for _ in range(3))
    w_down, w_up = torch.rand(2, 3, 13) / 13, torch.rand(2, 3, 13) / 13

    def run(q, k, v, w_down, w_up):
        connectivity, residual = predict(q, k, w_down, w_up, budget=3, grid=(3, 4), tau=0.0, tile=tile, backend=backend)
        return sparse_attention(q, k, v, connectivity, residual=residual, backend=backend)

    return run, (q, k, v, w_down, w_up)


@pytest.fixture
def student(vit, backend, tile):
    return sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, backend=backend, tile=tile))


def test_grad_and_vjp_of_a_layer(layer):
    run, inputs = layer
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    direction = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, direction)
    grads = torch.func.grad(lambda *x: (run(*x) * direction).sum(), argnums=tuple(range(5)))(*inputs)
    torch.testing.assert_close(grads, expected)
    again, pull = torch.func.vjp(run, *inputs)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(pull(direction), expected)


def test_jacobian_of_a_layer(layer):
    run, inputs = layer
    leaves = [x.clone().requires_grad_() for x in inputs]
    row = run(*leaves)[1, 1, 5]
    jacobians = torch.func.jacrev(lambda *x: run(*x)[1, 1, 5], argnums=tuple(range(5)))(*inputs)
    for i in range(len(row)):
        expected = torch.autograd.grad(row[i], leaves, retain_graph=True)
        torch.testing.assert_close(tuple(jacobian[i] for jacobian in jacobians), expected)


@pytest.mark.parametrize("mapped", ["inputs", "weights", "one of them"])
def test_vmap_over_anything(layer, mapped):
    run, inputs = layer
    several = {"inputs": (0, 1, 2), "weights": (3, 4), "one of them": (1,)}[mapped]
    stacked = [torch.stack([x, 1.5 * x, x.flip(-1)], dim=i % 3) if i in several else x for i, x in enumerate(inputs)]
    dims = tuple(i % 3 if i in several else None for i in range(5))
    out = torch.vmap(run, in_dims=dims)(*stacked)
    for i in range(3):
        own = [x.select(d, i) if d is not None else x for x, d in zip(stacked, dims, strict=True)]
        torch.testing.assert_close(out[i], run(*own))


def test_grad_of_a_model(student, photos):
    parameters = dict(student.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(student, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)(parameters, photos)
    student(photos).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(grads[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    # And of each image, as differential privacy wants them.
    each = torch.func.vmap(torch.func.grad(lambda p, x: loss(p, x[None])), in_dims=(None, 0))(parameters, photos)
    for name, parameter in parameters.items():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-4, atol=1e-4)


def test_jacobian_of_a_model(student, photos):
    x = photos[:1].requires_grad_()
    logits = student(x)[0]
    jacobian = torch.func.jacrev(lambda x: student(x)[0])(photos[:1].detach())
    for i in range(len(logits)):
        torch.testing.assert_close(jacobian[i], torch.autograd.grad(logits[i], x, retain_graph=True)[0])


def test_vmap_of_a_model(student, photos):
    for needs_gradient in (True, False):  # without, the kernels take another path
        with torch.set_grad_enabled(needs_gradient):
            out = torch.vmap(lambda photo: student(photo[None])[0])(photos)
            torch.testing.assert_close(out, student(photos))


@torch.no_grad()
def test_models_of_one_structure_at_once(student, photos, backend):
    parameters = {name: torch.stack([p, 1.1 * p]) for name, p in student.named_parameters()}

    def ensemble():
        return torch.vmap(lambda p: torch.func.functional_call(student, p, (photos,)))(parameters)

    if backend == "cpu":
        with pytest.raises(BackendError, match="torch.vmap over a predictor's weights needs backend='eager'"):
            ensemble()
        return
    out = ensemble()
    for i in range(2):
        own = {name: p[i] for name, p in parameters.items()}
        torch.testing.assert_close(out[i], torch.func.functional_call(student, own, (photos,)))


@torch.no_grad()
def test_packed_weights_cannot_be_mapped_over(layer):
    from sparsifiner.ops import cpu
    from sparsifiner.ops.connectivity import query_groups

    q, k, v, w_down, w_up = layer[1]
    packed, members = cpu.pack(w_down, w_up, 0.0), query_groups((3, 4), 1, None, q.device)
    settings = (members, None, 3, 0.0, 0.5, 1, True, False)
    with pytest.raises(BackendError, match="torch.vmap cannot go over the weights"):
        torch.vmap(lambda up: torch.ops.sparsifiner.fused(q, k, v, up, *packed.tensors()[1:], *settings))(
            packed.up.expand(2, *packed.up.shape)
        )


@torch.no_grad()
def test_functional_call_never_runs_on_the_weights_of_another_call(vit, photos):
    """Tensors that are gone leave their address to the next; what was packed of them must not be taken for its own."""
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tau=0.0, backend="cpu"))
    for i in range(12):
        changed = {name: p * i if "w_up" in name else p for name, p in student.named_parameters()}
        outputs = []
        for backend in ("eager", "cpu"):
            sp.reconfigure(student, backend=backend)
            outputs.append(torch.func.functional_call(student, changed, (photos,)))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        del changed


def test_what_has_no_second_derivative_says_so(layer):
    run, inputs = layer
    message = "use backend='reference'"

    def loss(q):
        return run(q, *inputs[1:]).square().sum()

    with pytest.raises(BackendError, match=message):
        torch.func.hessian(loss)(inputs[0])
    with pytest.raises(BackendError, match=message):
        torch.func.jvp(loss, (inputs[0],), (inputs[0],))
    leaf = inputs[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(BackendError, match=message):
        grad.sum().backward()


def test_the_reference_has_second_derivatives():
    q, k, v = (torch.randn(1, 1, 7, 3, dtype=torch.float64) for _ in range(3))
    w = torch.rand(1, 2, 7, dtype=torch.float64) / 7
    connectivity, residual = predict(q, k, w, w, budget=2, grid=(2, 3), tau=0.0, backend="reference")
    estimate = Residual(residual.a_down.detach(), residual.w_up)

    def loss(v, k):
        return sparse_attention(q, k, v, connectivity, residual=estimate, backend="reference").square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.func.hessian(loss)(v, k)
    assert hessian.shape == (*v.shape, *v.shape)
    assert hessian.abs().max() > 0


@pytest.mark.parametrize("grad", [True, False])
def test_shapes_on_the_meta_device(vit, photos, tile, grad):
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, tile=tile)).to("meta")
    with torch.set_grad_enabled(grad):
        out = student(photos.to("meta"))
    assert out.shape == (6, 7)
    assert out.device.type == "meta"
    if grad:
        out.sum().backward()
        assert all(p.grad.shape == p.shape for p in student.parameters())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pattern": "window"}, "meta tensors have none: infer shapes with pattern='learned'"),
        ({"backend": "reference"}, "backend 'reference' cannot run here: .* meta tensors have none"),
        ({"backend": "cpu"}, "backend 'cpu' cannot run here: .* the tensors are on meta"),
    ],
)
def test_what_needs_values_says_so_on_the_meta_device(vit, photos, settings, reason):
    student = sp.sparsify(vit, sp.SparseConfig(keep=0.3, n_down=5, **settings)).to("meta")
    with pytest.raises(BackendError, match=reason):
        student(photos.to("meta"))
