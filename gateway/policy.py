"""The policy file: what an operator writes, checked whole before any of it takes effect.

Every model is frozen and refuses unknown keys. Relative paths are relative to the file. Nothing here
opens a socket; `load` reads one YAML file and returns a `Policy` or raises `PolicyError` naming the field.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gateway.policy_base import Digest, Name, PolicyError, Positive, Seconds
from gateway.policy_oidc import Oidc

__all__ = ["Oidc", "Policy", "PolicyError", "load", "parse"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerTLS(_Section):
    """TLS towards clients: PEM files; `client_ca` asks every client for a certificate of that authority."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class BackendTLS(_Section):
    """TLS towards a backend: its own authority, the name to check and send as SNI."""

    ca: Path | None = None
    server_name: str | None = None
    certificate: Path | None = None
    key: Path | None = None


class Server(_Section):
    listen: str = "127.0.0.1:8080"
    admin_listen: str | None = "127.0.0.1:8081"
    tls: ServerTLS | None = None
    max_body_bytes: Positive = 20_971_520
    max_connections: Positive = 20_000
    max_connections_per_address: Positive | None = None
    body_timeout_s: Seconds = 30
    keep_alive_s: Seconds = 75
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 30
    cors_origins: tuple[str, ...] = ()

    @field_validator("listen", "admin_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class State(_Section):
    url: str = "memory"
    degraded: Literal["closed", "share"] = "closed"
    namespace: Name = "plimsoll"
    lease_s: Seconds = 10

    @field_validator("url")
    @classmethod
    def _scheme(cls, value: str) -> str:
        if value != "memory" and urlsplit(value).scheme not in {"redis", "rediss", "unix"}:
            raise ValueError("state.url is 'memory' or a redis://, rediss:// or unix:// address")
        return value


class DeclaredIdentity(_Section):
    """An identity the operator vouches for; stock endpoints must agree with every field they show."""

    model_revision: str
    vllm_version: str
    server_configuration_hash: Digest
    hardware_profile: str
    configuration: dict[str, Any] = {}
    kv_cache_tokens: Positive | None = None


class Backend(_Section):
    url: str
    api_key_env: str | None = None
    api_key_file: Path | None = None
    identity: Literal["attested", "probed"] | DeclaredIdentity = "attested"
    tls: BackendTLS | None = None
    foreign: Literal["close", "count"] = "close"

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in {"http", "https", "http+unix"} or not parts.netloc:
            raise ValueError("a backend's url is http://, https:// or http+unix://%2Fpath%2Fto.sock")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("a backend's url holds no credentials, query or fragment")
        return value.rstrip("/")

    @property
    def source(self) -> Literal["attested", "declared", "probed"]:
        return self.identity if isinstance(self.identity, str) else "declared"


class TargetSlice(_Section):
    input: Positive
    output: Annotated[int, Field(ge=0, lt=2**53)]
    concurrency: Positive


class SLO(_Section):
    """Limits counted from dispatch; milliseconds, tokens/s and counts. None: not judged."""

    e2e_ms_p95: Annotated[float, Field(gt=0)] | None = None
    ttft_ms_p95: Annotated[float, Field(gt=0)] | None = None
    tpot_ms_p95: Annotated[float, Field(gt=0)] | None = None
    output_tokens_per_s_min: Annotated[float, Field(ge=0)] | None = None
    timeouts_max: Annotated[int, Field(ge=0)] = 0
    errors_max: Annotated[int, Field(ge=0)] = 0


class ArrivalSLO(_Section):
    """Limits counted from receipt of the request; milliseconds."""

    e2e_ms_p95: Annotated[float, Field(gt=0)] | None = None
    ttft_ms_p95: Annotated[float, Field(gt=0)] | None = None


class Target(_Section):
    slice: TargetSlice | None = None
    slo: SLO = SLO()
    arrival_slo: ArrivalSLO = ArrivalSLO()
    confidence: Annotated[float, Field(gt=0.5, lt=1)] | None = 0.95
    conditional: Literal["refuse", "admit"] = "refuse"
    require_signature: tuple[str, ...] | None = None
    prefix_reuse: tuple[str, ...] = ()  # regimes of reuse that production is known to have


class MediaRules(_Section):
    """What one image or second of audio counts as, and which hosts a media URL may name."""

    image_tokens: Positive | None = None
    audio_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    hosts: tuple[str, ...] = ()


class Model(_Section):
    backends: Annotated[tuple[Name, ...], Field(min_length=1)]
    upstream_model: str | None = None
    target: Target = Target()
    token_budget: Literal["attested"] | Positive | None = "attested"
    allow_fields: tuple[str, ...] = ()
    media: Literal["refuse"] | MediaRules = "refuse"
    tokenizer: Path | None = None  # a directory with tokenizer.json, for backends that hand none out


class Timeouts(_Section):
    queue_s: Seconds | None = None
    connect_s: Seconds = 2
    first_token_s: Seconds = 60
    stall_s: Seconds = 30
    execution_s: Seconds = 600
    client_write_s: Seconds = 30


class PriorityClass(_Section):
    priority: Annotated[int, Field(ge=0, le=100)]


class Queue(_Section):
    max_requests: Annotated[int, Field(ge=0)] = 1000
    max_tokens: Positive | None = None
    classes: dict[Name, PriorityClass] = {"interactive": PriorityClass(priority=0), "batch": PriorityClass(priority=1)}


class Breaker(_Section):
    window_s: Seconds = 30
    min_requests: Positive = 10
    failure_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    consecutive_failures: Positive = 5
    cooldown_s: Seconds = 10
    probes: Positive = 1


class Retries(_Section):
    budget_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    budget_min_per_s: Annotated[float, Field(ge=0)] = 1


class Tenant(_Section):
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1
    class_: Name = Field(default="interactive", alias="class")
    models: tuple[str, ...] = ("*",)
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    max_in_flight: Positive | None = None

    def may_use(self, model: str) -> bool:
        return "*" in self.models or model in self.models


class Key(_Section):
    id: Name
    hash: Digest
    role: Literal["client", "operator", "scraper", "prober"]
    tenant: Name | None = None
    expires: dt.datetime | None = None

    @model_validator(mode="after")
    def _tenant_belongs_to_clients(self) -> Self:
        if (self.tenant is not None) != (self.role == "client"):
            raise ValueError("a key of role client names its tenant; other roles name none")
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError("expires needs a time zone, for example 2027-01-01T00:00:00Z")
        return self


class Journal(_Section):
    path: str | None = "-"


class Audit(_Section):
    """Where operators' actions are written, one JSON line each; null: the process's log."""

    path: Path | None = None


class Tracing(_Section):
    otlp_endpoint: str | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01


class Policy(_Section):
    """The whole file. `source` is where it was read from; relative paths have been resolved against it."""

    server: Server = Server()
    records: Path = Path("../records")
    state: State = State()
    enforcement: Literal["enforce", "observe"] = "enforce"
    backends: dict[Name, Backend]
    models: dict[Name, Model]
    timeouts: Timeouts = Timeouts()
    queue: Queue = Queue()
    breaker: Breaker = Breaker()
    retries: Retries = Retries()
    tenants: dict[Name, Tenant] = {}
    keys: tuple[Key, ...] = ()
    oidc: Oidc | None = None
    journal: Journal = Journal()
    audit: Audit = Audit()
    tracing: Tracing = Tracing()

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        for name, model in self.models.items():
            for backend in model.backends:
                if backend not in self.backends:
                    raise ValueError(f"models.{name}.backends names {backend!r}, which is not in backends")
        for name, tenant in self.tenants.items():
            if tenant.class_ not in self.queue.classes:
                raise ValueError(f"tenants.{name}.class is {tenant.class_!r}, which is not in queue.classes")
        seen: set[str] = set()
        digests: set[str] = set()
        for key in self.keys:
            if key.tenant is not None and key.tenant not in self.tenants:
                raise ValueError(f"keys: {key.id!r} names tenant {key.tenant!r}, which is not in tenants")
            if key.id in seen:
                raise ValueError(f"keys: the id {key.id!r} stands twice")
            if key.hash in digests:
                raise ValueError(f"keys: {key.id!r} repeats the hash of another key")
            seen.add(key.id)
            digests.add(key.hash)
        urls: dict[str, str] = {}
        for name, server in self.backends.items():
            if server.url in urls:
                raise ValueError(
                    f"backends.{name} has the url of backends.{urls[server.url]}: one server would be counted as two"
                )
            urls[server.url] = name
        return self


def split_address(value: str) -> tuple[str, int]:
    """`host:port` to its parts; IPv6 in brackets. Raises ValueError with the expected form."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+)):(\d{1,5})", value)
    if not found or int(found[3]) > 65_535:
        raise ValueError("an address is host:port, for example 127.0.0.1:8080 or [::1]:8080")
    if found[1]:
        ipaddress.IPv6Address(found[1])
    return found[1] or found[2], int(found[3])


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key standing twice in one mapping, which YAML libraries silently merge."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, *, base: Path, name: str = "policy") -> Policy:
    """Check `text` as a policy whose relative paths are relative to the folder `base`. Raises PolicyError."""
    try:
        raw = yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise PolicyError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise PolicyError(f"{name}: a policy is a mapping of sections, not {type(raw).__name__}")
    try:
        policy = Policy.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(p) for p in e['loc']) or 'policy'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors(include_url=False)
        ]
        raise PolicyError(f"{name}: " + "; ".join(lines)) from error
    resolved: Policy = _resolve(policy, base)
    return resolved


def load(path: Path) -> Policy:
    """Read and check a policy file. Raises PolicyError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}") from error
    return parse(text, base=path.absolute().parent, name=str(path))  # of the link, where the file is one (a ConfigMap)


def _resolve(value: Any, base: Path) -> Any:
    """The same value with every relative Path (and the journal's file) made absolute against `base`."""
    if isinstance(value, Journal):
        return value if value.path in (None, "-") else value.model_copy(update={"path": str(base / str(value.path))})
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _resolve(getattr(value, name), base) for name in type(value).model_fields})
    if isinstance(value, Path):
        return (base / value).resolve() if not value.is_absolute() else value
    if isinstance(value, dict):
        return {key: _resolve(item, base) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_resolve(item, base) for item in value)
    return value
