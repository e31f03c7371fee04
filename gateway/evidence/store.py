"""The directory of records: write-once files named by their digest.

Owns: `<64 hex>.json` (a record), `<64 hex>.sig.json` (its signatures), and the files of raw samples beside them.
Promises: a file is whole or not there, at whatever instant the writer is killed (a hidden temporary file is synced, then renamed,
and the directory synced); writing the same record again changes nothing; a name that holds other content is refused and never
overwritten; one bad file is refused with its reason and the others still load. No locks: equal names mean equal bytes.
Talks to: the file system; `record` for meaning, `signing` for signatures. Sub-directories are not read.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gateway.errors import PlimsollError
from gateway.evidence.record import MAX_RECORD_BYTES, Record, RecordError, dump, load, record_id
from gateway.evidence.signing import MAX_SIGNATURE_BYTES, Signature, SignatureError, dump_signatures, load_signatures

_RECORD_NAME = re.compile(r"([0-9a-f]{64})\.json")
_SIGNATURE_NAME = re.compile(r"([0-9a-f]{64})\.sig\.json")
_STALE_TEMPORARY_S = 3600


class StoreError(PlimsollError):
    """The store cannot be read or written; the message names the file and the reason."""


class StoreConflict(StoreError):
    """The name of a record already holds other content."""


class Stamp(NamedTuple):
    """What tells, cheaply, that a file is the one that was read: time of change, size, inode."""

    mtime_ns: int
    size: int
    inode: int


class RefusedFile(NamedTuple):
    """A file that is no usable record, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a directory held: usable records by id, their signatures by id, refused files, and the stamps it was read at."""

    records: Mapping[str, Record] = field(default_factory=dict)
    signatures: Mapping[str, tuple[Signature, ...]] = field(default_factory=dict)
    refused: tuple[RefusedFile, ...] = ()
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


class RecordStore:
    """Records in one directory. Every method does blocking I/O: call it in a thread from an event loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def scan(self) -> dict[str, Stamp]:
        """A stamp for each file that may matter. Equal scans mean that nothing changed. Raises `StoreError`."""
        found = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                            stat = entry.stat()
                            found[entry.name] = Stamp(stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError as error:
            raise StoreError(f"{self.directory}: {error.strerror or error}") from error
        return found

    def load(self, previous: StoreReport | None = None) -> StoreReport:
        """Everything in the directory. Files whose stamp is as in `previous` are not read again.

        Returns `previous` itself when nothing changed. Raises `StoreError` when the directory cannot be listed.
        """
        stamps = self.scan()
        if previous is not None and previous.stamps == stamps:
            return previous
        known = previous or StoreReport()
        old_refused = {each.name: each for each in known.refused}
        records: dict[str, Record] = {}
        signatures: dict[str, tuple[Signature, ...]] = {}
        refused: list[RefusedFile] = []
        for name in sorted(stamps):
            unchanged = known.stamps.get(name) == stamps[name]
            if unchanged and name in old_refused:
                refused.append(old_refused[name])
                continue
            try:
                if match := _SIGNATURE_NAME.fullmatch(name):
                    signatures[match[1]] = known.signatures[match[1]] if unchanged else self._read_signatures(match[1])
                else:
                    identity = name.removesuffix(".json")
                    records[identity] = known.records[identity] if unchanged else self._read(name)
            except (RecordError, SignatureError, StoreError) as error:
                refused.append(RefusedFile(name, str(error)))
        return StoreReport(records, signatures, tuple(refused), stamps)

    def get(self, identity: str) -> Record:
        """One record by its id. Raises `StoreError` or `RecordError`."""
        return self._read(f"{identity}.json")

    def put(self, record: Record) -> str:
        """Write a record, once; returns its id. Raises `StoreConflict` when the name holds other content."""
        identity, raw = record_id(record), dump(record)
        path = self.directory / f"{identity}.json"
        existing = self._bytes(path, MAX_RECORD_BYTES) if path.exists() else None
        if existing is not None:
            if existing != raw and not _same_record(existing, identity):
                raise StoreConflict(f"{path.name}: the file is there and holds other content")
            return identity
        self._write(path, raw)
        return identity

    def put_signature(self, identity: str, signature: Signature) -> None:
        """Add a signature beside a record; one that is there already stays."""
        path = self.directory / f"{identity}.sig.json"
        existing = self._read_signatures(identity) if path.exists() else ()
        if signature not in existing:
            self._write(path, dump_signatures(identity, (*existing, signature)))

    def put_samples(self, name: str, raw: bytes) -> str:
        """Write a file of raw samples, once; returns the 64 hex digits of its digest. Raises `StoreConflict`."""
        path, found = self.directory / name, hashlib.sha256(raw).hexdigest()
        if path.exists():
            if _file_hash(path) != found:
                raise StoreConflict(f"{name}: the file is there and holds other content")
            return found
        self._write(path, raw)
        return found

    def check_samples(self, record: Record) -> str | None:
        """Why the raw samples of a record cannot be relied on; None when they are there and whole, or were never named."""
        if record.samples is None:
            return None
        try:
            found = _file_hash(self.directory / record.samples.file)
        except OSError as error:
            return f"{record.samples.file}: {error.strerror or error}"
        return None if found == record.samples.sha256 else f"{record.samples.file}: the digest is not the one in the record"

    def _read(self, name: str) -> Record:
        match = _RECORD_NAME.fullmatch(name)
        if match is None:
            raise StoreError("the name is not 64 hex digits and .json: a record is named by its digest")
        record = load(self._bytes(self.directory / name, MAX_RECORD_BYTES))
        actual = record_id(record)
        if actual != match[1]:
            raise StoreError(f"the content is record {actual[:16]}: it was changed, or the file renamed")
        return record

    def _read_signatures(self, identity: str) -> tuple[Signature, ...]:
        return load_signatures(identity, self._bytes(self.directory / f"{identity}.sig.json", MAX_SIGNATURE_BYTES))

    def _bytes(self, path: Path, limit: int) -> bytes:
        try:
            with path.open("rb") as handle:
                raw = handle.read(limit + 1)
        except OSError as error:
            raise StoreError(f"{path.name}: {error.strerror or error}") from error
        if len(raw) > limit:
            raise StoreError(f"{path.name}: more than {limit} bytes")
        return raw

    def _write(self, path: Path, raw: bytes) -> None:
        temporary = self.directory / f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            with temporary.open("xb") as handle:
                handle.write(raw)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
            _sync_directory(self.directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StoreError(f"{path.name}: {error.strerror or error}") from error

    def _sweep(self) -> None:
        """Remove what killed writers left behind, long after any of them could still be writing."""
        oldest = time.time() - _STALE_TEMPORARY_S
        for left in self.directory.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < oldest:
                    left.unlink()


def _same_record(raw: bytes, identity: str) -> bool:
    """Whether other bytes (indented, say) are still the record of that id."""
    try:
        return record_id(load(raw)) == identity
    except RecordError:
        return False


def _file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
