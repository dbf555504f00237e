import pytest

from sparsifiner.errors import LONGEST, CheckpointError, SparsifinerError, one_line, reason_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("as it is", "as it is"),
        ("two\n  lines", "two lines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("half \ud800 a character", "half \\ud800 a character"),
        ("tab\tand \0", "tab\\tand \\x00"),
    ],
)
def test_a_message_is_one_line_whatever_is_in_it(text, expected):
    assert str(CheckpointError(text)) == expected
    assert str(CheckpointError(text)).encode()  # a terminal can take it


def test_what_a_message_quotes_does_not_drown_it():
    message = str(SparsifinerError(f"a.safetensors: keep must be a number, got {'x' * 10**6}: write it again"))
    assert len(message) <= LONGEST
    assert message.startswith("a.safetensors: keep must be a number")
    assert message.endswith("write it again")
    assert one_line("x" * 10**4) == "x" * 10**4


def test_what_others_say_is_cut_to_its_first_line():
    assert reason_of(ValueError("first\nsecond")) == "first"
    assert reason_of(AssertionError()) == "AssertionError"
    assert len(reason_of(ValueError("x" * 999))) <= 200
