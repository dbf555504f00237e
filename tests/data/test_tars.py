"""Tars whose headers lie: refused before anything is read, skipped or made room for."""

import gzip
import io
import tarfile

import pytest

from sparsifiner.data.tars import members
from sparsifiner.errors import DataError

FILES = {"a/1.png": b"one", "b/2.png": b"two" * 300, "b/3.png": b"three"}


def tar_of(files=FILES):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def with_header(data, at, place, value):
    """The header at ``at`` with another value, under a sum that is right."""
    changed = bytearray(data)
    changed[at + place : at + place + len(value)] = value
    changed[at + 148 : at + 156] = b" " * 8
    changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    return bytes(changed)


def read(content, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    return {member.name: member.read() for member in members(str(path))}


def test_every_file_is_found_in_its_place(tmp_path):
    assert read(tar_of(), tmp_path) == FILES


def test_a_tar_in_a_tar_is_a_folder_and_goes_no_deeper(tmp_path):
    inner = tar_of({"1.png": b"one", "deep.tar": tar_of()})
    found = read(tar_of({"0.png": b"zero", "ant.tar": inner, "bee.TAR": tar_of({"x/2.png": b"two"})}), tmp_path)
    assert found == {"0.png": b"zero", "ant/1.png": b"one", "ant/deep.tar": tar_of(), "bee/x/2.png": b"two"}


SIZE, KIND = 124, 156
SECOND = 1024  # where the second header is


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: with_header(data, SECOND, SIZE, b"77777777777\0"), "'b/2.png' says that it has 8589934591 bytes"),
        (lambda data: with_header(data, SECOND, SIZE, b"\x80" + bytes(3) + b"\x7f" * 8), "which are not there"),
        (lambda data: with_header(data, SECOND, SIZE, b"\xff" * 12), "header of 'b/2.png' is damaged"),
        (lambda data: data[:SECOND] + b"x" * 512 + data[SECOND + 512 :], "is damaged at byte 1024"),
        (lambda data: data[: SECOND + 700], "which are not there"),
        (lambda data: data[:100], "is it a whole tar"),
        (lambda data: b"", "is it a whole tar"),
        (gzip.compress, "is it a whole tar, not compressed"),
    ],
)
def test_headers_that_lie_and_tars_that_are_cut(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        read(change(tar_of()), tmp_path)


def test_a_sparse_file_is_not_made_whole(tmp_path):
    sparse = with_header(tar_of(), SECOND, KIND, b"S")
    sparse = with_header(sparse, SECOND, 386, b"00000000000\0" + b"00000000100\0")
    with pytest.raises(DataError, match="which are not there"):
        read(with_header(sparse, SECOND, 483, b"77777777777\0"), tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    content = with_header(tar_of({"a.png": b"", "b.png": b"two"}), 0, KIND, kind)
    assert read(with_header(content, 0, 157, b"/etc/passwd"), tmp_path) == {"b.png": b"two"}


def test_names_that_lead_out_are_only_names(tmp_path):
    assert read(tar_of({"../../a.png": b"1", "/etc/b.png": b"2"}), tmp_path) == {
        "../../a.png": b"1",
        "/etc/b.png": b"2",
    }
