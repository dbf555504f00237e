"""Ways to spoil a good file: what `fuzz.py` does to it before it hands it in.

Everything drawn comes from the generator that is passed, so that a case is the same whenever its number is.
"""

from __future__ import annotations

import bz2
import copy
import functools
import gzip
import io
import json
import lzma
import math
import pickle
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
DTYPES = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64", "C64", "F8_E4M3")
DTYPES += ("F8_E5M2", "F8_E8M0", "F4", "X1")


class Raw:
    """Text that stands in a document as it is: what no value of Python could say."""

    def __init__(self, text: str) -> None:
        self.text = text


def _deep(opening: str, closing: str, depth: int) -> Raw:
    return Raw(opening * depth + closing * depth)


# What is put in the place of a value. Half of it is wrong in kind, half in size.
HOSTILE: tuple[Any, ...] = (
    *(math.inf, -math.inf, math.nan, 0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, 10**30),
    *(Raw("1e999"), Raw("1" + "0" * 400), Raw("9" * 5000), Raw("-" + "9" * 5000)),
    *(None, True, False, "", "a", "0", "none", "x" * 100_000, "\ud800", "\0", "\n", "\x1b[2J", "ü" * 50, "../../x"),
    *([], {}, [[]], [{}], {"a": {}}, [0], [1, 2], [1, 2, 3], [-1, -1], [math.inf, math.inf], [100_000, 100_000]),
    *([1e9, 1e9], [2**40, 2**40], [0.5, 0.5], ["2", "2"], [None, None], [True, True], list(range(1000)), ["a"] * 99),
    *(
        _deep("[", "]", 30),
        _deep("[", "]", 900),
        _deep('{"a":[', "]}", 450),
        _deep("[", "]", 100_000),
        _deep('{"a":', "}", 30),
        Raw('{"a":' * 50_000),
        Raw("[" * 50_000),
    ),
)


def to_json(value: Any) -> str:
    """JSON, but for what is `Raw` or not a number."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a document."""
    found, waiting = [], [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found


def _another(value: Any, draw: Random) -> Any:
    """A value near this one where it is a number, or one that cannot be."""
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.4:
        return draw.choice(
            [value + 1, value - 1, -value, 2 * value, value * 1000, value * 10**6, value / 2, float(value)]
        )
    return _hostile(draw)


def _hostile(draw: Random) -> Any:
    return copy.deepcopy(draw.choice(HOSTILE))  # a later change must not change what others get


def spoil_document(document: Any, draw: Random) -> Any:
    """A document of dicts and lists, changed in one to three places."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = _places(document)
        if not places:
            return _hostile(draw)
        holder, key = draw.choice(places)
        what = draw.random()
        if what < 0.6:
            holder[key] = _another(holder[key], draw)
        elif what < 0.75:
            del holder[key]
        elif what < 0.85 and isinstance(holder, dict):
            name = draw.choice(["extra", "", "\ud800", "self", "cls", "__class__", "pretrained", "checkpoint_path"])
            holder[name] = _hostile(draw)
        elif what < 0.92 and isinstance(holder, dict):  # the same key twice
            holder[key] = Raw(f"{to_json(holder[key])}, {json.dumps(key)}: {to_json(_another(holder[key], draw))}")
        else:
            other, place = draw.choice(places)
            holder[key] = copy.deepcopy(other[place])
    return _hostile(draw) if draw.random() < 0.02 else document


def spoil_json(document: Any, draw: Random) -> bytes:
    """JSON that is wrong in what it says, or in how it says it."""
    text = to_json(spoil_document(document, draw)).encode("utf-8", "surrogatepass")
    return spoil_bytes(text, draw) if draw.random() < 0.15 else text


def to_toml(settings: dict[str, Any]) -> str:
    """Lines of TOML; JSON's notation of strings, numbers and lists is TOML's too."""
    return "".join(f"{key} = {to_json(value)}\n" for key, value in settings.items() if value is not None)


TOML = ("inf", "-inf", "nan", "+nan", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "0x7fffffffffffffff", "1_000")
TOML += (
    "'''\n'''",
    "'x'",
    "{ a = 1 }",
    "[1, 'a']",
    "[" * 3000 + "]" * 3000,
    "[" * 50_000,
    "{a=" * 3000,
    "9" * 5000,
    "",
)
TOML += ('"\\uD800"', '"\\U0010FFFF"', "1e999", "tru", "0.5.5", "'2x2'", "'999999999x999999999'", "'²x²'", "'1:2'")


def spoil_toml(settings: dict[str, Any], draw: Random) -> bytes:
    """A file of settings with lines that are wrong, missing, or there twice."""
    lines = to_toml(settings).splitlines()
    for _ in range(draw.choice([1, 1, 2, 3])):
        place, what = draw.randrange(len(lines)), draw.random()
        key = lines[place].split(" = ")[0]
        if what < 0.4:
            lines[place] = f"{key} = {draw.choice(TOML)}"
        elif what < 0.75:
            lines[place] = f"{key} = {to_json(_another(settings.get(key), draw))}"
        elif what < 0.85:
            lines.insert(
                place, draw.choice([f"{key}.a = 1", "[[x]]", f"[{key}]", "a" * 9000, "é = 1", "self = 1", "= 1"])
            )
        else:
            lines.append(lines[place])
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return spoil_bytes(text, draw) if draw.random() < 0.15 else text


def spoil_bytes(data: bytes, draw: Random, others: Sequence[bytes] = ()) -> bytes:
    """Flipped bits, numbers in wrong places, parts cut, repeated, moved, or of another file."""
    spoilt = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        place = draw.randrange(len(spoilt) + 1)
        what = draw.randrange(8)
        if what == 0 or place == len(spoilt):
            spoilt = spoilt[:place] + draw.randbytes(draw.randrange(9))
        elif what in (1, 2):
            spoilt[place] ^= 1 << draw.randrange(8)
        elif what == 3:
            width = draw.choice([1, 2, 4, 8])
            number = (draw.choice(NUMBERS) % 256**width).to_bytes(width, draw.choice(["little", "big"]))
            spoilt[place : place + width] = number
        elif what == 4:
            del spoilt[place : place + draw.choice([1, 4, 64, 512])]
        elif what == 5:
            spoilt[place:place] = spoilt[place : place + draw.choice([1, 4, 64, 512])]
        elif what == 6 and others:
            other = draw.choice(others)
            cut = draw.randrange(len(other) + 1)
            spoilt[place:] = other[cut:]
        else:
            spoilt[place : place + 4] = draw.randbytes(4)
        if not spoilt:
            return b""
    return bytes(spoilt)


# safetensors: eight bytes of length, a header of JSON, the numbers.

Entry = tuple[str, str, list[int], bytes]


def unpack(data: bytes) -> tuple[dict[str, str], list[Entry]]:
    """Metadata and tensors of a good file."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata, body = header.pop("__metadata__", {}), data[8 + length :]
    entries = [
        (name, about["dtype"], about["shape"], body[about["data_offsets"][0] : about["data_offsets"][1]])
        for name, about in header.items()
    ]
    return metadata, entries


def pack(metadata: Any, entries: Sequence[Entry], change: Callable[[dict], Any] | None = None) -> bytes:
    """A file of such metadata and tensors, whose header is changed on the way."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, dtype, shape, content in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(content)]}
        start += len(content)
    text = to_json(change(header) if change else header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + b"".join(entry[3] for entry in entries)


def _spoil_entries(entries: list[Entry], draw: Random) -> list[Entry]:
    """Tensors that are whole, and not those expected."""
    entries = list(entries)
    place = draw.randrange(len(entries))
    name, dtype, shape, content = entries[place]
    what = draw.randrange(8)
    if what == 0:
        del entries[place]
    elif what == 1:
        entries[place] = (draw.choice(["a", "", "a.b", name[:-1], f"{name}.x", "\ud800"]), dtype, shape, content)
    elif what == 2:
        entries[place] = (name, draw.choice(["I32", "U32", "F32"]), shape, content)
    elif what == 3:
        entries[place] = (
            name,
            draw.choice(["I16", "F16", "BF16", "U16", "I64", "F64", "C64", "U8", "BOOL"]),
            shape,
            b"",
        )
        widths = {"I16": 2, "F16": 2, "BF16": 2, "U16": 2, "U8": 1, "BOOL": 1}
        count = math.prod(shape) * widths.get(entries[place][1], 8)
        entries[place] = (*entries[place][:3], draw.randbytes(count))
    elif what == 4:
        entries[place] = (
            name,
            dtype,
            draw.choice([shape[::-1], [1, *shape], [math.prod(shape)], [*shape, 1]]),
            content,
        )
    elif what == 5:
        entries[place] = (name, dtype, draw.choice([[0], [0, *shape], [0, 2**40], []]), b"")
    elif what == 6:
        entries.append((draw.choice(["a", "blocks.0.attn.predictor.extra", "head.weights"]), dtype, shape, content))
    else:
        value = struct.pack("<f", draw.choice([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0]))
        numbers = bytearray(content)
        for _ in range(draw.choice([1, 5, len(numbers) // 4])):
            spot = 4 * draw.randrange(max(1, len(numbers) // 4))
            numbers[spot : spot + 4] = value
        entries[place] = (name, dtype, shape, bytes(numbers[: len(content)]))
    return entries


def _spoil_header(header: dict[str, Any], draw: Random) -> Any:
    names = [name for name in header if name != "__metadata__"]
    if draw.random() < 0.5 and names:  # shapes, types and places that the numbers cannot have
        about = header[draw.choice(names)]
        field = draw.choice(["shape", "dtype", "data_offsets"])
        sides = [0, 2**20, 2**32, 2**62, 2**63, 2**64 - 1]
        about[field] = {
            "shape": [draw.choice(sides) for _ in range(draw.randrange(1, 6))],
            "dtype": draw.choice(DTYPES),
            "data_offsets": [draw.choice(NUMBERS), draw.choice(NUMBERS)],
        }[field]
        return header
    return spoil_document(header, draw)


def spoil_safetensors(data: bytes, draw: Random, others: Sequence[bytes] = (), key: str | None = None) -> bytes:
    """A safetensors file that lies in its metadata's ``key``, its header, its length or its tensors."""
    metadata, entries = unpack(data)
    what = draw.random()
    if key is not None and what < 0.5:
        document = json.loads(metadata[key])
        text = spoil_json(document, draw).decode("utf-8", "surrogateescape")
        return pack({**metadata, key: text}, entries)
    if what < 0.65:
        return pack(metadata, entries, lambda header: _spoil_header(header, draw))
    if what < 0.85:
        for _ in range(draw.choice([1, 1, 2])):
            entries = _spoil_entries(entries, draw) if entries else entries
        return pack(metadata, entries)
    if what < 0.9:
        return struct.pack("<Q", draw.choice([*NUMBERS, len(data), len(data) - 8, 100_000_000])) + data[8:]
    return spoil_bytes(data, draw, others)


# Pickles, as torch writes them in zips and wrote them before; and some that would do something.


def traps(marker: Path) -> list[bytes]:
    """Pickles that make a folder when they are loaded by whoever trusts them."""

    def reduce(function: str, *arguments: str) -> bytes:
        module, name = function.rsplit(".", 1)
        packed = b"".join(b"V" + argument.encode() + b"\n" for argument in arguments)
        return b"c" + f"{module}\n{name}\n".encode() + b"(" + packed + b"tR."

    code = f"__import__('os').mkdir({str(marker)!r})"
    return [
        reduce("os.mkdir", str(marker)),
        reduce("posix.mkdir", str(marker)),
        reduce("builtins.eval", code),
        reduce("builtins.exec", code),
        reduce("os.system", f"mkdir {marker}"),
        reduce("subprocess.getoutput", f"mkdir {marker}"),
        reduce("pathlib.Path.mkdir", str(marker)),
        reduce("torch.hub.load", str(marker), "x"),
        reduce("numpy.testing._private.utils.runstring", code, ""),
        b"\x80\x04" + reduce("os.mkdir", str(marker))[:-1] + b"0}.",
        pickle.dumps({"model": {"a": 1}}) + reduce("os.mkdir", str(marker)),
        b"(S'" + str(marker).encode() + b"'\nios\nmkdir\n.",
    ]


def _spoil_pickle(data: bytes, draw: Random) -> bytes:
    """Whole numbers of a pickle replaced: sizes, strides and places of tensors among them."""
    spoilt, widths = bytearray(data), {"BININT1": 1, "BININT2": 2, "BININT": 4, "BINUNICODE": 4, "SHORT_BINUNICODE": 1}
    places = [
        (at, widths[code.name]) for code, _, at in pickletools.genops(data) if code.name in widths and at is not None
    ]
    for at, width in draw.sample(places, min(len(places), draw.choice([1, 1, 2, 5]))):
        spoilt[at + 1 : at + 1 + width] = (draw.choice(NUMBERS) % 256**width).to_bytes(width, "little")
    return bytes(spoilt)


def spoil_pth(data: bytes, draw: Random, others: Sequence[bytes], marker: Path) -> bytes:
    """An official file of weights whose bytes, pickle or archive is not what it was."""
    what = draw.random()
    if what < 0.2:
        return draw.choice(traps(marker))
    if what < 0.3:
        return b"\x80\x02" + draw.choice(
            [b"(" * 9000, b"]" * 9000 + b".", b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8]
        )
    if what < 0.6 or not zipfile.is_zipfile(io.BytesIO(data)):
        return spoil_bytes(data, draw, others)
    made, packed = io.BytesIO(), zipfile.ZIP_DEFLATED if draw.random() < 0.15 else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl") and what < 0.9:
                trap = draw.random() < 0.25
                content = draw.choice(traps(marker)) if trap else _spoil_pickle(content, draw)
            elif draw.random() < 0.1:
                content = spoil_bytes(content, draw)
            if packed == zipfile.ZIP_DEFLATED and draw.random() < 0.02:
                content += bytes(10**8)  # little until it is unpacked
            new.writestr(name, content, packed)
    return made.getvalue()


# Images.


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """Names and contents of the parts of a good PNG."""
    chunks, at = [], 8
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return chunks


def to_png(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A PNG of such parts, with sums that are right."""
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@functools.cache
def promising_png(width: int, height: int, depth: int = 8, colour: int = 2, rows: int = 1) -> bytes:
    """A PNG that promises so many pixels and has so many rows of them, all black."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row = 1 + (width * samples * depth + 7) // 8
    packer = zlib.compressobj(1)
    body = b"".join([packer.compress(bytes(row)) for _ in range(rows)] + [packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    palette = [(b"PLTE", bytes(6))] if colour == 3 else []
    return to_png([(b"IHDR", header), *palette, (b"IDAT", body), (b"IEND", b"")])


def _spoil_png(data: bytes, draw: Random) -> bytes:
    chunks, what = png_chunks(data), draw.randrange(6)
    place = draw.randrange(len(chunks))
    if what < 2:
        sides = [1, 2, 50, 65535, 10_000, 30_000, 2**31 - 1, 2**31, 2**32 - 1, 0]
        old = chunks[0][1]
        sizes = struct.pack(">II", draw.choice(sides), draw.choice(sides))
        rest = bytes(
            [draw.choice([1, 2, 4, 8, 16, 0, 255]), draw.choice([0, 2, 3, 4, 6, 1]), 0, 0, draw.choice([0, 1, 2])]
        )
        chunks[0] = (b"IHDR", sizes + (rest if what else old[8:]))
    elif what == 2:
        bomb = zlib.compress(bytes(draw.choice([10**5, 10**7, 3 * 10**8])), 1) if draw.random() < 0.2 else b"x" * 99
        name = draw.choice(
            [b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tRNS", b"gAMA", b"acTL", b"fcTL", b"fdAT", b"PLTE", b"sRGB"]
        )
        head = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}.get(name, b"")
        chunks.insert(draw.randrange(1, len(chunks) + 1), (name, head + bomb))
    elif what == 3:
        del chunks[place]
    elif what == 4:
        chunks.insert(place, draw.choice(chunks))
    else:
        name, content = chunks[place]
        chunks[place] = (name, spoil_bytes(content, draw) if content else draw.randbytes(9))
    return to_png(chunks)


def _spoil_sizes(data: bytes, draw: Random) -> bytes:
    """Width or height in the header of JPEG, GIF, BMP, WebP or TIFF."""
    spoilt = bytearray(data)
    side = draw.choice([0, 1, 255, 0x3FFF, 0x7FFF, 0xFFFF, 30_000, 9_000])
    both = [side, draw.choice([1, side])]
    if data[:2] == b"\xff\xd8":
        frame = next((at for at in range(2, len(data) - 9) if data[at : at + 2] in (b"\xff\xc0", b"\xff\xc2")), 2)
        spoilt[frame + 5 : frame + 9] = struct.pack(">HH", *both)
    elif data[:3] == b"GIF":
        spoilt[6:10] = struct.pack("<HH", *both)
    elif data[:2] == b"BM":
        spoilt[18:26] = struct.pack("<ii", *(draw.choice([number, -number, 2**31 - 1]) for number in both))
    elif data[8:12] == b"WEBP":
        spoilt[24:30] = draw.choice([b"\xff" * 6, draw.randbytes(6), bytes(6)])
    else:
        return _spoil_tiff(data, draw)
    return bytes(spoilt)


def _spoil_tiff(data: bytes, draw: Random) -> bytes:
    """Another type, count or value in one of the first directory's entries."""
    spoilt = bytearray(data)
    directory = struct.unpack("<I", data[4:8])[0]
    count = struct.unpack("<H", data[directory : directory + 2])[0]
    at = directory + 2 + 12 * draw.randrange(count)
    for _ in range(draw.choice([1, 1, 2])):
        field, width = draw.choice([(0, 2), (2, 2), (4, 4), (8, 4)])
        number = draw.choice([*NUMBERS, 30_000, 256, 257, 258, 259, 277, 3, 4, 5])
        spoilt[at + field : at + field + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(spoilt)


def spoil_image(data: bytes, draw: Random, others: Sequence[bytes]) -> bytes:
    """An image file that is damaged, or promises what it does not have."""
    what = draw.random()
    if what < 0.04:
        width, height = draw.choice(
            [(1, 60_000), (60_000, 1), (3, 30_000), (90, 8_900), (5_999, 5_999), (8_900, 8_900), (13_000, 13_000)]
        )
        depth, colour = draw.choice([(1, 0), (8, 0), (1, 3), (8, 6)])
        return promising_png(width, height, depth, colour, draw.choice([1, height]))
    if what < 0.06:
        return draw.choice(NO_IMAGES)
    if what < 0.5:
        return _spoil_png(data, draw) if data.startswith(b"\x89PNG") else _spoil_sizes(data, draw)
    return spoil_bytes(data, draw, others)


NO_IMAGES = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n/Courier findfont\nshowpage\n",
    b"P6 30000 30000 255\n" + bytes(99),
    b"P1 99999999 99999999\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    b"\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x01\x00\x20\x00\xff\xff\xff\x7f\x16\x00\x00\x00",
    b"DDS |\0\0\0" + b"\xff" * 120,
    b"8BPS\0\1" + bytes(6) + b"\0\3" + b"\0\0\x75\x30" * 2 + b"\0\x08\0\3" + bytes(12),
    b"SIMPLE  =                    T" + b" " * 50 + b"NAXIS   =                    2".ljust(80) + b"END".ljust(80),
    b"#define x_width 99999\n#define x_height 99999\nstatic char x_bits[] = {\n",
    b"",
    b"\0",
    b"GIF89a",
    b"\xff\xd8\xff",
    b"RIFF\xff\xff\xff\xffWEBPVP8 ",
    b"II*\0\x08\0\0\0\0\0",
    b"MM\0+\0\x08\0\0\0\0\0\0\0\0\0\x10",
)


# Tars.

Member = tuple[str, bytes]
TYPES = b"01234567xgLKSDMNVA\0"
NAMES = (
    "../../out.png",
    "/etc/out.png",
    "a/./b.png",
    "a/../../b.png",
    "a",
    "",
    "a/b" * 300 + ".png",
    "é/ü.png",
    "a/b.tar",
)
NAMES += (
    "a/.png",
    ".cls",
    "a/b.PNG",
    "a\nb/c.png",
    "a/b.png.cls",
    "a/b.json",
    "\udcff/a.png",
    "a/b.gz",
    "C:\\a\\b.png",
)


def to_tar(members: Sequence[Member], form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of such files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _odd_tar(members: Sequence[Member], draw: Random) -> bytes:
    """A good tar with names, kinds and headers that no set of images has."""
    made, form = io.BytesIO(), draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(draw.choice(NAMES) if draw.random() < 0.4 else name)
            info.size = len(content)
            if draw.random() < 0.3:
                info.type = draw.choice(
                    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
                )
                info.linkname = draw.choice([info.name, "/etc/passwd", "../x", "", members[0][0]])
                info.size = draw.choice([0, len(content)]) if info.type != tarfile.DIRTYPE else 0
            if form == tarfile.PAX_FORMAT and draw.random() < 0.4:
                pax = [("size", "-1"), ("size", "9" * 30), ("size", "x"), ("path", "a\0b.png"), ("path", "")]
                pax += [
                    ("GNU.sparse.major", "1"),
                    ("GNU.sparse.realsize", "9" * 12),
                    ("mtime", "nan"),
                    ("mtime", "1e999"),
                ]
                pax += [("GNU.sparse.map", "0,1,2"), ("GNU.sparse.size", "8589934592"), ("hdrcharset", "BINARY")]
                info.pax_headers = dict(draw.sample(pax, draw.choice([1, 2, 3])))
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _headers(data: bytes) -> Iterator[int]:
    return (at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar")


def _spoil_header_of_tar(data: bytes, draw: Random) -> bytes:
    """Another size, kind or number in a member's header, under a sum that is right."""
    spoilt = bytearray(data)
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.choice(list(_headers(data)))
        sizes = [b"77777777777\0", b"00000000000\0", b"-0000000001\0", b"xxxxxxxxxxx\0", b"\x80" + b"\xff" * 11]
        sizes += [
            b"\xff" * 12,
            b"\x80" + bytes(6) + b"\x02" + bytes(4),
            b"\x80" + bytes(5) + b"\x7f" + bytes(5),
            bytes(12),
        ]
        what = draw.randrange(4)
        if what == 0:
            spoilt[at + 124 : at + 136] = draw.choice(sizes)
        elif what == 1:
            spoilt[at + 156] = draw.choice(TYPES)
        elif what == 2:  # a sparse file: little in the tar, as much as it says once it is read
            spoilt[at + 156] = ord("S")
            spoilt[at + 386 : at + 410] = b"00000000000\0" + b"00000000100\0"
            spoilt[at + 482] = draw.choice([0, 1])
            spoilt[at + 483 : at + 495] = draw.choice(sizes)
        else:
            field = draw.choice([(100, 8), (108, 8), (136, 12), (257, 8), (345, 155), (0, 100)])
            spoilt[at + field[0] : at + sum(field)] = draw.randbytes(field[1])
        spoilt[at + 148 : at + 156] = b" " * 8
        spoilt[at + 148 : at + 156] = b"%06o\0 " % sum(spoilt[at : at + 512])
    return bytes(spoilt)


def _nested(members: Sequence[Member], draw: Random) -> bytes:
    data = to_tar(members)
    for level in range(draw.choice([1, 2, 3, 400, 1200])):
        # Only the members' sum of sizes grows, by a header each: a thousand levels are a megabyte.
        data = to_tar([(f"a{level % 10}.tar", data.rstrip(b"\0") + bytes(1024))])
    return data


def spoil_tar(members: Sequence[Member], draw: Random, others: Sequence[bytes] = ()) -> bytes:
    """A tar that is damaged, packed, nested, or holds what it should not."""
    what = draw.random()
    if what < 0.3:
        return _odd_tar(members, draw)
    good = to_tar(members, draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]))
    if what < 0.65:
        return _spoil_header_of_tar(good, draw)
    if what < 0.7:
        return draw.choice([gzip.compress, bz2.compress, lzma.compress])(good)
    if what < 0.72:
        return (
            gzip.compress(to_tar([*members, ("a/a.cls", bytes(3 * 10**8))]), 1)
            if draw.random() < 0.2
            else gzip.compress(good)
        )
    if what < 0.75:
        return _nested(members, draw)
    return spoil_bytes(good, draw, others)
