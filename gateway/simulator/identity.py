"""The configuration objects that the identity middleware reads, with vLLM's attribute names.

Owns the mapping from `SimulatorConfig` to `vllm_config` and `args`, and what stands for versions and hardware. Promises: each
setting that shapes the simulated capacity shows in the document, the cost model included (it is the hardware here); ports and
addresses do not. Whatever else the middleware asks for is None, "not configured". Talks to `gateway.evidence`.
"""

import platform
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from gateway.evidence.fields import FIELDS
from gateway.evidence.plain_json import Json
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.tokens import TokenModel

_HIDDEN = ("model_config.served_model_name", "cache_config.num_gpu_blocks", "cache_config.kv_cache_size_tokens")


class _Node(SimpleNamespace):
    """An object tree made from dotted paths."""

    def put(self, path: str, value: object) -> None:
        """Set the attribute at `path`."""
        head, _, rest = path.partition(".")
        if not rest:
            setattr(self, head, value)
            return
        if getattr(self, head, None) is None:
            setattr(self, head, _Node())
        getattr(self, head).put(rest, value)


def vllm_config(config: SimulatorConfig, model: TokenModel) -> SimpleNamespace:
    """The object tree of vLLM's own `vllm_config`."""
    root = _Node()
    for path in [*(path for group in FIELDS.values() for path in group.values()), *_HIDDEN]:
        root.put(path, None)
    for path, value in _values(config, model).items():
        root.put(path, value)
    root.model_config.get_diff_sampling_param = dict
    return root


def _values(config: SimulatorConfig, model: TokenModel) -> dict[str, Any]:
    return {
        "model_config.model": str(model.directory),
        "model_config.tokenizer": str(model.directory),
        "model_config.served_model_name": config.served_model_names[0],
        "model_config.dtype": config.dtype,
        "model_config.quantization": config.quantization,
        "model_config.max_model_len": config.max_model_len,
        "model_config.enforce_eager": False,
        "model_config.revision": None,
        "model_config.tokenizer_revision": None,
        "load_config.load_format": "dummy",
        "parallel_config.tensor_parallel_size": config.tensor_parallel_size,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "parallel_config.enable_expert_parallel": False,
        "parallel_config.enable_elastic_ep": False,
        "parallel_config._api_process_count": 1,
        "parallel_config._api_process_rank": 0,
        "scheduler_config.max_num_batched_tokens": config.max_num_batched_tokens,
        "scheduler_config.max_num_seqs": config.max_num_seqs,
        "scheduler_config.enable_chunked_prefill": config.enable_chunked_prefill,
        "scheduler_config.long_prefill_token_threshold": config.long_prefill_token_threshold,
        "scheduler_config.policy": "fcfs",
        "scheduler_config.max_num_queued_reqs": config.max_num_queued_reqs,
        "scheduler_config.async_scheduling": False,
        "cache_config.block_size": config.block_size,
        "cache_config.gpu_memory_utilization": config.gpu_memory_utilization,
        "cache_config.cache_dtype": "auto",
        "cache_config.enable_prefix_caching": config.enable_prefix_caching,
        "cache_config.num_gpu_blocks": config.num_blocks,
        "cache_config.num_gpu_blocks_override": config.num_blocks,
        "cache_config.kv_cache_size_tokens": config.kv_cache_tokens,
    }


def server_args(config: SimulatorConfig) -> SimpleNamespace:
    """vLLM's parsed arguments, as far as they are read."""
    return SimpleNamespace(api_key=list(config.api_keys) or None, chat_template=None, lora_modules=None)


def versions(config: SimulatorConfig) -> dict[str, Json]:
    """The `versions` group of the document."""
    return {"vllm": config.vllm_version, "python": platform.python_version()}


def hardware(config: SimulatorConfig) -> dict[str, Json]:
    """The `hardware` group: the cost model is the machine."""
    facts: dict[str, Json] = {
        "device_type": "simulated",
        "device": "simulated accelerator",
        "devices": config.tensor_parallel_size,
        "speed": format(config.speed, "g"),
        "mean_output_tokens": config.mean_output_tokens,
        "cost": {name: format(value, "g") for name, value in asdict(config.cost).items()},
    }
    return {**facts, "profile": f"{config.tensor_parallel_size} x simulated accelerator (speed {config.speed:g})"}
