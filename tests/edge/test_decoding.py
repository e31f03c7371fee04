import gzip
import tracemalloc
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge.decoding import decode
from gateway.errors import Reason, Refusal

ENCODERS = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"br": brotli.compress,
    b"zstd": zstandard.compress,
}
DATA = b'{"model": "tiny", "n": 1}' * 50_000


@pytest.mark.parametrize("coding", ENCODERS)
def test_round_trip_and_truncation(coding: bytes) -> None:
    packed = ENCODERS[coding](DATA)
    assert decode(coding, packed, len(DATA)) == DATA
    assert decode(coding.upper(), packed, len(DATA)) == DATA
    for cut in (1, 5, len(packed) // 2, len(packed) - 1):
        found = decode(coding, packed[:-cut], len(DATA))
        assert isinstance(found, Refusal)
        assert found.reason is Reason.INVALID_BODY


@pytest.mark.parametrize("coding", ENCODERS)
def test_the_bound_is_on_what_comes_out(coding: bytes) -> None:
    found = decode(coding, ENCODERS[coding](DATA), len(DATA) - 1)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.BODY_TOO_LARGE


@pytest.mark.parametrize("coding", ENCODERS)
def test_a_bomb_never_expands_far_beyond_the_bound(coding: bytes) -> None:
    bomb = ENCODERS[coding](bytes(16 << 20))
    tracemalloc.start()
    found = decode(coding, bomb, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, Refusal)
    assert found.reason is Reason.BODY_TOO_LARGE
    assert peak < 12 << 20


@pytest.mark.parametrize("coding", [b"gzip, gzip", b"gzip, br", b"compress", b"x", b"identity, gzip", b"\xff"])
def test_unknown_and_stacked_codings(coding: bytes) -> None:
    found = decode(coding, gzip.compress(b"{}"), 100)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.UNSUPPORTED_ENCODING


def test_no_coding_is_still_bounded() -> None:
    assert decode(None, b"abc", 3) == b"abc"
    assert decode(b"identity", b"abc", 3) == b"abc"
    assert isinstance(decode(None, b"abcd", 3), Refusal)


def test_raw_deflate_members_and_frames() -> None:
    raw = zlib.compressobj(wbits=-15)
    assert decode(b"deflate", raw.compress(DATA) + raw.flush(), len(DATA)) == DATA
    assert decode(b"gzip", gzip.compress(b"a") + gzip.compress(b"b"), 10) == b"ab"
    assert decode(b"zstd", zstandard.compress(b"a") + zstandard.compress(b"b"), 10) == b"ab"
    assert isinstance(decode(b"gzip", gzip.compress(b"") * 1000, 10), Refusal)
    assert isinstance(decode(b"gzip", gzip.compress(b"a") + b"rubbish", 10), Refusal)
    assert isinstance(decode(b"deflate", zlib.compress(b"a") + b"rubbish", 10), Refusal)


def test_a_frame_that_lies_about_its_size() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(8 << 20))
    found = decode(b"zstd", packed, 1 << 20)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.BODY_TOO_LARGE


@given(st.sampled_from(sorted(ENCODERS)), st.binary(max_size=200))
def test_any_bytes_give_bytes_or_a_refusal(coding: bytes, raw: bytes) -> None:
    assert isinstance(decode(coding, raw, 1000), bytes | Refusal)
