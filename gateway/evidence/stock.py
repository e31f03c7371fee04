"""Identities without the middleware: what stock endpoints show, and what an operator declares.

Owns: reading /version, /v1/models and vLLM's cache_config_info metric into a partial document, and checking a declared
identity against it.
Promises: pure functions over payloads; stock endpoints cannot show the model's commit, dtype, quantization, scheduler limits,
policy, speculation or hardware, so these are listed as unknown. A declared field that contradicts what is shown is reported.
Talks to: `identity`, `canonical`; the payloads are fetched by `identity_client`.
"""

import re
from collections.abc import Mapping
from typing import Any

from gateway.evidence.canonical import CanonicalError, parse
from gateway.evidence.identity import UNKNOWN, FieldChange, Identity, IdentityError, ObservedIdentity
from gateway.policy import DeclaredIdentity

MAX_STOCK_BYTES = 16 * 1024 * 1024
# What no stock endpoint shows. (Field names of the configuration document.)
NOT_SHOWN = (
    "hardware.profile",
    "model.dtype",
    "model.quantization",
    "model.revision",
    "parallelism.data_parallel_size",
    "parallelism.pipeline_parallel_size",
    "parallelism.tensor_parallel_size",
    "scheduler.enable_chunked_prefill",
    "scheduler.max_num_batched_tokens",
    "scheduler.max_num_seqs",
    "scheduler.policy",
    "speculation.method",
)
_CACHE_FIELDS = ("block_size", "gpu_memory_utilization", "cache_dtype", "enable_prefix_caching", "kv_cache_memory_bytes")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WORDS = {"True": True, "False": False, "None": None}


def probed(version: bytes | None, models: bytes | None, metrics: bytes | None) -> ObservedIdentity:
    """What the bodies of GET /version, /v1/models and /metrics tell; None for one that gave no answer.

    The hash is never known this way. Raises `IdentityError` on bodies that are not what vLLM sends.
    """
    labels = cache_labels(metrics) if metrics is not None else {}
    model = _first_model(_json(models)) if models is not None else {}
    told_version = _json(version).get("version") if version is not None else None
    document: dict[str, Any] = {
        "model": {"id": _known(model.get("root")), "max_model_len": _known(model.get("max_model_len"))},
        "cache": {name: labels.get(name, UNKNOWN) for name in _CACHE_FIELDS},
        "versions": {"vllm": _known(told_version)},
    }
    tokens, block = labels.get("kv_cache_size_tokens"), labels.get("block_size")
    unshown = [f"{group}.{name}" for group in document for name, value in document[group].items() if value == UNKNOWN]
    return ObservedIdentity(
        source="probed",
        identity=Identity(vllm_version=told_version if isinstance(told_version, str) else None),
        document=document,
        kv_cache_tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,
        block_size=block if isinstance(block, int) and block > 0 else None,
        served_models=tuple(name for name in (model.get("id"),) if isinstance(name, str)),
        unknown=tuple(sorted({*NOT_SHOWN, *unshown, "server_configuration_hash"})),
    )


def declared(stated: DeclaredIdentity, shown: ObservedIdentity) -> ObservedIdentity:
    """The operator's word for a backend, held against what its stock endpoints show (`shown`, from `probed`)."""
    contradictions = [
        FieldChange(f"{group}.{name}", theirs, value)
        for group, fields in shown.document.items()
        for name, value in fields.items()
        if value != UNKNOWN and (theirs := _stated(stated.configuration, group, name)) is not None and not _same(theirs, value)
    ]
    version = shown.identity.vllm_version
    if version is not None and version != stated.vllm_version:
        contradictions.append(FieldChange("vllm_version", stated.vllm_version, version))
    tokens = shown.kv_cache_tokens if shown.kv_cache_tokens is not None else stated.kv_cache_tokens
    return ObservedIdentity(
        source="declared",
        identity=Identity(
            model_revision=stated.model_revision,
            vllm_version=stated.vllm_version,
            server_configuration_hash=stated.server_configuration_hash,
            hardware_profile=stated.hardware_profile,
        ),
        document=stated.configuration,
        kv_cache_tokens=tokens,
        block_size=shown.block_size,
        served_models=shown.served_models,
        unknown=(),
        contradictions=tuple(contradictions),
    )


def cache_labels(metrics: bytes) -> dict[str, Any]:
    """The labels of `vllm:cache_config_info`, typed (text, whole number, boolean, None). Empty when it is not there."""
    if len(metrics) > MAX_STOCK_BYTES:
        raise IdentityError("metrics: too large")
    for line in metrics.decode("utf-8", "replace").splitlines():
        if line.startswith("vllm:cache_config_info{"):
            return {name: _typed(value) for name, value in _LABEL.findall(line)}
    return {}


def _typed(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else text


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = parse(raw, limit=MAX_STOCK_BYTES)
    except CanonicalError as error:
        raise IdentityError(f"stock endpoint: {error}") from error
    if not isinstance(value, dict):
        raise IdentityError("stock endpoint: not an object")
    return value


def _first_model(body: dict[str, Any]) -> dict[str, Any]:
    """The base model of a /v1/models answer: the first entry without a parent."""
    entries = body.get("data")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("parent") is None:
            return entry
    return {}


def _known(value: Any) -> Any:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else UNKNOWN


def _stated(configuration: Mapping[str, Any], group: str, name: str) -> Any:
    fields = configuration.get(group)
    value = fields.get(name) if isinstance(fields, Mapping) else None
    return None if value == UNKNOWN else value


def _same(stated: Any, shown: Any) -> bool:
    return str(stated) == str(shown)
