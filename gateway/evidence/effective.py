"""The effective configuration of a running vLLM, as a document that can be hashed.

Owns: which fields of vLLM's configuration shape capacity, under which names, and how they become canonical JSON.
Promises: only the fields named here leave the process (keys and tokens are never among them); a field that this vLLM
does not have is the value "unknown", never a default; numbers with a fraction are decimal strings; ports, addresses,
ranks, process ids and the results of start-up profiling stay out of the document. Standard library only.
Talks to: the objects on `app.state` that vLLM put there (`vllm_config`, `args`), read by attribute name.
"""

import enum
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path, PurePath

from gateway.evidence import model_files
from gateway.evidence.model_files import UNKNOWN
from gateway.evidence.plain_json import MAX_SAFE_INT, Json, digest

CONFIGURATION_SCHEMA = "plimsoll-configuration/v1"

# group -> field -> attribute path from vllm_config. `None` on the way means "not configured" and gives None.
FIELDS: dict[str, dict[str, str]] = {
    "model": {
        "id": "model_config.model",
        "dtype": "model_config.dtype",
        "quantization": "model_config.quantization",
        "max_model_len": "model_config.max_model_len",
        "tokenizer": "model_config.tokenizer",
        "tokenizer_mode": "model_config.tokenizer_mode",
        "runner": "model_config.runner_type",
        "convert": "model_config.convert_type",
        "model_impl": "model_config.model_impl",
        "hf_overrides": "model_config.hf_overrides",
        "generation_config": "model_config.generation_config",
        "override_generation_config": "model_config.override_generation_config",
        "logits_processors": "model_config.logits_processors",
        "max_logprobs": "model_config.max_logprobs",
        "logprobs_mode": "model_config.logprobs_mode",
        "load_format": "load_config.load_format",
        "structured_outputs_backend": "structured_outputs_config.backend",
        "reasoning_parser": "structured_outputs_config.reasoning_parser",
        "pooling_type": "model_config.pooler_config.pooling_type",
        "media_limit_per_prompt": "model_config.multimodal_config.limit_per_prompt",
        "media_processor_kwargs": "model_config.multimodal_config.mm_processor_kwargs",
        "media_processor_cache_gb": "model_config.multimodal_config.mm_processor_cache_gb",
    },
    "parallelism": {
        "tensor_parallel_size": "parallel_config.tensor_parallel_size",
        "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
        "data_parallel_size": "parallel_config.data_parallel_size",
        "prefill_context_parallel_size": "parallel_config.prefill_context_parallel_size",
        "decode_context_parallel_size": "parallel_config.decode_context_parallel_size",
        "enable_expert_parallel": "parallel_config.enable_expert_parallel",
        "enable_eplb": "parallel_config.enable_eplb",
        "enable_elastic_ep": "parallel_config.enable_elastic_ep",
        "enable_dbo": "parallel_config.enable_dbo",
        "all2all_backend": "parallel_config.all2all_backend",
        "disable_custom_all_reduce": "parallel_config.disable_custom_all_reduce",
        "distributed_executor_backend": "parallel_config.distributed_executor_backend",
        "nodes": "parallel_config.nnodes",
        "api_processes": "parallel_config._api_process_count",
    },
    "scheduler": {
        "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
        "max_num_scheduled_tokens": "scheduler_config.max_num_scheduled_tokens",
        "max_num_seqs": "scheduler_config.max_num_seqs",
        "max_num_active_seqs": "scheduler_config.max_num_active_seqs",
        "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
        "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
        "policy": "scheduler_config.policy",
        "max_num_queued_reqs": "scheduler_config.max_num_queued_reqs",
        "max_num_queued_tokens": "scheduler_config.max_num_queued_tokens",
        "async_scheduling": "scheduler_config.async_scheduling",
        "stream_interval": "scheduler_config.stream_interval",
        "scheduler_cls": "scheduler_config.scheduler_cls",
        "watermark": "scheduler_config.watermark",
        "prefill_schedule_interval": "scheduler_config.prefill_schedule_interval",
    },
    "cache": {
        "block_size": "cache_config.block_size",
        "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
        "cache_dtype": "cache_config.cache_dtype",
        "enable_prefix_caching": "cache_config.enable_prefix_caching",
        "prefix_caching_hash_algo": "cache_config.prefix_caching_hash_algo",
        "kv_cache_memory_bytes": "cache_config.kv_cache_memory_bytes",
        "num_gpu_blocks_override": "cache_config.num_gpu_blocks_override",
        "sliding_window": "cache_config.sliding_window",
        "kv_offloading_size_gib": "cache_config.kv_offloading_size",
        "kv_offloading_backend": "cache_config.kv_offloading_backend",
        "offload_backend": "offload_config.offload_backend",
        "cpu_offload_gb": "offload_config.uva.cpu_offload_gb",
        "kv_connector": "kv_transfer_config.kv_connector",
        "kv_role": "kv_transfer_config.kv_role",
    },
    "compilation": {
        "enforce_eager": "model_config.enforce_eager",
        "optimization_level": "optimization_level",
        "performance_mode": "performance_mode",
        "mode": "compilation_config.mode",
        "backend": "compilation_config.backend",
        "cudagraph_mode": "compilation_config.cudagraph_mode",
        "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
        "custom_ops": "compilation_config.custom_ops",
        "attention_backend": "attention_config.backend",
        "moe_backend": "kernel_config.moe_backend",
        "linear_backend": "kernel_config.linear_backend",
    },
    "speculation": {
        "method": "speculative_config.method",
        "model": "speculative_config.model",
        "revision": "speculative_config.revision",
        "num_speculative_tokens": "speculative_config.num_speculative_tokens",
        "draft_tensor_parallel_size": "speculative_config.draft_tensor_parallel_size",
        "quantization": "speculative_config.quantization",
        "prompt_lookup_max": "speculative_config.prompt_lookup_max",
        "prompt_lookup_min": "speculative_config.prompt_lookup_min",
    },
    "lora": {
        "max_lora_rank": "lora_config.max_lora_rank",
        "max_loras": "lora_config.max_loras",
        "max_cpu_loras": "lora_config.max_cpu_loras",
        "fully_sharded_loras": "lora_config.fully_sharded_loras",
        "lora_dtype": "lora_config.lora_dtype",
        "target_modules": "lora_config.target_modules",
    },
}

# Environment variables that shape capacity. One that is not set is left out: absence means "not set".
ENVIRONMENT = frozenset(
    """
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_BATCH_INVARIANT VLLM_COMPILE_CACHE_SAVE_FORMAT
    VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
    VLLM_DISABLED_KERNELS VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_PYNCCL VLLM_ENABLE_V1_MULTIPROCESSING VLLM_FLOAT32_MATMUL_PRECISION
    VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_KV_CACHE_LAYOUT VLLM_MARLIN_USE_ATOMIC_ADD
    VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_N_SEQUENCES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MLA_DISABLE VLLM_MOE_USE_DEEP_GEMM
    VLLM_PLUGINS VLLM_PP_LAYER_PARTITION VLLM_ROCM_USE_AITER VLLM_ROCM_USE_SKINNY_GEMM VLLM_SERVER_DEV_MODE VLLM_TARGET_DEVICE
    VLLM_USE_AOT_COMPILE VLLM_USE_DEEP_GEMM VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_HW_AGNOSTIC
    VLLM_USE_NCCL_SYMM_MEM VLLM_USE_RUST_FRONTEND VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WORKER_MULTIPROC_METHOD VLLM_XGRAMMAR_CACHE_MB OMP_NUM_THREADS MKL_NUM_THREADS LD_PRELOAD
    """.split()
)
PACKAGES = ("vllm", "torch", "transformers", "tokenizers", "triton", "flashinfer-python", "xgrammar")


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
    model = document["model"]
    assert isinstance(model, dict)
    model.update(_model_facts(vllm_config, args))
    lora = document["lora"]
    assert isinstance(lora, dict)
    lora["adapters"] = _static_adapters(args)
    document["environment"] = {name: os.environ[name] for name in sorted(ENVIRONMENT) if name in os.environ}
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
    tokenizer = resolve(vllm_config, "model_config.tokenizer")
    same = tokenizer == resolve(vllm_config, "model_config.model")
    own = directory if same else model_files.model_dir(str(tokenizer), None)
    weights: Json = model_files.weights_digest(directory) if directory is not None else UNKNOWN
    tokenizer_files = model_files.digests(own, model_files.TOKENIZER_FILES)
    content: dict[str, Json] = {"files": files, "tokenizer_files": tokenizer_files, "weights": weights}
    revision = commit or (digest(content) if directory is not None else UNKNOWN)
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
    directory = Path(path)
    if not directory.is_dir():
        return {"name": name, "files": UNKNOWN}
    config = model_files.file_digest(directory / "adapter_config.json")
    return {"name": name, "files": {"adapter_config.json": config, "weights": model_files.weights_digest(directory)}}


def _group(document: Mapping[str, Json], name: str) -> dict[str, Json]:
    group = document.get(name)
    return group if isinstance(group, dict) else {}


def read_versions() -> dict[str, Json]:
    """Versions of vLLM, the libraries that shape its speed, the CUDA build and Python. "unknown" where not told."""
    found: dict[str, Json] = {name: _version(name) for name in PACKAGES}
    if found["vllm"] == UNKNOWN:
        found["vllm"] = getattr(sys.modules.get("vllm"), "__version__", UNKNOWN)
    found["cuda"] = plain(resolve(sys.modules.get("torch"), "version.cuda"))
    found["python"] = platform.python_version()
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
