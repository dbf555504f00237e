"""A stopwatch never decides what a model computes: `tune` does, on purpose and on record."""

import copy
import threading
import time

import pytest
import torch
from torch.nn import functional

import sparsifiner as sp
from sparsifiner import checkpoint
from sparsifiner.convert import note_tuning, sparse_layers, tuning_of
from sparsifiner.errors import CheckpointError, ConfigError, DataError
from sparsifiner.inspect import tuning
from sparsifiner.inspect.speed import Timing
from sparsifiner.nn.attention import SparseAttention
from sparsifiner.ops import cpu

from ..toys import make_vit

CONFIG = sp.SparseConfig(keep=0.2, n_down=5, tau=0.0)


@pytest.fixture
def student(vit):
    return sp.sparsify(vit, CONFIG)


@pytest.fixture
def slow(monkeypatch):
    """Makes dense or sparse attention take long, so that whoever measures must choose the other."""

    def make(which):
        def slowly(function):
            def run(*arguments, **settings):
                end = time.thread_time() + 0.002
                while time.thread_time() < end:  # a sleep takes no time of the thread's own
                    pass
                return function(*arguments, **settings)

            return run

        if which == "dense":
            dense = functional.scaled_dot_product_attention
            monkeypatch.setattr(functional, "scaled_dot_product_attention", slowly(dense))
        else:
            monkeypatch.setattr(SparseAttention, "attend", slowly(SparseAttention.attend))

    return make


@pytest.mark.parametrize("which", ["sparse", "dense"])
@torch.inference_mode()
def test_no_stopwatch_decides_what_is_computed(student, photos, slow, which):
    """Whichever is faster, alone or in a batch, with one thread or two, under load: the same answer."""
    sp.reconfigure(student, backend="reference")
    expected = student(photos)
    sp.reconfigure(student, backend="auto")
    slow(which)
    busy = threading.Event()

    def load():
        while not busy.is_set():
            torch.randn(64, 64) @ torch.randn(64, 64)

    worker = threading.Thread(target=load)
    worker.start()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.testing.assert_close(student(photos), expected, rtol=1e-4, atol=1e-5)
            alone = torch.cat([student(photo[None]) for photo in photos])
            torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(copy.deepcopy(student)(photos), expected, rtol=1e-4, atol=1e-5)
    finally:
        busy.set()
        worker.join()
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("which", "dense"), [("sparse", (0, 1)), ("dense", ())])
@torch.inference_mode()
def test_tune_writes_what_pays_into_the_config(student, vit, photos, slow, tmp_path, which, dense):
    sparse, own = student(photos), vit(photos)
    slow(which)
    report = sp.tune(student, photos, seconds=0.01)
    assert report.dense == sp.config_of(student).dense == dense
    assert (report.images, report.tokens, report.threads) == (6, 26, torch.get_num_threads())
    assert "26 tokens, batch 6" in str(report)
    assert all(layer.core is None for layer in sparse_layers(student))
    expected = own if dense else sparse
    torch.testing.assert_close(student(photos), expected, rtol=1e-5, atol=1e-5)
    sp.save(student, tmp_path / "a.safetensors")
    assert checkpoint.describe(tmp_path / "a.safetensors")["config"]["dense"] == list(dense)
    again = sp.load(tmp_path / "a.safetensors", model=make_vit())
    assert sp.config_of(again) == sp.config_of(student)
    torch.testing.assert_close(again(photos), expected, rtol=1e-5, atol=1e-5)
    sp.reconfigure(again, dense=())  # and can be changed
    torch.testing.assert_close(again(photos), sparse, rtol=1e-5, atol=1e-5)


TIMES = {"dense": 1.0, "per query": 0.5, "tile 2x2": 0.4, "tile 4x4": 0.2}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "tile 4x4"),
        ({"tile 4x4": 0.39}, "tile 2x2"),  # as fast within noise, and loses less
        ({"tile 4x4": 0.49, "tile 2x2": 0.49}, "per query"),
        ({"tile 4x4": 0.98, "tile 2x2": 1.0, "per query": 2.0}, "dense"),
        ({"tile 4x4": 0.97, "tile 2x2": 1.0, "per query": 2.0}, "tile 4x4"),
        ({"tile 4x4": 0.95, "tile 2x2": 0.975, "per query": 2.0}, "tile 4x4"),  # 2x2 does not beat dense beyond doubt
        ({"dense": 0.1}, "dense"),
    ],
)
def test_speed_is_taken_only_beyond_noise(changes, chosen):
    assert tuning.LayerTiming(TIMES | changes).chosen == chosen


@pytest.fixture
def timed(monkeypatch):
    """Says what times layers have, one after the other."""

    def say(*layers):
        left = iter(layers)

        def take_turns(runs, seconds):
            times = next(left)
            assert set(runs) == set(times)
            for run in runs.values():
                run()
            return {name: Timing(times[name], 0.0, 0.0, 0.0, 1) for name in runs}

        monkeypatch.setattr(tuning, "take_turns", take_turns)

    return say


@torch.inference_mode()
def test_each_layer_gets_its_own_form(vit, photos, timed, tmp_path):
    student = sp.sparsify(vit, CONFIG.replace(tile=(2, 2)))
    timed({"dense": 9.0, "per query": 1.0, "tile 2x2": 2.0}, {"dense": 9.0, "per query": 2.0, "tile 2x2": 1.0})
    report = sp.tune(student, photos)
    assert sp.config_of(student) == CONFIG.replace(tile=[None, (2, 2)])
    assert [layer.tile for layer in sparse_layers(student)] == [None, (2, 2)]
    expected = student(photos)
    sp.save(student, tmp_path / "a.safetensors")
    assert checkpoint.describe(tmp_path / "a.safetensors")["tuning"] == report.to_dict()
    again = sp.load(tmp_path / "a.safetensors", model=make_vit())
    assert sp.config_of(again) == sp.config_of(student)
    assert torch.equal(again(photos), expected)
    read = tuning.TuningReport.from_dict(tuning_of(again))
    assert read == report
    assert str(read) == str(report)

    # The two layers are what they are in a model that has their tile everywhere.
    for number, tile in enumerate((None, (2, 2))):
        whole, q = copy.deepcopy(student), torch.randn(2, 2, 26, 8)
        sp.reconfigure(whole, tile=tile)
        layers = sparse_layers(student)[number], sparse_layers(whole)[number]
        assert torch.equal(*(layer.attend(q, q, q) for layer in layers))

    # What was measured goes with the settings it led to, and with no others.
    sp.reconfigure(again, keep=0.3)
    assert tuning_of(again) is None
    sp.reconfigure(again, keep=0.2)
    assert tuning_of(again) is not None
    sp.reconfigure(again, dense=(), tile=(2, 2))  # and can be taken back
    sp.save(again, tmp_path / "b.safetensors")
    assert "tuning" not in checkpoint.describe(tmp_path / "b.safetensors")

    # Tuned again, a layer may take the tile that only another has now; one that becomes dense keeps its own.
    timed({"dense": 9.0, "per query": 2.0, "tile 2x2": 1.0}, {"dense": 1.0, "per query": 2.0, "tile 2x2": 1.0})
    sp.tune(student, photos)
    assert sp.config_of(student) == CONFIG.replace(tile=(2, 2), dense=[1])


@torch.inference_mode()
def test_tiles_of_the_callers_choice(student, photos, timed):
    times = {"dense": 9.0, "per query": 4.0, "tile 2x2": 3.0, "tile 5x5": 1.0}
    timed(times, times)
    report = sp.tune(student, photos, tiles=[(5, 5), [2, 2], None])
    assert list(report.layers[0].milliseconds) == list(times)  # by what they lose, whatever the order they were named
    assert sp.config_of(student).tile == (5, 5)
    timed({"dense": 9.0, "tile 3x2": 1.0}, {"dense": 9.0, "tile 3x2": 1.0})
    sp.tune(student, photos, tiles=[(3, 2)])
    assert sp.config_of(student).tile == (3, 2)
    for nonsense, message in (([], "tiles is empty"), ([(0, 2)], "tile must be two or three whole numbers")):
        with pytest.raises(ConfigError, match=message):
            sp.tune(student, photos, tiles=nonsense)


def test_forms_are_timed_as_they_run(vit, photos):
    """A form that is timed is the layer with that tile, and looks its groups up once."""
    student = sp.sparsify(vit, CONFIG)
    seen = []

    class Noted(SparseAttention):
        def attend(self, q, k, v):
            before = self._groups
            seen.append((self.tile, before is not None))
            return super().attend(q, k, v)

    for layer in sparse_layers(student):
        layer.__class__ = Noted
    sp.tune(student, photos, tiles=[None, (2, 2)], seconds=0.001)
    warm = seen[len(seen) // 2 :]
    assert {tile for tile, _ in warm} == {None, (2, 2)}
    if cpu.unavailable() is None:  # the others make no notes
        assert all(known for _, known in seen[4:10])


def test_what_a_file_says_of_tuning_is_checked(student, photos, tmp_path):
    good = sp.tune(student, photos, seconds=0.001).to_dict()
    for spoil in (
        {"layers": 3}, {"layers": [3]}, {"layers": [{"milliseconds": {"per query": 1.0}}]},
        {"layers": [{"milliseconds": {"dense": []}}]}, {"images": "x"}, {"threads": None},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="what tune noted is damaged"):
            tuning.TuningReport.from_dict(good | spoil)
    note_tuning(student, [])
    sp.save(student, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="its description is damaged: tuning"):
        sp.load(tmp_path / "a.safetensors", model=make_vit())


@torch.inference_mode()
def test_one_layer_dense(student, vit, photos):
    for number in (0, 1):
        sp.reconfigure(student, dense=[number])
        expected = copy.deepcopy(student)
        sp.reconfigure(expected, dense=(), keep=[1.0 if layer == number else 0.2 for layer in (0, 1)])
        assert torch.equal(student(photos), expected(photos))
        assert sp.count_flops(student).attention == sp.count_flops(expected).attention
    assert not torch.allclose(student(photos), vit(photos), atol=1e-4)
    sp.reconfigure(student, dense=[0, 1])
    assert torch.equal(student(photos), vit(photos))
    assert torch.equal(sp.sparsify(vit, CONFIG.replace(dense=(0, 1)))(photos), vit(photos))


@torch.inference_mode()
def test_timing_changes_nothing(student, photos):
    sp.reconfigure(student, dense=[1], keep=[1.0, 0.2])
    student.train()
    before = student.eval()(photos)
    student.train()
    report = tuning.time_layers(student, iter([(photos[:2], None), (photos, None)]), seconds=0.001)
    assert report.images == 2  # the first batch
    first, second = report.layers
    assert first.milliseconds == {}  # dense by its budget
    assert (first.dense, first.sparse) == (None, None)
    assert second.sparse > 0  # timed although it is dense by setting
    assert second.dense > 0
    assert student.training
    assert torch.equal(student.eval()(photos), before)
    assert sp.config_of(student).dense == (1,)


@torch.inference_mode()
def test_models_that_drop_tokens_are_tuned(photos):
    student = sp.sparsify(make_vit(), CONFIG.replace(tokens=sp.TokenConfig(0.5, blocks=[0])))
    expected = student(photos)
    report = tuning.time_layers(student, photos, seconds=0.001)
    assert all(layer.sparse is not None for layer in report.layers)
    assert torch.equal(student(photos), expected)


def test_bad_input(student, photos):
    with pytest.raises(ConfigError, match=r"dense lists layer 2: the model has layers 0 to 1"):
        sp.reconfigure(student, dense=[2])
    for nonsense in ("01", [1, 0], [-1], [0.5], [True], 3, [0, 0]):
        with pytest.raises(ConfigError, match="dense must be ascending numbers of layers"):
            CONFIG.replace(dense=nonsense)
    with pytest.raises(DataError, match="no images"):
        sp.tune(student, [])
    broken = photos.clone()
    broken[0] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        sp.tune(student, broken)
    assert sp.config_of(student) == CONFIG


def test_what_version_01_called_sparse_is_auto():
    assert sp.SparseConfig.from_json('{"keep": 0.5, "backend": "sparse"}').backend == "auto"
    with pytest.raises(ConfigError, match="unknown backend"):
        sp.SparseConfig(0.5, backend="sparse")
