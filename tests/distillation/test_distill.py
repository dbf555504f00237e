"""Whole runs on a model of milliseconds: what learns, and that interruptions change nothing."""

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

import sparsifiner as sp
from sparsifiner import checkpoint
from sparsifiner.checkpoint import describe
from sparsifiner.convert import sparse_layers
from sparsifiner.distillation import loop, losses, phases, state
from sparsifiner.distillation.data import from_tensors
from sparsifiner.distillation.log import read
from sparsifiner.distillation.run import randomise
from sparsifiner.distillation.straight import straight_through
from sparsifiner.errors import CheckpointError, ConfigError, DataError, TrainingError
from sparsifiner.inspect import tuning

QUICK = sp.Recipe(
    keep=0.3,
    tau=0.0,
    basis_threshold=0.0,
    phase1_epochs=1,
    phase1_warmup_epochs=0.25,
    phase1_learning_rate=1e-2,
    phase2_epochs=1,
    phase2_warmup_epochs=0.25,
    phase2_learning_rate=1e-3,
    batch_size=8,
    mixup=0.0,
    cutmix=0.0,
    log_every=2,
    save_every=3,
)


@pytest.fixture
def data():
    return torch.randn(48, 3, 20, 20), torch.randint(0, 7, (48,))


@pytest.fixture
def make(vit):
    return lambda: sp.sparsify(vit, sp.SparseConfig(0.3, n_down=5, tau=0.0, basis_threshold=0.0))


def same(one, other):
    first, second = one.state_dict(), other.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def moved(student, before):
    return {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}


def weights(student):
    return {name: tensor.clone() for name, tensor in student.state_dict().items()}


def is_predictor(name):
    return ".predictor." in name


def test_phase_1_moves_the_predictors_alone_and_lowers_the_loss(make, data):
    student = make()
    randomise(student, 0)
    before = weights(student)
    report = sp.distill(student, data, QUICK.replace(phase1_epochs=12, phase2_epochs=0, start="given"))
    assert moved(student, before) == {name for name in before if is_predictor(name)}
    assert report.lines[-1]["attention"] < 0.7 * report.lines[0]["attention"]


@pytest.mark.parametrize(
    ("settings", "predictors_move"),
    [
        ({}, True),
        ({"residual": False}, False),  # the mask has no derivative
        ({"residual": False, "straight_through": True}, True),
        ({"residual": False, "attention_weight": 1.0}, True),
    ],
)
def test_phase_2_moves_what_has_a_gradient(make, data, settings, predictors_move):
    student = make()
    before = weights(student)
    sp.distill(student, data, QUICK.replace(phase1_epochs=0, start="given", weight_decay=0.0, **settings))
    changed = moved(student, before)
    assert {name for name in before if not is_predictor(name)} <= changed
    assert any(is_predictor(name) for name in changed) == predictors_move


def test_a_frozen_host_stays_bit_for_bit(make, data):
    student = make()
    before = weights(student)
    sp.distill(student, data, QUICK.replace(phase1_epochs=0, freeze_host=True))
    changed = moved(student, before)
    assert changed
    assert all(is_predictor(name) for name in changed)


def test_a_frozen_host_in_the_papers_form_has_nothing_to_learn(make, data):
    with pytest.raises(ConfigError, match="freeze_host leaves phase 2 nothing to learn"):
        sp.distill(make(), data, QUICK.replace(phase1_epochs=0, freeze_host=True, residual=False))


def test_phase_2_lowers_the_losses(make, data):
    report = sp.distill(make(), data, QUICK.replace(phase1_epochs=0, phase2_epochs=8, label_weight=0.0, start="given"))
    first, last = report.lines[0], report.lines[-1]
    assert last["token"] < 0.8 * first["token"]
    assert "label" not in last


def test_the_teacher_is_the_dense_model_and_stays(make, data, vit):
    before = weights(vit)
    seen = []
    sp.distill(make(), data, QUICK.replace(phase1_epochs=0, start="given"), teacher=vit, on_log=seen.append)
    assert moved(vit, before) == set()
    assert seen
    with pytest.raises(ConfigError, match="pass the dense one"):
        sp.distill(make(), data, QUICK, teacher=make())


def test_flags_and_generators_are_given_back(make, data):
    student = make()
    student.pos_embed.requires_grad_(False)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    frozen = student.pos_embed.detach().clone()
    sp.distill(student, data, QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(student.pos_embed, frozen)
    assert [name for name, p in student.named_parameters() if not p.requires_grad] == ["pos_embed"]
    assert not student.training


def test_weight_decay_reaches_w_up_and_matrices_only(make):
    student = make()
    names = phases.learns(student, QUICK, 2, {name for name, _ in student.named_parameters()})
    decayed = set()
    for group in phases.parameter_groups(student, QUICK, 2, names):
        if group["weight_decay"]:
            decayed |= set(group["names"])
    assert {name.rpartition(".")[2] for name in decayed} == {"weight", "w_up"}
    assert not any("norm" in name or name in ("pos_embed", "cls_token") for name in decayed)
    shapes = {name: p.ndim for name, p in student.named_parameters()}
    assert all(shapes[name] >= 2 for name in decayed)


def test_l1_shrinks_the_basis(make, data):
    sizes = []
    for l1 in (0.0, 1.0):
        student = make()
        sp.distill(student, data, QUICK.replace(phase1_epochs=6, phase2_epochs=0, l1=l1, start="given"))
        sizes.append(sum(layer.predictor.w_up.abs().sum().item() for layer in sparse_layers(student)))
    assert sizes[1] < 0.8 * sizes[0]


def test_schedule():
    schedule = phases.Schedule(steps=100, warmup=10, highest=1.0, final=0.1)
    assert schedule.at(0) == 0.1
    assert schedule.at(9) == 1.0
    assert schedule.at(99) == pytest.approx(0.1, abs=0.001)
    rates = [schedule.at(step) for step in range(9, 100)]
    assert rates == sorted(rates, reverse=True)


def test_elastic_draws_from_the_range_and_leaves_the_recipes_keep(make, data, tmp_path):
    student = make()
    recipe = QUICK.replace(phase1_epochs=0, phase2_epochs=3, elastic="0.1:0.6", log_every=1)
    report = sp.distill(student, data, recipe, out=tmp_path)
    assert describe(state.found(tmp_path)[0])["config"]["keep"] == 0.3
    drawn = [line["keep"] for line in report.lines]
    assert all(0.1 <= keep <= 0.6 for keep in drawn)
    assert max(drawn) > 0.3 > min(drawn)
    assert sp.config_of(student).keep == 0.3


def test_straight_through_has_the_value_of_sparse_attention_and_the_gradient_of_the_scores(make, photos):
    student = make()
    for residual in (False, True):
        sp.reconfigure(student, residual=residual)
        layer = sparse_layers(student)[0]
        q, k, v = (torch.randn(2, 3, 26, 8, requires_grad=True) for _ in range(3))
        plain, through = layer.attend(q, k, v), straight_through(layer, q, k, v)
        torch.testing.assert_close(plain, through, rtol=1e-4, atol=1e-5)
        direction = torch.randn_like(plain)
        torch.testing.assert_close(
            torch.autograd.grad(through, v, direction, retain_graph=True)[0],
            torch.autograd.grad(plain, v, direction)[0],
            rtol=1e-4,
            atol=1e-5,
        )
        gradient = torch.autograd.grad(through, layer.predictor.w_up, direction)[0]
        assert gradient.abs().sum() > 0


def test_straight_through_gradient_by_hand(make):
    """Of a kept key's score as of its logit: p (dO·v - dO·O)."""
    layer = sparse_layers(make())[0]
    sp_config = layer.config.replace(residual=False)
    layer.configure(sp_config, sp_config.replace(keep=0.3).per_layer(1)[0])
    q, k, v = torch.randn(3, 1, 3, 26, 8)
    direction = torch.randn(1, 3, 26, 8)
    straight_through(layer, q, k, v).mul(direction).sum().backward()
    connectivity, residual = layer.predict(q, k)
    expected = torch.zeros_like(layer.predictor.w_up)
    logits = q @ k.mT * layer.scale
    for head in range(3):
        for row in range(25):
            count = int(connectivity.counts[0, head, row])
            kept = connectivity.indices[0, head, row, :count].long()
            p = logits[0, head, row + 1, kept].softmax(-1)
            out = p @ v[0, head, kept]
            slope = p * ((v[0, head, kept] - out) @ direction[0, head, row + 1])
            a = residual.a_down[0, head, row].detach()
            for key, value in zip(kept.tolist(), slope, strict=True):
                live = layer.predictor.w_up[head, :, key] > 0
                expected[head, :, key] += torch.where(live, a * value, 0)
    torch.testing.assert_close(layer.predictor.w_up.grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"ema": 0.9, "accumulate": 2, "clip": 0.5}, {"elastic": "0.1:0.5"}])
def test_resumed_is_bit_for_bit_uninterrupted(make, data, tmp_path, monkeypatch, settings):
    recipe = QUICK.replace(**settings)
    whole = make()
    sp.distill(whole, data, recipe, out=tmp_path / "whole")
    steps = 0
    plain = loop.Trainer._step

    def failing(trainer, batches):
        nonlocal steps
        steps += 1
        if steps % 4 == 0:
            raise RuntimeError("power cut")
        plain(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "_step", failing)
    for _ in range(20):
        student = make()
        try:
            report = sp.distill(student, data, recipe, out=tmp_path / "cut")
            break
        except RuntimeError:
            continue
    assert steps > 4
    assert report.resumed is not None
    assert same(whole, student)
    saved = [load_file(tmp_path / name / "student.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    logs = [read(tmp_path / name / "log.jsonl") for name in ("whole", "cut")]
    for one, other in zip(*logs, strict=True):
        assert {**one, "images_per_second": 0} == {**other, "images_per_second": 0}


def test_checkpoints_are_few_and_can_be_evaluated(make, data, tmp_path, vit):
    sp.distill(make(), data, QUICK.replace(keep_last=1, save_every=2), out=tmp_path)
    assert [path.name for path in state.found(tmp_path)] == ["step-2-000006"]
    student = sp.load(tmp_path / "step-2-000006" / "student.safetensors", model=vit)
    assert student(data[0][:2]).shape == (2, 7)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_best_is_kept(make, data, tmp_path):
    scores = iter([10.0, 30.0, 20.0])
    sp.distill(make(), data, QUICK.replace(phase2_epochs=3), out=tmp_path, evaluate=lambda model: next(scores))
    assert state.read_state(tmp_path / "best").step == 12
    assert [line["top1"] for line in read(tmp_path / "log.jsonl") if "top1" in line] == [10, 30, 20]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_stop(make, data, tmp_path, number):
    whole = make()
    sp.distill(whole, data, QUICK)
    student = make()
    before = signal.getsignal(signal.SIGINT)  # tests that run in the background have it ignored
    with pytest.raises(loop.TrainingInterrupted, match="go on with --resume auto") as caught:
        sp.distill(
            student, data, QUICK, out=tmp_path, on_log=lambda line: line["step"] == 4 and os.kill(os.getpid(), number)
        )
    assert caught.value.exit_code == 128 + number
    assert state.newest(tmp_path).name == "step-1-000004"
    assert signal.getsignal(signal.SIGINT) is before
    student = make()
    sp.distill(student, data, QUICK, out=tmp_path)
    assert same(whole, student)


def test_runs_in_a_thread(make, data):
    """Signals cannot be watched there, and that is no reason to fail."""
    done = []
    thread = threading.Thread(target=lambda: done.append(sp.distill(make(), data, QUICK)))
    thread.start()
    thread.join()
    assert done


def test_a_loss_that_is_not_finite_stops_with_the_last_checkpoint(make, data, tmp_path, monkeypatch):
    plain = losses.token_loss
    calls = 0

    def poisoned(*tensors):
        nonlocal calls
        calls += 1
        return plain(*tensors) * (float("nan") if calls == 5 else 1)

    monkeypatch.setattr(losses, "token_loss", poisoned)
    with pytest.raises(TrainingError, match=r"not finite in step 5 of phase 2.*step-2-000003"):
        sp.distill(make(), data, QUICK, out=tmp_path)
    assert state.newest(tmp_path).name == "step-2-000003"
    state.read_tensors(tmp_path / "step-2-000003" / "student.safetensors")


def test_a_full_disk_stops_with_the_last_checkpoint(make, data, tmp_path, monkeypatch):
    plain = state.save_file
    calls = 0

    def full(tensors, path):
        nonlocal calls
        calls += 1
        if calls == 3:
            path.write_bytes(b"half a fi")
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the last good checkpoint is .*step-1-000003"):
        sp.distill(make(), data, QUICK, out=tmp_path)
    assert [path.name for path in state.found(tmp_path)] == ["step-1-000000", "step-1-000003"]
    assert not list(tmp_path.glob(".partial*"))


def test_resuming_with_other_settings_is_refused(make, data, tmp_path):
    sp.distill(make(), data, QUICK, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"phase2_learning_rate = 0\.001, not 0\.002"):
        sp.distill(make(), data, QUICK.replace(phase2_learning_rate=2e-3), out=tmp_path)
    with pytest.raises(CheckpointError, match="on 48 images"):
        sp.distill(make(), (data[0][:40], data[1][:40]), QUICK, out=tmp_path)
    with pytest.raises(CheckpointError, match="holds a run already"):
        sp.distill(make(), data, QUICK, out=tmp_path, resume="never")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        sp.distill(make(), data, QUICK, resume=tmp_path / "nowhere")
    (tmp_path / "step-2-000006" / "optimiser.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="is damaged"):
        sp.distill(make(), data, QUICK, out=tmp_path)


def test_a_finished_run_is_not_trained_further(make, data, tmp_path):
    first = make()
    sp.distill(first, data, QUICK, out=tmp_path)
    again = make()
    sp.distill(again, data, QUICK, out=tmp_path)
    assert same(first, again)


def test_cached_teacher(make, data, tmp_path, vit):
    settings = {"crop": "centre", "auto_augment": "", "colour_jitter": 0.0, "erase": 0.0, "cache_teacher": True}
    recipe = QUICK.replace(phase1_epochs=0, label_weight=0.0, start="given", **settings)
    live = sp.distill(make(), data, recipe.replace(cache_teacher=False))
    kept = sp.distill(make(), data, recipe, teacher_cache=tmp_path / "teacher.safetensors")
    for one, other in zip(live.lines, kept.lines, strict=True):
        assert one["token"] == pytest.approx(other["token"], rel=0.05)  # held in bfloat16
        assert one["prediction"] == pytest.approx(other["prediction"], rel=0.05, abs=1e-6)
    stamp = (tmp_path / "teacher.safetensors").stat().st_mtime_ns
    sp.distill(make(), data, recipe.replace(keep=0.2), teacher_cache=tmp_path / "teacher.safetensors")
    assert (tmp_path / "teacher.safetensors").stat().st_mtime_ns == stamp
    other = copy.deepcopy(vit)
    other.head.weight.data += 1
    with pytest.raises(CheckpointError, match="another teacher"):
        sp.distill(make(), data, recipe, teacher=other, teacher_cache=tmp_path / "teacher.safetensors")
    with pytest.raises(ConfigError, match="needs a file"):
        sp.distill(make(), data, recipe)
    varied = from_tensors(*data, recipe, transform=lambda image: image + torch.randn(()))
    with pytest.raises(ConfigError, match="these vary"):
        sp.distill(make(), varied, recipe, out=tmp_path)


def test_what_cannot_be_trained_is_said(make, data, vit):
    with pytest.raises(DataError, match="fewer than the 64 of a step"):
        sp.distill(make(), data, QUICK.replace(batch_size=64))
    with pytest.raises(DataError, match="without labels"):
        sp.distill(make(), data[0], QUICK)
    with pytest.raises(ConfigError, match="every layer is dense"):
        sp.distill(make(), data, QUICK.replace(keep=1.0))
    with pytest.raises(ConfigError, match="all weights"):
        none = {"label_weight": 0.0, "token_weight": 0.0, "prediction_weight": 0.0}
        sp.distill(make(), data, QUICK.replace(phase1_epochs=0, **none))
    with pytest.raises(sp.SparsifinerError, match="not a converted model"):
        sp.distill(vit, data, QUICK)
    with pytest.raises(ConfigError, match="n_down = 4"):
        sp.distill(make(), data, QUICK.replace(n_down=4))


def test_kernels_train_as_eager_does(make, data):
    lines = []
    for backend in ("cpu", "eager"):
        student = make()
        sp.reconfigure(student, backend=backend)
        lines.append(sp.distill(student, data, QUICK.replace(phase1_epochs=0, phase2_epochs=2, start="given")).lines)
    for one, other in zip(*lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_a_model_is_trained_in_the_form_it_was_tuned_to(make, data, tmp_path, monkeypatch):
    times = {"dense": 2.0, "per query": 1.0, "tile 2x2": 1.5}, {"dense": 1.0, "per query": 2.0, "tile 2x2": 2.0}
    timing = tuning.TuningReport(tuple(map(tuning.LayerTiming, times)), 8, 26, 1)
    monkeypatch.setattr(tuning, "time_layers", lambda *_, **__: timing)
    student = make()
    sp.reconfigure(student, tile=(2, 2))
    before = student.blocks[1].attn.predictor.w_up.clone()
    recipe = QUICK.replace(start="given")
    sp.distill(student, data, recipe, out=tmp_path / "tuned", tune=True)
    assert sp.config_of(student).dense == (1,)
    assert torch.equal(student.blocks[1].attn.predictor.w_up, before)  # a dense layer has nothing to learn here
    about = checkpoint.describe(tmp_path / "tuned")
    assert (about["config"]["dense"], about["config"]["tile"]) == ([1], [None, [2, 2]])
    assert about["tuning"] == timing.to_dict()
    last = state.newest(tmp_path / "tuned")
    monkeypatch.undo()
    again = make()  # goes on in the form the run had, whatever a stopwatch would say today
    sp.distill(again, data, recipe, out=tmp_path / "again", resume=last, tune=True)
    assert sp.config_of(again) == sp.config_of(student)
    assert same(student, again)


def test_autocast_trains(make, data):
    report = sp.distill(make(), data, QUICK.replace(autocast=True))
    whole = sp.distill(make(), data, QUICK)
    assert report.lines[-1]["loss"] == pytest.approx(whole.lines[-1]["loss"], rel=0.05)


SCRIPT = """
    import sys
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    import sparsifiner as sp
    from toys import make_vit

    torch.manual_seed(3)
    data = torch.randn(48, 3, 20, 20), torch.randint(0, 7, (48,))
    recipe = sp.Recipe.from_json({recipe!r})
    student = sp.sparsify(make_vit(), sp.SparseConfig(0.3, n_down=5, tau=0.0, basis_threshold=0.0))
    sp.distill(student, data, recipe, out={out!r})
"""


def script(tmp_path, recipe, out):
    path = tmp_path / f"{out}.py"
    tests = str(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path.write_text(textwrap.dedent(SCRIPT).format(tests=tests, recipe=recipe.to_json(), out=str(tmp_path / out)))
    return [str(path)]


def test_two_processes_are_one_with_the_doubled_batch(tmp_path, make):
    recipe = QUICK.replace(batch_size=4, start="given")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(torchrun + script(tmp_path, recipe, "two"), check=True, timeout=240)
    subprocess.run([sys.executable, *script(tmp_path, recipe.replace(batch_size=8), "one")], check=True, timeout=120)
    two, one = (load_file(tmp_path / name / "student.safetensors") for name in ("two", "one"))
    start = make().state_dict()
    # Adam moves a weight whose gradient is nothing but rounding as far as any other: norms, not elements.
    for name in one:
        assert (two[name] - one[name]).norm() <= 0.01 * (one[name] - start[name]).norm(), name
    logs = [read(tmp_path / name / "log.jsonl") for name in ("two", "one")]
    for first, second in zip(*logs, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)


def test_killed_and_resumed(tmp_path):
    """Real kills, at moments of their own; benchmarks/interrupt.py does twenty."""
    recipe = QUICK.replace(phase1_epochs=8, phase2_epochs=8, save_every=1)
    subprocess.run([sys.executable, *script(tmp_path, recipe, "whole")], check=True, timeout=240)
    command = [sys.executable, *script(tmp_path, recipe, "cut")]
    for wait in (0.05, 0.2):
        process = subprocess.Popen(command)
        begun = time.monotonic()
        newest = state.newest(tmp_path / "cut")
        while state.newest(tmp_path / "cut") == newest and time.monotonic() < begun + 120:
            time.sleep(0.01)
        time.sleep(wait)
        process.kill()
        process.wait()
    subprocess.run(command, check=True, timeout=240)
    whole, cut = (load_file(tmp_path / name / "student.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert json.loads((state.newest(tmp_path / "cut") / "state.json").read_text())["step"] == 48


@pytest.mark.parametrize("pattern", [None, "cells"])
def test_cells_have_no_first_phase(vit, data, pattern):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, pattern="cells", tile=(2, 2)))
    before = weights(student)
    report = sp.distill(student, data, QUICK.replace(pattern=pattern, n_down=4))
    assert report.steps == {2: 6}
    assert sp.config_of(student).tile == (2, 2)
    assert moved(student, before) == set(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze_host": True}, "freeze_host leaves nothing to learn: pattern='cells' adds no weights"),
        ({"straight_through": True}, "straight_through trains predictors, and pattern='cells' asks none"),
        ({"attention_weight": 1.0}, "attention_weight trains predictors"),
        ({"phase2_epochs": 0}, "nothing to do"),
        ({"pattern": "learned"}, "asks predictors.*sparsify the dense model anew"),
    ],
)
def test_what_cells_cannot_learn(vit, data, settings, message):
    student = sp.sparsify(vit, sp.SparseConfig(0.3, pattern="cells"))
    with pytest.raises(ConfigError, match=message):
        sp.distill(student, data, QUICK.replace(**settings))


def patch_classes(head):
    """A task of one's own: a class for each patch."""

    def predict(model, images):
        patches = model.forward_features(images)[:, 1:]
        return head(patches).mT.unflatten(2, (5, 5))

    return predict


@pytest.fixture
def task(data):
    head = torch.nn.Linear(24, 4).requires_grad_(False)
    maps = torch.randint(0, 4, (48, 5, 5))
    maps[:, 0, 0] = -100  # not counted
    return (data[0], maps), patch_classes(head)


def test_labels_of_every_patch(make, task, vit):
    data, predict = task
    recipe = QUICK.replace(phase1_epochs=0, phase2_epochs=6, start="given", label_smoothing=0.0)
    student = make()
    report = sp.distill(student, data, recipe, teacher=vit, predict=predict)
    first, last = report.lines[0], report.lines[-1]
    assert last["label"] < first["label"]
    assert {"token", "prediction"} <= set(last)
    assert torch.equal(student.head.weight, vit.head.weight)  # which the task does not use


def test_a_loss_of_ones_own_is_weighed_with_the_others(make, task):
    data, predict = task
    seen = []

    def loss(predictions, labels):
        seen.append((predictions.shape, labels.shape))
        return predictions.square().mean()

    recipe = QUICK.replace(phase1_epochs=0, start="given", label_weight=3.0, token_weight=0.0)
    line = sp.distill(make(), data, recipe, predict=predict, loss=loss).lines[0]
    assert seen[0] == ((8, 4, 5, 5), (8, 5, 5))
    assert line["loss"] == pytest.approx(3 * line["label"] + 0.5 * line["prediction"], rel=1e-5)


def test_a_task_is_resumed_bit_for_bit_and_its_teacher_cached(make, task, tmp_path, monkeypatch):
    data, predict = task
    settings = {"crop": "centre", "auto_augment": "", "colour_jitter": 0.0, "erase": 0.0, "cache_teacher": True}
    recipe = QUICK.replace(phase1_epochs=0, start="given", **settings)
    cache = tmp_path / "teacher.safetensors"
    whole = make()
    sp.distill(whole, data, recipe, predict=predict, out=tmp_path / "whole", teacher_cache=cache)
    saved = state.save

    def stop(folder, run, *arguments, **settings):
        saved(folder, run, *arguments, **settings)
        if run.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(state, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        sp.distill(make(), data, recipe, predict=predict, out=tmp_path / "cut", teacher_cache=cache)
    monkeypatch.setattr(state, "save", saved)
    again = make()
    report = sp.distill(again, data, recipe, predict=predict, out=tmp_path / "cut", teacher_cache=cache)
    assert report.resumed
    assert same(whole, again)
    other = patch_classes(torch.nn.Linear(24, 4).requires_grad_(False))
    with pytest.raises(CheckpointError, match="its predictions differ"):
        sp.distill(make(), data, recipe, predict=other, teacher_cache=cache)


def test_what_maps_of_labels_do_not_go_with(make, task, data):
    maps, predict = task
    recipe = QUICK.replace(phase1_epochs=0, start="given")
    with pytest.raises(ConfigError, match="say with predict what the model predicts of each"):
        sp.distill(make(), maps, recipe)
    with pytest.raises(ConfigError, match="mixup and cutmix mix the classes of whole images"):
        sp.distill(make(), maps, recipe.replace(mixup=0.5), predict=predict)
