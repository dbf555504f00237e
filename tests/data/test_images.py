import io
import os
import struct
import tarfile
import zlib

import pytest
import torch
from PIL import Image
from torchvision import transforms

from sparsifiner.data.images import open_images, preprocessing
from sparsifiner.errors import DataError

from ..toys import make_vit

TO_TENSOR = transforms.ToTensor()


def picture(shade: int, size=(24, 24), extension="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(buffer, extension)
    return buffer.getvalue()


@pytest.fixture
def files():
    """Three classes of two images; the shade tells which is which; one is WebP."""
    return {
        f"{name}/{index}.{'webp' if index else 'png'}": picture(
            40 * number + 10 * index, extension="WEBP" if index else "PNG"
        )
        for number, name in enumerate(("ant", "bee", "cat"))
        for index in range(2)
    }


def as_folder(files, root):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def as_tar(files, path):
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture(params=["folder", "tar"])
def data(request, files, tmp_path):
    return as_folder(files, tmp_path / "set") if request.param == "folder" else as_tar(files, tmp_path / "set.tar")


def all_of(loader):
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_and_tar_give_every_image_in_order(data, workers):
    loader = open_images(data, TO_TENSOR, num_classes=3, batch_size=4, workers=workers)
    images, labels = all_of(loader)
    assert len(loader) == 2
    assert loader.num_images == 6
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    shades = images.mean((1, 2, 3)) * 255
    torch.testing.assert_close(shades, torch.tensor([0.0, 10, 40, 50, 80, 90]), atol=2.5, rtol=0)
    assert loader.skipped == []


def test_a_sample_is_random_repeatable_and_does_not_overlap_the_next(data):
    def labels_and_means(**options):
        images, labels = all_of(open_images(data, TO_TENSOR, num_classes=3, **options))
        return list(zip(labels.tolist(), images.mean((1, 2, 3)).tolist(), strict=True))

    first, again = labels_and_means(limit=3, seed=1), labels_and_means(limit=3, seed=1)
    rest = labels_and_means(offset=3, seed=1)
    assert first == again
    assert sorted(first + rest) == sorted(labels_and_means())
    assert any(labels_and_means(limit=3, seed=seed) != first for seed in range(2, 6))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_stops_with_its_name(files, tmp_path, workers):
    files["bee/0.png"] = files["bee/0.png"][:-30]  # truncated
    data = as_folder(files, tmp_path / "set")
    with pytest.raises(DataError, match=r"cannot read image bee/0.png: .*(truncated|broken|unrecognized)") as caught:
        list(open_images(data, TO_TENSOR, num_classes=3, workers=workers))
    assert "\n" not in str(caught.value)


def test_broken_images_are_skipped_and_counted_if_asked(files, tmp_path):
    files["bee/0.png"] = b"not an image"
    files["cat/1.webp"] = b""
    data = as_tar(files, tmp_path / "set.tar")
    loader = open_images(data, TO_TENSOR, num_classes=3, skip_unreadable=True)
    _, labels = all_of(loader)
    assert labels.tolist() == [0, 0, 1, 2]
    assert [name for name, _ in loader.skipped] == ["bee/0.png", "cat/1.webp"]


def test_nothing_readable_is_an_error_even_if_asked_to_skip(tmp_path):
    data = as_folder({"ant/0.png": b"x", "bee/0.png": b"x"}, tmp_path / "set")
    with pytest.raises(DataError, match="none of the 2 images could be read"):
        list(open_images(data, TO_TENSOR, num_classes=2, skip_unreadable=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "does not exist: give a folder"),
        (lambda root: as_folder({"a.txt": b"x"}, root), "holds no"),
        (lambda root: as_folder({"set.zip": b"x"}, root) / "set.zip", "not a .tar"),
        (lambda root: as_folder({"set.tar": b"x"}, root) / "set.tar", "is it a whole tar"),
        (lambda root: as_folder({"set.tar": b""}, root) / "set.tar", "is it a whole tar"),
    ],
)
def test_data_that_is_no_data(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        open_images(make(tmp_path / "set"), TO_TENSOR)


def test_bad_limits(data):
    with pytest.raises(DataError, match="limit must be at least 1"):
        open_images(data, TO_TENSOR, limit=0)
    with pytest.raises(DataError, match="no images left"):
        open_images(data, TO_TENSOR, offset=6)


def test_classes_that_do_not_fit_the_model(data, tmp_path):
    with pytest.raises(DataError, match="has 3 classes and the model 2"):
        open_images(data, TO_TENSOR, num_classes=2)
    names = tmp_path / "names.txt"
    names.write_text("dog\ncat\nbee\nant\nelk\n")
    _, labels = all_of(open_images(data, TO_TENSOR, num_classes=5, class_map=names))
    assert labels.tolist() == [3, 3, 2, 2, 1, 1]
    names.write_text("dog\ncat\n")
    with pytest.raises(DataError, match="has class 'ant', which .* does not list"):
        open_images(data, TO_TENSOR, num_classes=2, class_map=names)


def test_a_label_outside_the_classes_stops_with_the_images_name(data, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\ndog\ncat\n")
    with pytest.raises(DataError, match="image cat/0.png has label 3, outside the model's 3 classes"):
        list(open_images(data, TO_TENSOR, num_classes=3, class_map=names))


def test_a_part_of_imagenet_is_labelled_by_its_folder_names(files, tmp_path):
    renamed = {
        name.replace("ant", "n01440764").replace("bee", "n02206856").replace("cat", "n15075141"): content
        for name, content in files.items()
    }
    _, labels = all_of(open_images(as_folder(renamed, tmp_path / "set"), TO_TENSOR, num_classes=1000))
    assert labels.tolist() == [0, 0, 309, 309, 999, 999]


def test_preprocessing_fits_the_model(data):
    model = make_vit()
    for how in ("model", "crop"):
        images, _ = all_of(open_images(data, preprocessing(model, how), num_classes=3))
        assert images.shape == (6, 3, 20, 20)
    with pytest.raises(DataError, match="unknown preprocessing"):
        preprocessing(model, "squeeze")  # pyright: ignore[reportArgumentType]


def test_an_image_smaller_than_the_crop_is_named(files, tmp_path):
    files["cat/0.png"] = picture(3, size=(18, 30))
    loader = open_images(as_folder(files, tmp_path / "set"), preprocessing(make_vit(), "crop"), num_classes=3)
    with pytest.raises(DataError, match="cannot read image cat/0.png: is 30 x 18, smaller than the 20 x 20 crop"):
        list(loader)


def test_a_hugging_face_dataset(files, tmp_path, monkeypatch):
    """A local image folder stands in for a name on the hub; the reader and the library are the real ones."""
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = as_folder({f"validation/{name}": content for name, content in files.items()}, tmp_path / "set")
    built = datasets.load_dataset(
        "imagefolder", data_dir=str(root), cache_dir=str(tmp_path / "cache"), split="validation"
    )
    monkeypatch.setattr("datasets.load_dataset", lambda name, *args, **kwargs: built)
    loader = open_images("hfds/someone/insects", TO_TENSOR, num_classes=3)
    _, labels = all_of(loader)
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]


def test_a_hugging_face_dataset_that_cannot_be_had(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DataError, match=r"cannot open hfds/someone/insects \(split 'validation'\): no network"):
        open_images("hfds/someone/insects", TO_TENSOR)


# Files of an unknown hand: refused by name, before they cost anything.


def promising(width, height):
    """A PNG whose header promises so many pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (promising(9_000, 9_000), "is 9000 x 9000, more than 80 million pixels"),
        (promising(30_000, 30_000), "decompression bomb"),
        (picture(1, size=(3000, 2)), "is 2 x 3000, one side more than 100 times the other"),
        (EPS, "cannot identify image file"),  # Pillow would start a program
        (picture(1)[:45] + b"\xff" * 4 + picture(1)[49:], "."),  # a part that says it has 4 GiB
    ],
)
def test_images_that_promise_too_much(files, tmp_path, content, reason):
    data = as_folder(files | {"bee/1.webp": content}, tmp_path / "set")
    with pytest.raises(DataError, match=rf"cannot read image .*bee/1\.webp: .*{reason}"):
        all_of(open_images(data, TO_TENSOR))
    loader = open_images(data, TO_TENSOR, skip_unreadable=True)
    assert len(all_of(loader)[0]) == 5


def test_a_decoders_own_errors_are_the_images(files, tmp_path, monkeypatch):
    def stumble(self):
        raise AssertionError  # as Pillow does on some palettes, and says nothing

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", stumble)
    with pytest.raises(DataError, match=r"cannot read image .*ant/0\.png: AssertionError"):
        all_of(open_images(as_folder(files, tmp_path / "set"), TO_TENSOR))


def test_pipes_devices_and_links_in_circles(files, tmp_path):
    data = as_folder(files, tmp_path / "set")
    os.mkfifo(data / "ant" / "pipe.png")
    (data / "ant" / "zero.png").symlink_to("/dev/zero")
    (data / "ant" / "nothing.png").symlink_to("nowhere")
    (data / "ant" / "self.png").symlink_to("self.png")
    (data / "ant" / "up").symlink_to(data)
    (data / "root").symlink_to("/")
    (data / "ant" / "other").symlink_to(data / "bee")  # not a circle: followed
    loader = open_images(data, TO_TENSOR, skip_unreadable=True)
    images, labels = all_of(loader)
    assert sorted(name for name, _ in loader.skipped) == [
        "ant/nothing.png",
        "ant/pipe.png",
        "ant/self.png",
        "ant/zero.png",
    ]
    assert len(images) == 8
    assert labels.tolist() == [0, 0, 3, 3, 1, 1, 2, 2]  # a class is the folder an image is found in


def test_a_class_map_that_cannot_be_read(data, tmp_path):
    with pytest.raises(DataError, match="the class map .*cannot be read"):
        open_images(data, TO_TENSOR, num_classes=3, class_map=tmp_path / "nowhere.txt")
    (tmp_path / "map.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="the class map .*cannot be read"):
        open_images(data, TO_TENSOR, num_classes=3, class_map=tmp_path / "map.txt")


def test_a_tar_in_capitals(files, tmp_path):
    _, labels = all_of(open_images(as_tar(files, tmp_path / "SET.TAR"), TO_TENSOR))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_tars_of_classes_in_a_tar(files, tmp_path):
    inside = {}
    for name in ("ant", "bee", "cat"):
        mine = {path.partition("/")[2]: content for path, content in files.items() if path.startswith(name)}
        inside[f"{name}.tar"] = as_tar(mine, tmp_path / "one.tar").read_bytes()
    images, labels = all_of(open_images(as_tar(inside, tmp_path / "all.tar"), TO_TENSOR))
    whole, expected = all_of(open_images(as_folder(files, tmp_path / "set"), TO_TENSOR))
    assert torch.equal(images, whole)
    assert torch.equal(labels, expected)
