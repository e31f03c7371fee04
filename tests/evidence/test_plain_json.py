"""Both canonical forms agree, and refuse the same things; the vLLM side needs nothing but the standard library."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.evidence import canonical, plain_json

REPOSITORY = Path(__file__).parents[2]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SAFE = st.integers(-(2**53) + 1, 2**53 - 1)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | SAFE | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=6),
    max_leaves=25,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_the_two_canonical_forms_agree(document):
    assert plain_json.canonical(document) == canonical.canonical(document)
    assert plain_json.digest(document) == canonical.digest(document)


def test_keys_sort_by_utf16_code_units_as_the_standard_says():
    # U+1F600 is D83D DE00 in UTF-16 and so sorts before U+FB33, although its code point is higher.
    document = {"\ufb33": 1, "\U0001f600": 2, "\r": 3, "1": 4, "\u20ac": 5, "\x80": 6}
    expected = '{"\\r":3,"1":4,"\x80":6,"\u20ac":5,"\U0001f600":2,"\ufb33":1}'.encode()
    assert plain_json.canonical(document) == canonical.canonical(document) == expected


@pytest.mark.parametrize("value", [0.5, {"a": 2**53}, ["\ud800"], {"\udfff": 1}, {1: "a"}, b"x", {"a": [-(2**53)]}])
def test_what_has_no_canonical_form_is_refused_by_both(value):
    with pytest.raises(plain_json.NotCanonical):
        plain_json.canonical(value)
    with pytest.raises(canonical.CanonicalError):
        canonical.canonical(value)


@pytest.mark.parametrize(
    "raw", [b"{", b"\xff", b'{"a": 1.0}', b'{"a": 1e3}', b"[" * 5000 + b"]" * 5000, b'{"a": 9007199254740992}']
)
def test_bytes_from_outside_are_checked(raw):
    with pytest.raises(canonical.CanonicalError):
        canonical.parse(raw, limit=100_000)


def test_a_document_over_the_limit_is_not_parsed():
    with pytest.raises(canonical.CanonicalError, match="more than the 10"):
        canonical.parse(b'{"a": "bbbbbbb"}', limit=10)


def test_the_middleware_imports_with_the_standard_library_alone():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gateway.evidence.attest;"
        "print('\\n'.join(sorted({n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))))"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", script, str(REPOSITORY)], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) <= {"gateway", "__main__"}
