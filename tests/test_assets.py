"""Real DeiT-Tiny weights and real images: what users will do."""

import pytest
import torch

import sparsifiner as sp
from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.inspect import compare

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def calibration(assets, deit):
    chosen = open_images(assets / "imagenet-distill.tar", preprocessing(deit, "crop"), limit=96)
    return torch.cat([images for images, _ in chosen])


@pytest.fixture(scope="module")
def held_out(assets, deit):
    """Not of the calibration sample, and not of the evaluation set: nothing here may tune anything on that."""
    transform = preprocessing(deit, "crop")
    return list(open_images(assets / "imagenet-distill.tar", transform, num_classes=1000, limit=32, offset=96))


def test_keep_one_and_restore_are_the_host_bit_for_bit(deit, held_out):
    images = held_out[0][0][:8]
    with torch.inference_mode():
        expected = deit(images)
        student = sp.sparsify(deit, sp.SparseConfig(keep=1.0))
        assert torch.equal(student(images), expected)
        sp.reconfigure(student, keep=0.1)
        assert not torch.equal(student(images), expected)
        assert torch.equal(sp.restore(student)(images), expected)
    assert sp.restore(student).state_dict().keys() == deit.state_dict().keys()


def test_calibrated_it_agrees_with_dense_and_survives_a_file(deit, calibration, held_out, tmp_path):
    student = sp.sparsify(deit, sp.SparseConfig(keep=0.25, n_down=49, tau=0.02))
    report = sp.calibrate(student, calibration)
    assert report.images == 96
    assert report.recall > 0.7
    dense, residual, paper = compare.compare(student, held_out, [compare.RESIDUAL, compare.PAPER], [0.25])
    assert dense.top1 > 55  # 32 images; 72 % on thousands
    assert residual.divergence < 0.06
    assert residual.divergence < paper.divergence / 3
    assert residual.kept_share < 0.27
    path = tmp_path / "student.safetensors"
    sp.save(student, path)
    images = held_out[0][0][:4]
    with torch.inference_mode():
        assert torch.equal(sp.load(path)(images), student(images))


def test_evaluation_images_are_labelled_as_the_model_expects(assets, deit):
    loader = open_images(assets / "imagenet-eval.tar", preprocessing(deit, "crop"), num_classes=1000, limit=48)
    assert compare.predict_all(deit, loader).top1 > 55


def test_the_predictors_that_come_with_the_package_are_calibrated(deit, held_out):
    student = sp.load("deit_tiny_patch16_224", model=deit)
    _, residual = compare.compare(student, held_out, [compare.RESIDUAL], [0.1])
    assert residual.divergence < 0.1
    assert residual.kept_share < 0.12
