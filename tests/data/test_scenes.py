import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from sparsifiner.data.images import Failure, accept
from sparsifiner.data.scenes import IGNORED, Scenes
from sparsifiner.errors import DataError


def draw(path, seed, size=(40, 30), classes=3):
    """An image and its class map; size is width and height."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path.with_suffix(".jpg"))
    Image.fromarray(random.integers(0, classes, (height, width), dtype=np.uint8)).save(path.with_suffix(".png"))


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        draw(tmp_path / "train" / f"{number}.x", number)
    return tmp_path


def read(scenes, number=0):
    sample = scenes[number]
    accept([sample] if isinstance(sample, Failure) else [], skip=False)
    return sample


def test_images_are_made_ready_and_void_is_ignored(vit, folder):
    scenes = Scenes(folder, vit, 2, void=2, part="train")
    assert [scenes.name(number) for number in range(len(scenes))] == ["train/0.jpg", "train/1.jpg", "train/2.jpg"]
    image, labels = read(scenes)
    assert image.shape == (3, 20, 20)
    assert labels.shape == (30, 40)
    drawn = torch.from_numpy(np.array(Image.open(folder / "train" / "0.png"))).long()
    assert torch.equal(labels, torch.where(drawn == 2, IGNORED, drawn))
    small = read(Scenes(folder, vit, 3, part="train", map_size=(15, 20)))[1]
    assert torch.equal(small, drawn[1::2, 1::2])
    assert len(Scenes(folder, vit, 3, limit=2)) == 2


def test_a_tar_and_two_folders_are_read_alike(vit, folder, tmp_path):
    with tarfile.open(tmp_path / "scenes.tar", "w") as tar:
        tar.add(folder / "train", "train")
    for number in range(3):
        for suffix, kind in ((".jpg", "images"), (".png", "maps")):
            target = tmp_path / "apart" / "train" / kind
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{number}{suffix}").write_bytes((folder / "train" / f"{number}{suffix}").read_bytes())
    whole = Scenes(folder, vit, 3, part="train")
    for other in (Scenes(tmp_path / "scenes.tar", vit, 3, part="train"), Scenes(tmp_path / "apart", vit, 3)):
        assert len(other) == 3
        for one, two in zip(read(whole, 2), read(other, 2), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: draw_map(f, np.zeros((10, 40), np.uint8)), "of another size: 10 x 40 pixels and 30 x 40 itself"),
        (lambda f: draw_map(f, np.full((30, 40), 7, np.uint8)), "with class 7: expected 0 to 2, and 9 for what is not"),
        (lambda f: draw_map(f, np.zeros((30, 40, 3), np.uint8)), "in colours"),
        (lambda f: (f / "0.jpg").write_bytes(b"nothing"), "cannot read image train/0.jpg: cannot identify"),
        (lambda f: (f / "0.png").write_bytes((f / "0.png").read_bytes()[:60]), "cannot read image train/0.png"),
    ],
)
def test_what_is_wrong_with_a_scene_is_one_line(vit, folder, spoil, message):
    spoil(folder / "train")
    with pytest.raises(DataError, match=message) as caught:
        read(Scenes(folder, vit, 3, void=9, part="train"))
    assert "\n" not in str(caught.value)


def draw_map(folder, numbers):
    content = io.BytesIO()
    Image.fromarray(numbers).save(content, format="PNG")
    (folder / "0.png").write_bytes(content.getvalue())


def test_what_is_wrong_with_a_folder_is_one_line(vit, folder):
    with pytest.raises(DataError, match="does not exist"):
        Scenes(folder / "nowhere", vit, 3)
    with pytest.raises(DataError, match="not a .tar"):
        Scenes(folder / "train" / "0.jpg", vit, 3)
    with pytest.raises(DataError, match="val/: no images with class maps"):
        Scenes(folder, vit, 3, part="val")
    (folder / "train" / "1.png").unlink()
    with pytest.raises(DataError, match="image train/1.jpg has no class map 1.png"):
        Scenes(folder, vit, 3)
