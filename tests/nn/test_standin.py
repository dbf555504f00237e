"""A converted model has one set of modules: what users do to it takes effect, dense and sparse, and survives."""

import copy
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as QuantisedLinear
from torch.ao.quantization import quantize_dynamic

import sparsifiner as sp
from sparsifiner.convert import sparse_layers
from sparsifiner.errors import CheckpointError
from sparsifiner.tokens.block import PruningBlock

from ..toys import make_vit, sharpen

CONFIG = sp.SparseConfig(keep=0.3, n_down=5, tau=0.0)


def make_huggingface() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=20, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48,
        num_labels=7, initializer_range=0.3,
    )  # fmt: skip
    return sharpen(transformers.ViTForImageClassification(config))


class Case:
    """A host, and what it calls its parts."""

    def __init__(self, make, projections, output):
        self.make, self.projections, self.output = make, projections, output

    def student(self, **changes):
        return sp.sparsify(self.make(), CONFIG.replace(**changes))

    @staticmethod
    def logits(model, images):
        out = model(images)
        return out if isinstance(out, torch.Tensor) else out.logits


CASES = {
    "timm": Case(make_vit, ("qkv", "proj"), "proj"),
    "huggingface": Case(make_huggingface, ("q_proj", "k_proj", "v_proj", "o_proj"), "o_proj"),
}
FORMS = {
    "sparse": {},
    "dense": {"keep": 1.0},
    "sparse, dropping tokens": {"tokens": sp.TokenConfig(0.6, blocks=[0])},
    "dense, dropping tokens": {"keep": 1.0, "tokens": sp.TokenConfig(0.6, blocks=[0])},
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@torch.no_grad()
def test_a_child_that_is_replaced_is_the_one_that_runs(case, form, photos):
    student = case.student(**form)
    before = case.logits(student, photos)
    for layer in sparse_layers(student):
        old = getattr(layer, case.output)
        new = nn.Linear(old.in_features, old.out_features)
        new.load_state_dict({name: -value for name, value in old.state_dict().items()})
        setattr(layer, case.output, new)
        assert getattr(layer.host, case.output) is new
    after = case.logits(student, photos)
    assert not torch.allclose(after, before, atol=1e-3)
    expected = case.student(**form)
    for layer in sparse_layers(expected):
        for parameter in getattr(layer, case.output).parameters():
            parameter.neg_()
    assert torch.equal(after, case.logits(expected, photos))
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(case.logits(again, photos), after)
        for layer in sparse_layers(again):  # a copy is one set of modules too
            assert layer.host._modules is layer._modules
            setattr(layer, case.output, nn.Identity())
        assert not torch.allclose(case.logits(again, photos), after, atol=1e-3)
    assert torch.equal(case.logits(student, photos), after)
    dense = sp.restore(student)
    with sp.dense_mode(student):
        assert torch.equal(case.logits(dense, photos), case.logits(student, photos))
    assert set(dense.state_dict()) == set(case.make().state_dict())


@torch.no_grad()
def test_plain_attributes_of_the_host_are_its_own(vit, photos):
    student = sp.sparsify(vit, CONFIG)
    layer = sparse_layers(student)[0]
    layer.fused_attn = False  # torch's own attention would take no notice of a scale
    assert layer.host.fused_attn is layer.fused_attn is False
    for form in (CONFIG.keep, 1.0):
        sp.reconfigure(student, keep=form)
        before = student(photos)
        layer.scale *= 2
        assert layer.host.scale == layer.scale
        assert not torch.allclose(student(photos), before, atol=1e-4)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = layer.no_such_thing
    layer.config = CONFIG  # ours, although a host may have one
    assert "config" not in vars(layer.host)


@torch.no_grad()
def test_hooks_of_the_host_fire_once_on_every_path(vit, form, photos):
    fired = []
    vit.blocks[0].attn.register_forward_hook(lambda module, inputs, out: fired.append("before conversion"))
    student = sp.sparsify(vit, CONFIG.replace(**form))
    handle = student.blocks[0].attn.register_forward_hook(lambda module, inputs, out: fired.append("after"))
    student(photos)
    assert sorted(fired) == ["after", "before conversion"]
    sp.restore(student)(photos)
    assert sorted(fired) == ["after", "after", "before conversion", "before conversion"]
    handle.remove()
    student(photos)
    assert fired.count("after") == 2


def test_modes_and_types_are_those_of_the_host_too(case):
    student = case.student(tokens=sp.TokenConfig(0.6, blocks=[0]))
    for mode in (True, False):
        student.train(mode)
        for module in student.modules():
            if hasattr(module, "release"):
                assert module.host.training is mode is module.training
    student.double()
    assert all(p.dtype == torch.float64 for layer in sparse_layers(student) for p in layer.host.parameters())


@torch.no_grad()
def test_quantised_layers_are_the_ones_that_run(case, form, photos):
    student = case.student(**form)
    small = quantize_dynamic(student, {nn.Linear})
    for layer in sparse_layers(small):
        for name in case.projections:
            assert isinstance(getattr(layer, name), QuantisedLinear)
            assert getattr(layer.host, name) is getattr(layer, name)
    difference = (case.logits(small, photos) - case.logits(student, photos)).abs().max()
    assert difference > 0
    with pytest.raises(CheckpointError, match="quantise after loading"):
        sp.save(small, "never-written.safetensors")


def lora(case, **settings):
    settings = {"r": 2, "target_modules": list(case.projections), "init_lora_weights": False} | settings
    return LoraConfig(**settings)


def test_lora_trains_saves_and_merges(case, form, photos, tmp_path):
    plain = case.student(**form)
    untouched = copy.deepcopy(plain).state_dict()
    with torch.no_grad():
        before = case.logits(plain, photos)
    adapted = get_peft_model(plain, lora(case))
    with torch.no_grad():
        assert not torch.allclose(case.logits(adapted, photos), before, atol=1e-3)
    trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) >= 2 * 2 * len(case.projections)  # A and B, in two layers
    optimiser = torch.optim.SGD(trainable.values(), lr=1e-2)
    case.logits(adapted, photos).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    optimiser.step()
    with torch.no_grad():
        trained = case.logits(adapted.eval(), photos)

        sp.save(adapted, tmp_path / "merged.safetensors")  # and leaves the adapters as they are
        assert torch.equal(case.logits(adapted, photos), trained)
        torch.testing.assert_close(
            case.logits(sp.load(tmp_path / "merged.safetensors", model=case.make()), photos), trained,
            rtol=1e-3, atol=1e-4,
        )  # fmt: skip
        adapted.save_pretrained(tmp_path / "adapters")
        again = PeftModel.from_pretrained(case.student(**form), tmp_path / "adapters").eval()
        torch.testing.assert_close(case.logits(again, photos), trained, rtol=1e-5, atol=1e-5)
        student = adapted.merge_and_unload()
        torch.testing.assert_close(case.logits(student, photos), trained, rtol=1e-3, atol=1e-4)
    assert set(student.state_dict()) == set(untouched)
    dense = sp.restore(student)
    with torch.no_grad(), sp.dense_mode(student):
        assert torch.equal(case.logits(dense, photos), case.logits(student, photos))


def test_a_head_trained_beside_adapters_is_saved(vit, photos, tmp_path):
    adapted = get_peft_model(sp.sparsify(vit, CONFIG), lora(CASES["timm"], modules_to_save=["head"])).eval()
    with torch.no_grad():
        adapted.base_model.model.head.modules_to_save["default"].weight.mul_(3)
        trained = adapted(photos)
        sp.save(adapted, tmp_path / "a.safetensors")
        loaded = sp.load(tmp_path / "a.safetensors", model=make_vit())
        torch.testing.assert_close(loaded(photos), trained, rtol=1e-3, atol=1e-4)


def test_wrappers_are_saved_as_the_model_inside(vit, photos, tmp_path):
    student = sp.sparsify(vit, CONFIG)
    for wrapper in (nn.DataParallel(student), torch.compile(student, backend="eager")):
        sp.save(wrapper, tmp_path / "a.safetensors")
        assert torch.equal(sp.load(tmp_path / "a.safetensors", model=make_vit())(photos), student(photos))


@torch.no_grad()
def test_replicas_of_data_parallel_run_on_their_own_weights(vit, photos):
    """As `torch.nn.parallel.replicate` makes them, which needs GPUs: dictionaries first, then what is in them."""
    student = sp.sparsify(vit, CONFIG.replace(tokens=sp.TokenConfig(0.6, blocks=[0])))
    modules = list(student.modules())
    copies = [module._replicate_for_data_parallel() for module in modules]
    numbers = {module: number for number, module in enumerate(modules)}
    for module, replica in zip(modules, copies, strict=True):
        for name, child in module._modules.items():
            if child is not None:
                setattr(replica, name, copies[numbers[child]])
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else -parameter.detach())
    for form in (CONFIG.keep, 1.0):
        sp.reconfigure(student, keep=form)
        for original, replica in zip(modules, copies, strict=True):
            if hasattr(original, "keep"):
                replica.__dict__["keep"] = form
        expected = copy.deepcopy(student)
        for parameter in expected.parameters():
            parameter.neg_()
        assert torch.equal(copies[0](photos), expected(photos))
        assert not torch.allclose(student(photos), expected(photos), atol=1e-3)
    assert isinstance(copies[0].blocks[0], PruningBlock)
    assert copies[0].blocks[0].host.attn is copies[0].blocks[0].attn
