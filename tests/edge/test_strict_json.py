import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edge import strict_json
from gateway.errors import Reason, Refusal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b'"x"', b"1", b"{} x", b"{", b'{"a":1,}', b"[" * 20_000, b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"a":' * 300 + b"1" + b"}" * 300, b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":"\xff"}', b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"), '{"a":1}'.encode("utf-32"), b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e999}', b"{'a':1}",
        b'{"a":"\x00"}', b'{"a":01}', b"\x00", b'{"a":1}{"b":2}',
    ],
)  # fmt: skip
def test_unusable_bodies(raw: bytes) -> None:
    found = strict_json.read(raw)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.INVALID_BODY
    assert "Traceback" not in found.message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{ "a": {"stream": true, "stream": false} }',
        b'{"a":[{"b":1},{"b":1,"c":2,"b":1}]}',
        b'{"a":"\\u003a\\u003A","b":1,"b":1}',
        b'{"x":"\\u003a","a":1,"a":1}',
        b'{"x":"\\u003a\\u003a","a":":","a":1}',
        b'{"":1,"":2}',
    ],
)
def test_duplicates_are_found_at_any_depth_and_through_escapes(raw: bytes) -> None:
    found = strict_json.read(raw)
    assert isinstance(found, Refusal)
    assert "twice" in found.message


@pytest.mark.parametrize("raw", [b'{"a":"\\u003a"}', b'{ "a" : ":\\u003A:" , "b" : {"a":1} }', b'{"a":"a:b","b":[":",":"]}'])
def test_colons_in_strings_are_no_duplicates(raw: bytes) -> None:
    found = strict_json.read(raw)
    assert isinstance(found, strict_json.Read)
    assert found.document == json.loads(raw)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=5), st.booleans(), st.booleans())
def test_what_is_read_is_what_is_sent(document: dict[str, object], escaped: bool, spaced: bool) -> None:
    raw = json.dumps(document, ensure_ascii=escaped, indent=1 if spaced else None).encode("utf-8", "surrogatepass")
    found = strict_json.read(raw)
    if isinstance(found, Refusal):
        assert "surrogate" in found.message or "\\ud" in raw.decode("latin-1").lower()
        return
    assert orjson.loads(found.compact) == found.document == orjson.loads(raw)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(":ab", max_size=2), VALUES), max_size=6), st.booleans())
def test_duplicates_against_a_plain_model(pairs: list[tuple[str, object]], escaped: bool) -> None:
    text = "{" + ",".join(json.dumps(k, ensure_ascii=escaped) + ":" + json.dumps(v, ensure_ascii=escaped) for k, v in pairs) + "}"
    raw = text.replace("\\u00e9", "\\u003a").encode("utf-8", "surrogatepass")
    found = strict_json.read(raw)
    unique = len({k for k, _ in pairs}) == len(pairs)
    assert isinstance(found, strict_json.Read) == unique


def test_more_lists_and_objects_than_text_has_brackets_are_not_read() -> None:
    """A body of 20 MB of them stopped every other request for seconds while it was read, and took a gigabyte."""
    for inner in (b"[],", b'{"":0},', b"[[[[]]]],"):
        found = strict_json.read(b'{"a":[' + inner * (4_000_000 // len(inner)) + b"0]}")
        assert isinstance(found, Refusal) and "too many" in found.message
    code = json.dumps({"prompt": "for (i = 0; i < n; i++) { a[i] = {b: [c]}; }\n" * 40_000}).encode()
    assert not isinstance(strict_json.read(code), Refusal)
    ids = json.dumps({"prompt": [[7] * 40] * 20_000}).encode()
    assert not isinstance(strict_json.read(ids), Refusal)
