import pytest

from sparsifiner.files import DEEPEST, parse_json


def test_json_as_it_is():
    assert parse_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)


@pytest.mark.parametrize(
    "text",
    ["", "{", "9" * 5000, "[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 100 + "1" + "}" * 100, b"\xff\xfe\xff"],
)
def test_whatever_is_wrong_is_a_value_error(text):
    with pytest.raises(ValueError, match="."):
        parse_json(text)
