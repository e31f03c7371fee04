"""What one simulated server is configured with.

Owns `SimulatorConfig` and `CostModel`. Both are frozen and checked when they are made, so that a server that could
never finish a request (a context longer than its cache) does not start. Talks to nobody.
"""

from dataclasses import dataclass, field, fields
from typing import Any


class ConfigError(ValueError):
    """The configuration could not serve a single request, as vLLM itself would say at start-up."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds one engine step takes: base + prefill tokens + decoding sequences + KV tokens read + log-probabilities."""

    base_s: float = 0.009
    prefill_token_s: float = 0.000_05
    decode_seq_s: float = 0.000_2
    kv_token_s: float = 0.000_000_02
    logprobs_seq_s: float = 0.002
    jitter: float = 0.02

    def step_s(self, prefill_tokens: float, decode_seqs: int, kv_tokens: int, logprobs_seqs: int) -> float:
        """The time of one step in seconds, before jitter."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.kv_token_s * kv_tokens
            + self.logprobs_seq_s * logprobs_seqs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig:
    """One server's settings, named as vLLM names them. `speed` divides every modelled duration."""

    served_model_names: tuple[str, ...] = ("tiny",)
    max_num_seqs: int = 16
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int = 4096
    gpu_memory_utilization: float = 0.9
    dtype: str = "bfloat16"
    quantization: str | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    speed: float = 1.0
    cost: CostModel = CostModel()
    mean_output_tokens: int = 64
    sse_keep_alive_s: float | None = None
    start_delay_s: float = 0.0
    vllm_version: str = "0.32.0+sim"
    allow_control: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Refuse what vLLM refuses at start-up. Raises ConfigError."""
        sizes = (self.max_num_seqs, self.max_model_len, self.max_num_batched_tokens, self.block_size, self.num_blocks)
        if min(sizes) < 1 or not self.served_model_names:
            raise ConfigError("sizes are positive and a model has a name")
        if self.speed <= 0 or self.mean_output_tokens < 1:
            raise ConfigError("speed and mean_output_tokens are positive")
        if self.kv_cache_tokens < self.max_model_len:
            raise ConfigError(f"the KV cache holds {self.kv_cache_tokens} tokens, less than max_model_len {self.max_model_len}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError("without chunked prefill, max_num_batched_tokens must reach max_model_len")

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.block_size * self.num_blocks


def typed_changes(config: SimulatorConfig, changes: dict[str, str]) -> dict[str, Any]:
    """Read settings given as text by the type that they have now. Raises ConfigError."""
    known = {field.name for field in fields(config)} - {"cost", "api_keys", "served_model_names"}
    for name in changes:
        if name not in known:
            raise ConfigError(f"not a setting: {name}")
    try:
        return {name: _typed(getattr(config, name), text) for name, text in changes.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _typed(now: object, text: str) -> Any:
    match now:
        case bool():
            return text.lower() in ("1", "true", "yes")
        case int():
            return int(text)
        case float():
            return float(text)
        case None:
            return _number(text)
    return text


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
