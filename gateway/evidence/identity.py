"""Who a backend is: attested by its own process, declared by the operator, or probed from stock endpoints.

Owns: the identity types, the parsing of what a backend says about itself, and the comparison of two configurations.
Promises: pure functions over bytes already fetched; a hostile backend gets a typed error, never more; what is not known is
named in `unknown`, never filled with a default. An attested hash is recomputed here from the document that came with it.
Talks to: `canonical`. Fetching is in `identity_client`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gateway.errors import PlimsollError
from gateway.evidence.canonical import CanonicalError, digest, parse
from gateway.evidence.record import Trigger

Source = Literal["attested", "declared", "probed"]
UNKNOWN = "unknown"
MAX_IDENTITY_BYTES = 1024 * 1024
IDENTITY_SCHEMA = "plimsoll-identity/v1"
IDENTITY_FIELDS = ("model_revision", "vllm_version", "server_configuration_hash", "hardware_profile")
_MAX_TEXT = 4096


class IdentityError(PlimsollError):
    """What a backend says about itself cannot be used; the message says why."""


class FieldChange(NamedTuple):
    """A field that differs: its dotted name, the value that was expected and the value that is. Missing is None."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.old!r} -> {self.new!r}"


@dataclass(frozen=True, slots=True)
class Identity:
    """The four fields that name a measured server. None: not known."""

    model_revision: str | None = None
    vllm_version: str | None = None
    server_configuration_hash: str | None = None
    hardware_profile: str | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the fields that are not known."""
        return tuple(name for name in IDENTITY_FIELDS if getattr(self, name) is None)


@dataclass(frozen=True, slots=True)
class ObservedIdentity:
    """A backend as it is seen now.

    `document` is its configuration document (partial when declared or probed), `unknown` the fields nobody told,
    `contradictions` what stock endpoints show against a declaration (old: declared, new: shown).
    `kv_cache_tokens` is the engine's KV cache in tokens. In-flight counts are of one API process only.
    """

    source: Source
    identity: Identity
    document: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_tokens: int | None = None
    block_size: int | None = None
    engine_start_id: str | None = None
    started_at: str | None = None
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    served_models: tuple[str, ...] = ()
    api_processes: int | None = None
    api_process_rank: int | None = None
    foreign_in_flight: int | None = None
    gateway_in_flight: Mapping[str, int] = field(default_factory=dict)
    api_key_required: bool | None = None
    unknown: tuple[str, ...] = ()
    contradictions: tuple[FieldChange, ...] = ()

    @property
    def hash(self) -> str | None:
        """The server configuration hash, None when it is not known."""
        return self.identity.server_configuration_hash


def parse_attested(raw: bytes) -> ObservedIdentity:
    """The answer of GET /plimsoll/identity. Raises `IdentityError`.

    The hash is computed again from the document, and the four fields must be the ones the document holds.
    """
    try:
        payload = _mapping(parse(raw, limit=MAX_IDENTITY_BYTES), "identity payload")
        document = _mapping(payload.get("configuration"), "configuration")
        actual = digest(document)
    except CanonicalError as error:
        raise IdentityError(f"identity payload: {error}") from error
    if payload.get("schema") != IDENTITY_SCHEMA:
        raise IdentityError(f"identity payload: schema is not {IDENTITY_SCHEMA}")
    if payload.get("server_configuration_hash") != actual:
        raise IdentityError("identity payload: the stated hash is not the hash of its configuration")
    identity = identity_of(document, actual)
    runtime = _mapping(payload.get("runtime"), "runtime")
    return ObservedIdentity(
        source="attested",
        identity=identity,
        document=document,
        kv_cache_tokens=_count(runtime, "kv_cache_size_tokens", least=1),
        block_size=_count(_group(document, "cache"), "block_size", least=1),
        engine_start_id=_text(runtime.get("engine_start_id")),
        started_at=_text(runtime.get("started_at")),
        capabilities=_booleans(payload.get("capabilities")),
        served_models=_names(runtime.get("served_model_name")),
        api_processes=_count(runtime, "api_processes", least=1),
        api_process_rank=_count(runtime, "api_process_rank"),
        foreign_in_flight=_count(runtime, "foreign_in_flight"),
        gateway_in_flight=_counts(runtime.get("gateway_in_flight")),
        api_key_required=value if isinstance(value := runtime.get("api_key_required"), bool) else None,
        unknown=unknown_fields(document),
    )


def identity_of(document: Mapping[str, Any], hash_: str | None) -> Identity:
    """The four identity fields out of a configuration document whose hash is `hash_`."""
    return Identity(
        model_revision=_text(_group(document, "model").get("revision")),
        vllm_version=_text(_group(document, "versions").get("vllm")),
        server_configuration_hash=hash_,
        hardware_profile=_text(_group(document, "hardware").get("profile")),
    )


def unknown_fields(document: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of every field whose value is "unknown", sorted."""
    return tuple(sorted(name for name, value in _leaves(document) if value == UNKNOWN))


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Every field in which two documents differ, by dotted name, sorted. A field that one lacks is None there."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    names = sorted(before.keys() | after.keys())
    changes = (FieldChange(name, before.get(name), after.get(name)) for name in names)
    return tuple(change for change in changes if change.old != change.new or type(change.old) is not type(change.new))


def trigger_of(name: str) -> Trigger:
    """The retest trigger that a changed configuration field pulls."""
    group, _, rest = name.partition(".")
    if name in ("model.max_model_len", "max_model_len"):
        return "max_model_len"
    if name in ("versions.vllm", "vllm_version"):
        return "vllm_version"
    if name == "model_revision" or (group == "model" and rest.partition(".")[0] in _REVISION_FIELDS):
        return "model_revision"
    if group == "scheduler" and rest.startswith(("max_num_", "long_prefill")):
        return "batching_limits"
    if group == "parallelism":
        return "parallelism"
    if group in ("hardware", "hardware_profile"):
        return "hardware_profile"
    return "server_configuration_hash"


def triggers_of(changes: tuple[FieldChange, ...]) -> tuple[Trigger, ...]:
    """The triggers that a set of changes pulls, each once, sorted."""
    return tuple(sorted({trigger_of(change.field) for change in changes}))


_REVISION_FIELDS = frozenset(
    {"id", "revision", "commit", "files", "tokenizer", "tokenizer_files", "weights", "chat_template_given"}
)


def _leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise IdentityError(f"identity payload: {what} is not an object")
    return value


def _group(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value != UNKNOWN else None


def _count(values: Mapping[str, Any], name: str, least: int = 0) -> int | None:
    """A whole number of at least `least`; None when it is unknown, absent or below (vLLM ranks may be -1)."""
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _counts(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {name: count for name in value if (count := _count(value, name)) is not None}


def _booleans(value: Any) -> dict[str, bool]:
    return {name: flag for name, flag in value.items() if isinstance(flag, bool)} if isinstance(value, dict) else {}


def _names(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(name for name in values if _text(name) is not None)
