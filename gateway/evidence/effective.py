"""The effective configuration of a running vLLM, as a document that can be hashed.

Owns: which fields of vLLM's configuration shape capacity, under which names, and how they become canonical JSON.
Promises: only the fields named here leave the process (keys and tokens are never among them); a field that this vLLM
does not have is the value "unknown", never a default; numbers with a fraction are decimal strings; ports, addresses,
ranks, process ids and the results of start-up profiling stay out of the document. Standard library only.
Talks to: the objects on `app.state` that vLLM put there (`vllm_config`, `args`), read by attribute name.
"""

import enum
import math
import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path, PurePath

from gateway.evidence import model_files
from gateway.evidence.fields import ENVIRONMENT, FIELDS, SERVING
from gateway.evidence.model_files import UNKNOWN
from gateway.evidence.plain_json import MAX_SAFE_INT, Json, digest

CONFIGURATION_SCHEMA = "plimsoll-configuration/v1"


def resolve(root: object, path: str) -> object:
    """Follow an attribute path; a missing attribute is "unknown", a None on the way is None."""
    value = root
    for name in path.split("."):
        if value is None:
            return None
        if not hasattr(value, name):
            return UNKNOWN
        value = getattr(value, name)
    return value


def plain(value: object) -> Json:
    """A configuration value as canonical JSON: decimals as text, enums by name, classes by dotted name.

    Anything without a stable text form (it might print an address) is "unknown".
    """
    match value:
        case enum.Enum():
            return str(value.name)
        case None | bool():
            return value
        case int():
            return int(value) if abs(value) <= MAX_SAFE_INT else str(value)
        case float():
            return format(Decimal(repr(value)), "f") if value == value and abs(value) != float("inf") else repr(value)
        case str():
            return str(value).encode("utf-8", "replace").decode("utf-8")
        case PurePath():
            return str(value)
        case list() | tuple():
            return [plain(item) for item in value]
        case set() | frozenset():
            return sorted((plain(item) for item in value), key=str)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else UNKNOWN


def configuration(
    vllm_config: object, args: object, versions: Mapping[str, Json], hardware: Mapping[str, Json]
) -> dict[str, Json]:
    """The configuration document: every group of `FIELDS`, the model's files, environment, versions and hardware."""
    document: dict[str, Json] = {"schema": CONFIGURATION_SCHEMA}
    for group, fields in FIELDS.items():
        document[group] = {name: plain(resolve(vllm_config, path)) for name, path in fields.items()}
    document["model"] = {**_group(document, "model"), **_model_facts(vllm_config, args)}
    document["lora"] = {**_group(document, "lora"), "adapters": _static_adapters(args)}
    if resolve(vllm_config, "parallel_config.enable_elastic_ep") is True:  # the size may change while the process lives
        document["parallelism"] = {**_group(document, "parallelism"), "data_parallel_size": UNKNOWN}
    document["speculation"] = {**_group(document, "speculation"), "files": _draft_files(vllm_config)}
    document["serving"] = {name: plain(getattr(args, name, UNKNOWN)) for name in SERVING}
    document["environment"] = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    document["versions"] = dict(versions)
    document["hardware"] = dict(hardware)
    return document


def identity_fields(document: Mapping[str, Json]) -> dict[str, Json]:
    """The four identity fields of a record, read out of a configuration document."""
    model, versions, hardware = (_group(document, name) for name in ("model", "versions", "hardware"))
    return {
        "model_revision": model.get("revision", UNKNOWN),
        "vllm_version": versions.get("vllm", UNKNOWN),
        "server_configuration_hash": digest(dict(document)),
        "hardware_profile": hardware.get("profile", UNKNOWN),
    }


def directory_of(vllm_config: object) -> Path | None:
    """Where the model's files are on this server, when that is known."""
    model = resolve(vllm_config, "model_config.model")
    return model_files.model_dir(model, _commit(vllm_config)) if isinstance(model, str) else None


def tokenizer_directory_of(vllm_config: object) -> Path | None:
    """Where the tokenizer's files are: the model's directory, or the tokenizer's own when another one was given."""
    tokenizer = resolve(vllm_config, "model_config.tokenizer")
    if tokenizer == resolve(vllm_config, "model_config.model"):
        return directory_of(vllm_config)
    commit = getattr(resolve(vllm_config, "model_config.tokenizer_revision"), "resolved", None)
    return model_files.model_dir(tokenizer, str(commit) if commit else None) if isinstance(tokenizer, str) else None


def device_count(vllm_config: object) -> int | None:
    """Accelerators in use: tensor x pipeline x data parallel ranks. None when one of them is not known."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = [resolve(vllm_config, f"parallel_config.{name}") for name in names]
    return math.prod(size for size in sizes if isinstance(size, int)) if all(isinstance(s, int) for s in sizes) else None


def api_processes(vllm_config: object) -> object:
    """How many processes serve the API of this engine; "unknown" where vLLM does not tell."""
    return resolve(vllm_config, "parallel_config._api_process_count")


def capabilities(vllm_config: object) -> dict[str, Json]:
    """What this runtime is able to do, whether or not it is switched on. A capability proves no capacity."""
    scheduler, cache = (getattr(vllm_config, name, None) for name in ("scheduler_config", "cache_config"))
    return {
        "continuous_batching": hasattr(scheduler, "max_num_seqs"),
        "chunked_prefill": hasattr(scheduler, "enable_chunked_prefill"),
        "prefix_caching": hasattr(cache, "enable_prefix_caching"),
        "priority_scheduling": hasattr(scheduler, "policy"),
        "speculative_decoding": hasattr(vllm_config, "speculative_config"),
        "lora": hasattr(vllm_config, "lora_config"),
    }


def runtime_facts(state: object) -> dict[str, Json]:
    """What may differ between two starts of one configuration: results of profiling, ranks, names, loaded adapters."""
    vllm_config = getattr(state, "vllm_config", None)
    paths = {
        "kv_cache_size_tokens": "cache_config.kv_cache_size_tokens",
        "num_gpu_blocks": "cache_config.num_gpu_blocks",
        "effective_block_size": "cache_config.effective_attention_block_size",
        "api_process_rank": "parallel_config._api_process_rank",
        "api_processes": "parallel_config._api_process_count",
        "vllm_instance_id": "instance_id",
        "served_model_name": "model_config.served_model_name",
    }
    facts = {name: plain(resolve(vllm_config, path)) for name, path in paths.items()}
    loaded = getattr(getattr(state, "openai_serving_models", None), "lora_requests", None)
    adapters: Json = [*sorted(map(str, loaded))] if isinstance(loaded, Mapping) else UNKNOWN
    return {**facts, "lora_adapters": adapters}


def given_template(args: object) -> str | None:
    """The chat template given on the command line (a path or the text), None when there is none."""
    template = getattr(args, "chat_template", None)
    return str(template) if template is not None else None


def _commit(vllm_config: object) -> str | None:
    commit = getattr(resolve(vllm_config, "model_config.revision"), "resolved", None)
    return str(commit) if commit else None


def _model_facts(vllm_config: object, args: object) -> dict[str, Json]:
    directory, commit = directory_of(vllm_config), _commit(vllm_config)
    files = model_files.digests(directory, model_files.CONFIG_FILES)
    weights: Json = model_files.weights_digest(directory) if directory is not None else UNKNOWN
    tokenizer_files = model_files.digests(tokenizer_directory_of(vllm_config), model_files.TOKENIZER_FILES)
    content: dict[str, Json] = {"files": files, "tokenizer_files": tokenizer_files, "weights": weights}
    told = "config.json" in files and UNKNOWN not in (*files.values(), *tokenizer_files.values(), weights)
    revision = commit or (digest(content) if told else UNKNOWN)
    return {
        **content,
        "commit": commit,
        "revision": revision,
        "chat_template_given": model_files.template_digest(given_template(args)),
        "default_sampling": _default_sampling(vllm_config),
    }


def _default_sampling(vllm_config: object) -> Json:
    read = getattr(getattr(vllm_config, "model_config", None), "get_diff_sampling_param", None)
    if not callable(read):
        return UNKNOWN
    try:
        return plain(read())
    except (OSError, ValueError, TypeError, AttributeError):
        return UNKNOWN


def _static_adapters(args: object) -> Json:
    modules = getattr(args, "lora_modules", None) or []
    return [_adapter(module) for module in modules]


def _adapter(module: object) -> Json:
    name, path = getattr(module, "name", None), getattr(module, "path", None)
    if not isinstance(name, str) or not isinstance(path, str):
        return UNKNOWN
    return {"name": name, "files": _artifact(Path(path), "adapter_config.json")}


def _draft_files(vllm_config: object) -> Json:
    """Digests of a draft model's files; None without one, "unknown" when it is not a directory on this server."""
    model = resolve(vllm_config, "speculative_config.model")
    return _artifact(Path(model), "config.json") if isinstance(model, str) else None


def _artifact(directory: Path, config: str) -> Json:
    if not directory.is_dir():
        return UNKNOWN
    return {config: model_files.file_digest(directory / config), "weights": model_files.weights_digest(directory)}


def _group(document: Mapping[str, Json], name: str) -> dict[str, Json]:
    group = document.get(name)
    return group if isinstance(group, dict) else {}
