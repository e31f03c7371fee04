"""Signatures hold for one record and one key; succession says what changed and what was measured again."""

import pytest

from gateway.evidence import record as records
from gateway.evidence import signing
from gateway.evidence.signing import Signature, SignatureError
from tests.evidence.builders import CONFIG_A, edited, make_record, raw_record


def test_a_trusted_signature_is_found_among_others():
    record = make_record()
    (ours, public), (theirs, _) = signing.new_key(), signing.new_key()
    signatures = [signing.sign(record, theirs), signing.sign(record, ours)]
    assert signing.require(record, signatures, [public]) == public


def test_an_unsigned_record_or_a_stranger_is_not_enough():
    record, (pem, _), (_, trusted) = make_record(), signing.new_key(), signing.new_key()
    with pytest.raises(SignatureError, match=r"not signed$"):
        signing.require(record, [], [trusted])
    with pytest.raises(SignatureError, match="by a trusted key"):
        signing.require(record, [signing.sign(record, pem)], [trusted])


def test_a_signature_does_not_hold_for_a_changed_record():
    pem, public = signing.new_key()
    signature = signing.sign(make_record(), pem)
    changed = records.validate(edited(raw_record(), "slices.0.levels.1.e2e_ms.p95", "1639"))
    assert signing.holds(make_record(), signature)
    assert not signing.holds(changed, signature)
    with pytest.raises(SignatureError, match="does not hold"):
        signing.require(changed, [signature], [public])


def test_a_signature_under_another_name_does_not_hold():
    record, (pem, _), (_, other) = make_record(), signing.new_key(), signing.new_key()
    assert not signing.holds(record, Signature(other, signing.sign(record, pem).signature))


@pytest.mark.parametrize("pem", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_bad_private_key_is_a_typed_error(pem):
    with pytest.raises(SignatureError):
        signing.sign(make_record(), pem)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"schema": "capacity-evidence-signatures/v1", "record": "x", "signatures": []}']
)
def test_a_bad_signature_file_is_a_typed_error(raw):
    with pytest.raises(SignatureError):
        signing.load_signatures("0" * 64, raw)


def test_a_signature_file_of_another_record_is_refused():
    signature = signing.sign(make_record(), signing.new_key()[0])
    raw = signing.dump_signatures("a" * 64, [signature])
    assert signing.load_signatures("a" * 64, raw) == (signature,)
    with pytest.raises(SignatureError, match="another record"):
        signing.load_signatures("b" * 64, raw)


def test_a_new_configuration_rebuilds_all_its_evidence_and_names_the_fields():
    old = make_record()
    new = records.validate(raw_record(document=edited(CONFIG_A, "scheduler.max_num_seqs", 16)))
    link = signing.supersede(new, old).supersedes
    assert link.record == records.record_id(old)
    assert link.changed == ("server_configuration_hash", "scheduler.max_num_seqs")
    assert link.rebuilt == ("generate 1-2048 in 1-512 out, concurrency 8, reuse none",)


def test_on_the_same_server_only_slices_with_new_numbers_are_rebuilt():
    old = raw_record()
    extra = raw_record(tokens_in=4096)["slices"][0]
    new = {**old, "slices": [*old["slices"], extra]}
    link = signing.supersede(records.validate(new), records.validate(old)).supersedes
    assert link.changed == ("slice added: generate 1-4096 in 1-512 out, concurrency 8, reuse none",)
    assert link.rebuilt == ("generate 1-4096 in 1-512 out, concurrency 8, reuse none",)
