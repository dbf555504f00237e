import pytest
import torch

import sparsifiner as sp
from sparsifiner import digits
from sparsifiner.convert import sparse_layers


@pytest.fixture(scope="module")
def trained():
    (images, labels), test = digits.load_digits()
    return digits.train_digits(images, labels, epochs=9), images, test


def test_65_tokens_and_no_leak():
    (train, _), (test, _) = digits.load_digits()
    assert len(train) + len(test) == 1797
    assert train.shape[1:] == (1, 8, 8)
    assert abs(train.mean().item()) < 0.1
    student = sp.sparsify(
        digits.train_digits(train[:64], torch.zeros(64).long(), epochs=1), sp.SparseConfig(0.5, n_down=16)
    )
    assert sparse_layers(student)[0].grid.num_tokens == 65


def test_it_learns_and_stays_right_when_sparse(trained):
    model, images, (test, labels) = trained
    right = lambda net: (net(test).argmax(1) == labels).float().mean().item()  # noqa: E731
    with torch.inference_mode():
        dense = right(model)
        assert dense > 0.8
        student = sp.sparsify(model, sp.suggest_config(model, 0.1, pattern="learned"))
        sp.calibrate(student, images[:256])
        assert right(student) > dense - 0.05
        agreement = (student(test).argmax(1) == model(test).argmax(1)).float().mean()
        assert agreement > 0.93


def test_checkpoint_round_trip_by_name(trained, tmp_path):
    model, _, (test, _) = trained
    student = sp.sparsify(model, sp.suggest_config(model, 0.2, pattern="learned"))
    sp.save(student, tmp_path / "digits.safetensors")
    assert torch.equal(sp.load(tmp_path / "digits.safetensors")(test[:8]), student(test[:8]))


def test_the_same_seed_gives_the_same_model():
    (images, labels), _ = digits.load_digits()
    first, second = (digits.train_digits(images[:128], labels[:128], epochs=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
