"""Who vouches for a record, and which record it replaces.

Owns: Ed25519 keys, signatures over a record's canonical bytes, the sidecar `<id>.sig.json`, and `supersede`.
Promises: a signature is checked against the record itself, never against a stated id alone; a signer that is not in the given
list counts for nothing; private keys are read and written as PKCS#8 PEM and appear in no message.
Talks to: `cryptography`; `record` and `identity` for what is signed and what changed. No file is opened here.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import PlimsollError
from gateway.evidence.canonical import CanonicalError, canonical, parse
from gateway.evidence.identity import IDENTITY_FIELDS, diff
from gateway.evidence.record import Hex, Record, Slice, Supersedes, dump, record_id

MAX_SIGNATURE_BYTES = 64 * 1024
PUBLIC_KEY_PATTERN = r"^ed25519:[0-9a-f]{64}$"


class SignatureError(PlimsollError):
    """A key or signature cannot be used, or does not hold; the message says which and why."""


class Signature(NamedTuple):
    """One signer's word: the public key as `ed25519:<64 hex>`, the signature as 128 hex digits."""

    public_key: str
    signature: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    public_key: Annotated[str, Field(pattern=PUBLIC_KEY_PATTERN)]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class _Sidecar(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal["capacity-evidence-signatures/v1"] = Field(alias="schema")
    record: Hex
    signatures: Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=64)]


def new_key() -> tuple[bytes, str]:
    """A new key: (private key as PEM, public key as text)."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, _public_text(key)


def sign(record: Record, private_pem: bytes) -> Signature:
    """Sign the record's canonical bytes. Raises `SignatureError` when the PEM is not an Ed25519 private key."""
    try:
        key = serialization.load_pem_private_key(private_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SignatureError("the private key is not an unencrypted PEM key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError("the private key is not an Ed25519 key")
    return Signature(_public_text(key), key.sign(dump(record)).hex())


def written(signature: Signature) -> str:
    """A signature as one line of text."""
    return f"{signature.public_key} {signature.signature}"


def read_signature(line: str) -> Signature:
    """A signature from its line. Raises `SignatureError`. It is not verified yet."""
    key, _, value = line.strip().partition(" ")
    try:
        entry = _Entry(public_key=key, signature=value)
    except ValidationError as error:
        raise SignatureError("a signature is ed25519:, 64 hex digits, a blank and 128 hex digits") from error
    return Signature(entry.public_key, entry.signature)


def holds(record: Record, signature: Signature) -> bool:
    """Whether this signature is one over this record."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key.removeprefix("ed25519:")))
        key.verify(bytes.fromhex(signature.signature), dump(record))
    except (InvalidSignature, ValueError):
        return False
    return True


def require(record: Record, signatures: Iterable[Signature], trusted: Iterable[str]) -> str:
    """The trusted public key that signed the record. Raises `SignatureError` when none of `trusted` did."""
    wanted, given = frozenset(trusted), tuple(signatures)
    if not given:
        raise SignatureError("the record is not signed")
    for signature in given:
        if signature.public_key in wanted and holds(record, signature):
            return signature.public_key
    if any(signature.public_key in wanted for signature in given):
        raise SignatureError("a trusted key's signature does not hold for this record")
    raise SignatureError("the record is not signed by a trusted key")


def dump_signatures(identity: str, signatures: Iterable[Signature]) -> bytes:
    """The sidecar's bytes."""
    entries = [signature._asdict() for signature in signatures]
    return canonical({"schema": "capacity-evidence-signatures/v1", "record": identity, "signatures": entries})


def load_signatures(identity: str, raw: bytes) -> tuple[Signature, ...]:
    """The signatures in a sidecar of the record `identity`. Raises `SignatureError`. They are not verified yet."""
    try:
        sidecar = _Sidecar.model_validate(parse(raw, limit=MAX_SIGNATURE_BYTES))
    except (CanonicalError, ValidationError) as error:
        raise SignatureError(f"not a signature file: {str(error).splitlines()[0]}") from error
    if sidecar.record != identity:
        raise SignatureError("the signature file belongs to another record")
    return tuple(Signature(entry.public_key, entry.signature) for entry in sidecar.signatures)


def supersede(new: Record, old: Record) -> Record:
    """`new`, saying that it replaces `old`: which fields changed, and which evidence was rebuilt for that.

    `changed`: identity and configuration fields by dotted name, and slices that came or went. `rebuilt`: when anything in
    the identity changed, every slice of the new record; else the slices whose levels are not the old ones.
    """
    names = [name for name in IDENTITY_FIELDS if getattr(new.identity, name) != getattr(old.identity, name)]
    fields = [change.field for change in diff(old.configuration, new.configuration)]
    before, after = ({_box(each): each for each in record.slices} for record in (old, new))
    moved = [f"slice added: {name}" for name in after if name not in before]
    moved += [f"slice dropped: {name}" for name in before if name not in after]
    same_server = not names and not fields
    rebuilt = [name for name, each in after.items() if not (same_server and before.get(name) == each)]
    return new.model_copy(
        update={
            "supersedes": Supersedes(
                record=record_id(old), changed=(*names, *fields, *sorted(moved)), rebuilt=tuple(sorted(rebuilt))
            )
        }
    )


def _box(each: Slice) -> str:
    extra = "".join(f"+{feature}" for feature in each.features)
    return (
        f"{each.task}{extra} {each.input_tokens.min}-{each.input_tokens.max} in "
        f"{each.output_tokens.min}-{each.output_tokens.max} out, concurrency {each.concurrency.max}, reuse {each.prefix_reuse}"
    )


def _public_text(key: Ed25519PrivateKey) -> str:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return "ed25519:" + raw.hex()
