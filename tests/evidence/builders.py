"""Records, backends and targets for tests: built like the lab's, then changed."""

import copy

from gateway.evidence.canonical import digest
from gateway.evidence.identity import ObservedIdentity, identity_of
from gateway.evidence.lab import fixtures, record_for
from gateway.evidence.record import validate

CONFIG_A = fixtures()[0]["record"]["configuration"]


def observed_for(document, *, source="attested", kv_cache_tokens=65536, **other):
    return ObservedIdentity(
        source=source,
        identity=identity_of(document, digest(document)),
        document=document,
        kv_cache_tokens=kv_cache_tokens,
        **other,
    )


def raw_record(document=CONFIG_A, tokens_in=2048, tokens_out=512, concurrency=8):
    return copy.deepcopy(record_for(document, tokens_in, tokens_out, concurrency))


def make_record(**kwargs):
    return validate(raw_record(**kwargs))


def edited(raw, path, value):
    """A copy of plain JSON with the value at a dotted path replaced; whole numbers index lists."""
    changed = copy.deepcopy(raw)
    *way, last = [int(part) if part.lstrip("-").isdigit() else part for part in path.split(".")]
    place = changed
    for part in way:
        place = place[part]
    place[last] = value
    return changed
