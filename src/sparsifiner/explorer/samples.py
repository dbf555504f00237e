"""The images the page offers: scenes, digits, two photos that come with scikit-learn, and the user's own files."""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sparsifiner import digits, scenes
from sparsifiner.errors import DataError
from sparsifiner.explorer.pictures import SUFFIXES, Lens, Picture, decode, enlarged
from sparsifiner.explorer.refusal import Refusal

# Files offered of all that are named, and pictures of them held ready.
MAX_FILES = 200
HELD = 48
DIGITS_OF_A_KIND = 2
SCENES = 8


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image that can be asked for by its key.

    Attributes:
        key: its name in requests and shared links.
        name: its name for people.
        load: makes its picture.
        credit: whose it is and under what licence; None for the user's own.
        link: where that is written.
    """

    key: str
    name: str
    load: Callable[[], Picture]
    credit: str | None = None
    link: str | None = None


class Gallery:
    """Samples by key; pictures are made when asked for, and the last few are held."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = {sample.key: sample for sample in samples}
        self._held: collections.OrderedDict[str, Picture] = collections.OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> Picture | None:
        """The picture of a sample; None if there is no such sample."""
        if key not in self.samples:
            return None
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        picture = self.samples[key].load()  # twice at worst, if two ask at once; the first stays
        with self._lock:
            picture = self._held.setdefault(key, picture)
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return picture


def digit_samples(lens: Lens) -> list[Sample]:
    """Some of each digit, none of which the demo's model was trained on."""
    _, (images, labels) = digits.load_digits()

    def sample(digit: int, number: int, position: int) -> Sample:
        key, name = f"digit-{digit}-{number + 1}", f"a {digit}"

        def load() -> Picture:
            from torchvision.transforms.functional import to_pil_image

            pixels = (images[position] * digits.STD + digits.MEAN).clamp(0, 1)
            return lens.framed(images[position], enlarged(to_pil_image(pixels)), key, name)

        return Sample(key, name, load, scenes.CREDIT)

    places = {digit: (labels == digit).nonzero().flatten().tolist() for digit in range(10)}
    return [sample(digit, n, places[digit][n]) for n in range(DIGITS_OF_A_KIND) for digit in range(10)]


def scene_samples(lens: Lens, side: int) -> list[Sample]:
    """Scenes of so many rows and columns of patches, of digits that the demo's model was not trained on."""
    _, test = digits.load_digits()

    def sample(number: int) -> Sample:
        key = f"scene-{number}"

        def load() -> Picture:
            from torchvision.transforms.functional import to_pil_image

            image = scenes.draw(test, 1, side, seed=number).images[0]
            pixels = (image * scenes.STD + scenes.MEAN).clamp(0, 1)
            return lens.framed(image, enlarged(to_pil_image(pixels)), key, f"scene {number}")

        return Sample(key, f"scene {number}", load, scenes.CREDIT)

    return [sample(number) for number in range(1, SCENES + 1)]


# As sklearn/datasets/images/README.txt says. It names one author for both; the page of the second is another's.
PHOTOS = (
    ("china.jpg", "danielbuechele", "https://www.flickr.com/photos/danielbuechele/6061409035/"),
    ("flower.jpg", "vultilion", "https://www.flickr.com/photos/vultilion/6056698931/"),
)


def photo_samples(lens: Lens) -> list[Sample]:
    """The two photos that come with scikit-learn."""
    folder = importlib.resources.files("sklearn.datasets.images")

    def sample(name: str, author: str, link: str) -> Sample:
        def load() -> Picture:
            image, notes = decode((folder / name).read_bytes())
            return lens.picture(image, name, name, notes)

        credit = f"photo from flickr.com/photos/{author}, CC BY 2.0, comes with scikit-learn"
        return Sample(name, name, load, credit, link)

    return [sample(*photo) for photo in PHOTOS]


def file_samples(paths: Iterable[str], lens: Lens, taken: Iterable[str] = ()) -> tuple[list[Sample], list[str]]:
    """The user's own files, in folders too, and what there is to say about them."""
    files = [file for path in paths for file in _files(Path(path))]
    keys, samples = set(taken), []
    for file in files[:MAX_FILES]:
        key = _key(file.name, keys)
        keys.add(key)
        samples.append(Sample(key, file.name, _loader(file, key, lens)))
    notes = []
    if len(files) > MAX_FILES:
        notes.append(f"Of {len(files):,} image files the first {MAX_FILES} are offered.")
    return samples, notes


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give image files or folders of them")
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise DataError(f"{path} holds no image files ({', '.join(sorted(SUFFIXES))})")
    yield from found


def _key(name: str, taken: set[str]) -> str:
    """A name that can stand in an address, and that no other has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "image"
    numbered = (f"{plain}-{number}" for number in itertools.count(2))
    return plain if plain not in taken else next(key for key in numbered if key not in taken)


def _loader(file: Path, key: str, lens: Lens) -> Callable[[], Picture]:
    def load() -> Picture:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise Refusal(422, f"{file.name} cannot be read any more: {error.strerror}") from None
        image, notes = decode(content)
        return lens.picture(image, key, file.name, notes)

    return load
