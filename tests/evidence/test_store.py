"""The directory of records: written once, whole at any instant, and one bad file never hides the others."""

import json
import os
import random
import signal

import pytest

from gateway.evidence import record as records
from gateway.evidence import signing
from gateway.evidence.store import RecordStore, StoreConflict, StoreError
from tests.evidence.builders import edited, make_record, raw_record


def variant(number):
    return records.validate(edited(raw_record(), "protocol.seed", number))


@pytest.fixture
def store(tmp_path):
    return RecordStore(tmp_path / "records")


def test_what_is_put_is_read_back(store):
    record = make_record()
    identity = store.put(record)
    assert store.get(identity) == record
    assert store.load().records == {identity: record}


def test_the_same_record_again_changes_nothing(store):
    store.put(make_record())
    before = store.scan()
    store.put(make_record())
    assert store.scan() == before


def test_a_name_that_holds_other_content_is_refused_and_left_alone(store):
    identity = store.put(variant(1))
    path = store.directory / f"{identity}.json"
    path.write_bytes(records.dump(variant(2)))
    with pytest.raises(StoreConflict):
        store.put(variant(1))
    assert path.read_bytes() == records.dump(variant(2))


def test_another_layout_of_the_same_record_is_the_same_record(store):
    record = make_record()
    identity = store.put(record)
    path = store.directory / f"{identity}.json"
    path.write_text(json.dumps(records.as_json(record), indent=4))
    assert store.put(record) == identity
    assert store.load().records == {identity: record}


def _tamper(path):
    path.write_text(path.read_text().replace('"p95":"1640"', '"p95":"1040"'))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def _rename(path):
    path.rename(path.with_name("f" * 64 + ".json"))


def _misname(path):
    path.rename(path.with_name("my-record.json"))


def _empty(path):
    path.write_bytes(b"")


def _enlarge(path):
    path.write_bytes(b" " * (records.MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_tamper, "it was changed"),
        (_truncate, "not JSON"),
        (_rename, "renamed"),
        (_misname, "named by its digest"),
        (_empty, "not JSON"),
        (_enlarge, "more than"),
    ],
)
def test_a_damaged_record_is_refused_with_its_reason_and_the_rest_still_loads(store, damage, reason):
    good, bad = store.put(variant(1)), store.put(variant(2))
    damage(store.directory / f"{bad}.json")
    report = store.load()
    assert list(report.records) == [good]
    assert len(report.refused) == 1
    assert reason in report.refused[0].reason


def test_only_what_changed_is_read_again(store):
    first = store.put(variant(1))
    report = store.load()
    assert store.load(report) is report
    second = store.put(variant(2))
    newer = store.load(report)
    assert newer.records[first] is report.records[first]
    assert set(newer.records) == {first, second}
    (store.directory / f"{first}.json").unlink()
    assert set(store.load(newer).records) == {second}


def test_a_refused_file_that_is_repaired_loads(store):
    identity = store.put(variant(1))
    path = store.directory / f"{identity}.json"
    _truncate(path)
    report = store.load()
    path.write_bytes(records.dump(variant(1)))
    assert set(store.load(report).records) == {identity}


def test_other_files_and_folders_are_not_records(store):
    identity = store.put(variant(1))
    (store.directory / "lab").mkdir()
    (store.directory / "notes.txt").write_text("not one")
    (store.directory / ".hidden.json").write_text("{")
    report = store.load()
    assert set(report.records) == {identity}
    assert report.refused == ()


def test_a_directory_that_is_not_there_is_an_error_with_its_name(tmp_path):
    with pytest.raises(StoreError, match="nowhere"):
        RecordStore(tmp_path / "nowhere").load()


def test_a_store_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreError, match=r"\.json: "):
        RecordStore(tmp_path / "file").put(make_record())
    with pytest.raises(StoreError):
        RecordStore(tmp_path).get("0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_raw_samples_are_written_once_and_checked(store):
    digest = store.put_samples("run.jsonl.zst", b"samples")
    record = records.validate(edited(raw_record(), "samples", {"file": "run.jsonl.zst", "sha256": digest}))
    assert store.check_samples(record) is None
    assert store.put_samples("run.jsonl.zst", b"samples") == digest
    with pytest.raises(StoreConflict):
        store.put_samples("run.jsonl.zst", b"other samples")
    (store.directory / "run.jsonl.zst").write_bytes(b"sample")
    assert "digest" in store.check_samples(record)
    (store.directory / "run.jsonl.zst").unlink()
    assert "No such file" in store.check_samples(record)


def test_signatures_gather_beside_the_record(store):
    record = make_record()
    identity = store.put(record)
    signatures = [signing.sign(record, signing.new_key()[0]) for _ in range(2)]
    for signature in (*signatures, signatures[0]):
        store.put_signature(identity, signature)
    assert store.load().signatures == {identity: tuple(signatures)}
    (store.directory / f"{identity}.sig.json").write_text("{}")
    report = store.load()
    assert set(report.records) == {identity}
    assert report.refused[0].name == f"{identity}.sig.json"


def _write_for_ever(directory, start, acknowledge):
    """The child: put one record after another and tell the parent the id of each that was put."""
    store, raw = RecordStore(directory), raw_record()
    raw["retest_triggers"] *= 400  # large enough that a write takes a while
    number = start
    while True:
        number += 1
        os.write(acknowledge, store.put(records.validate(edited(raw, "protocol.seed", number))).encode())


def _killed_writer(directory, start, acks, spins):
    """Fork a writer, SIGKILL it somewhere after its first `acks` records; the ids that it had told of."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _write_for_ever(directory, start, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read(64 * acks)
        for _ in range(spins):  # somewhere inside the next write
            pass
        os.kill(child, signal.SIGKILL)
        told += pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return [told[at : at + 64].decode() for at in range(0, len(told), 64)]


def test_a_writer_killed_at_any_instant_leaves_whole_records_only(tmp_path):
    draw = random.Random(7)
    told = []
    for round_number in range(40):
        told += _killed_writer(tmp_path, round_number * 1000, 1 + round_number % 3, draw.randrange(200_000))
    report = RecordStore(tmp_path).load()
    assert report.refused == ()
    assert set(told) <= set(report.records)
    assert len(report.records) - len(told) <= 40  # at most one a round was written and not told
    for path in tmp_path.glob(".*.tmp"):
        os.utime(path, (0, 0))
    RecordStore(tmp_path).put(make_record())
    assert list(tmp_path.glob(".*.tmp")) == []
