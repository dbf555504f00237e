import io
import tarfile

import pytest
import torch
from PIL import Image

import sparsifiner as sp
from sparsifiner.data.images import open_images
from sparsifiner.distillation.data import from_files, from_tensors, mixing
from sparsifiner.errors import ConfigError, DataError

PLAIN = {"crop": "centre", "auto_augment": "", "colour_jitter": 0.0, "erase": 0.0, "mixup": 0.0, "cutmix": 0.0}


def passes(data, world=1, rank=0, size=4, epoch=0, first=0, workers=0):
    return list(data.passes(epoch, first, size, rank, world, workers))


@pytest.fixture
def folder(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(6):
            pixels = torch.randint(0, 255, (24, 24, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path / "photos"


def test_an_epoch_has_every_image_once_in_another_order_each_time():
    data = from_tensors(torch.randn(12, 3, 4, 4), torch.arange(12), sp.Recipe(flip=0.0, **PLAIN))
    orders = [torch.cat([batch.labels for batch in passes(data, epoch=epoch)]).tolist() for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]


def test_processes_share_the_batches_of_one():
    data = from_tensors(torch.randn(16, 3, 4, 4), torch.arange(16), sp.Recipe(**PLAIN))
    whole = passes(data, size=8)
    parts = [passes(data, world=2, rank=rank, size=4) for rank in (0, 1)]
    for number, batch in enumerate(whole):
        for field in ("images", "labels", "keys"):
            joined = torch.cat([getattr(part[number], field) for part in parts])
            assert torch.equal(getattr(batch, field), joined)


def test_augmentation_depends_on_the_sample_alone(vit, folder):
    data = from_files(folder, vit, sp.Recipe(label_weight=0.0))
    whole = passes(data)
    again = passes(data, first=1)
    beside = passes(data, workers=2)
    assert torch.equal(whole[1].images, again[0].images)
    assert all(torch.equal(one.images, other.images) for one, other in zip(whole, beside, strict=True))
    assert not torch.equal(whole[0].images, passes(data, epoch=1)[0].images)


def test_mirrored_images_are_named(vit, folder):
    data = from_files(folder, vit, sp.Recipe(label_weight=0.0, flip=0.5, **PLAIN))
    seen = set()
    for batch in passes(data):
        for image, key in zip(batch.images, batch.keys.tolist(), strict=True):
            plain = data.images[key // 2][0]
            assert torch.equal(image, plain.flip(-1) if key % 2 else plain)
            seen.add(key % 2)
    assert seen == {0, 1}


def test_repeated_augmentation_keeps_the_epochs_length():
    data = from_tensors(torch.randn(12, 3, 4, 4), torch.arange(12), sp.Recipe(repeats=3, **PLAIN))
    labels = torch.cat([batch.labels for batch in passes(data)]).tolist()
    assert len(labels) == 12
    assert len(set(labels)) == 4
    assert labels[0] == labels[1] == labels[2]


def test_broken_images_stop_the_run_or_are_counted(vit, folder):
    (folder / "cat" / "3.png").write_bytes(b"no image")
    settings = sp.Recipe(label_weight=0.0, **PLAIN)
    with pytest.raises(DataError, match=r"cannot read image .*3\.png"):
        passes(from_files(folder, vit, settings))
    data = from_files(folder, vit, settings, skip_unreadable=True)
    assert sum(len(batch.images) for batch in passes(data)) == 11
    assert [name for name, _ in data.skipped] == ["cat/3.png"] or data.skipped[0][0].endswith("3.png")


def test_mixup_is_the_same_for_the_same_number():
    data = from_tensors(torch.randn(8, 3, 4, 4), torch.arange(8) % 5, sp.Recipe(batch_size=4))
    mix = mixing(data.recipe, 5)
    batch = passes(data)[0]
    one, two, other = mix(batch, 1), mix(batch, 1), mix(batch, 2)
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    assert one.labels.shape == (4, 5)
    torch.testing.assert_close(one.labels.sum(1), torch.ones(4))
    with pytest.raises(ConfigError, match="even batch_size"):
        mixing(sp.Recipe(batch_size=3), 5)


def test_unusable_tensors():
    recipe = sp.Recipe(**PLAIN)
    with pytest.raises(DataError, match="floating point"):
        from_tensors(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), None, recipe)
    with pytest.raises(DataError, match="NaN"):
        from_tensors(torch.full((4, 3, 4, 4), float("nan")), None, recipe)
    with pytest.raises(DataError, match="as many labels"):
        from_tensors(torch.zeros(4, 3, 4, 4), torch.zeros(3), recipe)


def shard(path, count, first=0, label=True):
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + count):
            image = io.BytesIO()
            Image.new("RGB", (20, 20), (number, 0, 0)).save(image, format="PNG")
            files = {"png": image.getvalue()} | ({"cls": str(number % 7).encode()} if label else {})
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{number:05d}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def test_webdataset_shards(vit, tmp_path):
    shard(tmp_path / "train-000.tar", 3)
    shard(tmp_path / "train-001.tar", 2, first=3)
    expected = [0, 1, 2, 3, 4]
    for pattern in ("train-{000..001}.tar", "train-*.tar"):
        loader = open_images(
            f"wds/{tmp_path}/{pattern}", lambda image: torch.tensor(image.getpixel((0, 0))[0]), num_classes=7
        )
        images, labels = next(iter(loader))
        assert images.tolist() == labels.tolist() == expected
    data = from_files(f"wds/{tmp_path}/train-*.tar", vit, sp.Recipe(**PLAIN), preprocess="crop")
    assert len(passes(data, size=5)[0].images) == 5


def test_damaged_shards(tmp_path):
    shard(tmp_path / "a-0.tar", 2, label=False)
    with pytest.raises(DataError, match=r"shard .*a-1\.tar does not exist"):
        open_images(f"wds/{tmp_path}/a-{{0..1}}.tar", lambda x: x)
    with pytest.raises(DataError, match="no such shards"):
        open_images(f"wds/{tmp_path}/b*.tar", lambda x: x)
    (tmp_path / "c.tar").write_bytes(b"x" * 600)
    with pytest.raises(DataError, match=r"cannot read .*c\.tar"):
        open_images(f"wds/{tmp_path}/c.tar", lambda x: x)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("00000.cls", b"9" * 5000),
        ("00000.cls", b"-1"),
        ("00000.cls", str(2**31).encode()),
        ("00000.cls", bytes(2 << 20)),
        ("00000.json", b"[" * 100_000),
        ("00000.json", b'{"label": Infinity}'),
        ("00000.json", b'{"label": 1.5}'),
        ("00000.json", b'{"label": {}}'),
        ("00000.json", b"5"),
    ],
)
def test_labels_that_are_none(tmp_path, name, content):
    shard(tmp_path / "a.tar", 1, label=False)
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match=rf"a\.tar: {name}: expected a class number"):
        open_images(f"wds/{tmp_path}/a.tar", lambda x: x)


def test_maps_are_mirrored_with_their_images():
    images = torch.arange(48.0).view(4, 1, 3, 4)
    recipe = sp.Recipe(**(PLAIN | {"flip": 0.5, "batch_size": 4}))
    data = from_tensors(images, images[:, 0].long(), recipe)
    mirrored = set()
    for epoch in range(4):
        for batch in data.passes(epoch, 0, 4, 0, 1, 0):
            assert torch.equal(batch.images[:, 0].long(), batch.labels)
            mirrored |= set((batch.keys % 2).tolist())
    assert mirrored == {0, 1}
