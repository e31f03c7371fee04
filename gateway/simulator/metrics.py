"""The `vllm:` metrics of one engine, with vLLM's names, labels and buckets.

Owns a registry of its own, so that several simulators live in one process. Fed by the driver and read by GET /metrics.
Histograms are in seconds. Counters and gauges that the engine already keeps are set when they are read.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.engine import Engine

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model_name", "engine")


class EngineMetrics:
    """All series of one engine."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": config.served_model_names[0], "engine": "0"}
        self.running = self._gauge("num_requests_running", "Sequences in execution")
        self.waiting = self._gauge("num_requests_waiting", "Sequences waiting")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use")
        names = ("num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        self._counters = {name: self._counter(name) for name in names}
        self._seen = dict.fromkeys(names, 0)
        self._success = Counter("vllm:request_success", "Ended", (*_LABELS, "finished_reason"), registry=self._registry)
        self._rejections = Counter("vllm:admission_rejections", "Shed", (*_LABELS, "reason"), registry=self._registry)
        self.ttft = self._histogram("time_to_first_token_seconds", _TTFT)
        self.itl = self._histogram("inter_token_latency_seconds", _ITL)
        self.tpot = self._histogram("request_time_per_output_token_seconds", _ITL)
        self.e2e = self._histogram("e2e_request_latency_seconds", _LATENCY)
        self.queue = self._histogram("request_queue_time_seconds", _LATENCY)
        self.prefill = self._histogram("request_prefill_time_seconds", _LATENCY)
        self.decode = self._histogram("request_decode_time_seconds", _LATENCY)
        self.iteration_tokens = self._histogram("iteration_tokens_total", _ITERATION)
        self._cache_config(config)

    def ended(self, reason: str) -> None:
        """A sequence ended by itself; aborts are not counted, as in vLLM."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def rejected(self, reason: str) -> None:
        """A request was shed before it was queued."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def render(self, engine: Engine) -> bytes:
        """The text exposition, gauges and counters taken from the engine now."""
        stats = engine.stats
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_usage.set(engine.kv_usage)
        now = {
            "num_preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": stats.prefix_queries,
            "prefix_cache_hits": stats.prefix_hits,
        }
        for name, value in now.items():
            self._counters[name].inc(value - self._seen[name])
        self._seen = now
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(**self._labels)

    def _counter(self, name: str) -> Counter:
        return Counter(f"vllm:{name}", name, _LABELS, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", name, _LABELS, registry=self._registry, buckets=buckets).labels(**self._labels)

    def _cache_config(self, config: SimulatorConfig) -> None:
        labels = {
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": config.enable_prefix_caching,
            "engine": "0",
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_memory_bytes": None,
            "kv_cache_size_tokens": config.kv_cache_tokens,
            "num_gpu_blocks": config.num_blocks,
        }
        info = Gauge("vllm:cache_config_info", "Information of the cache configuration", tuple(labels), registry=self._registry)
        info.labels(**{name: str(value) for name, value in labels.items()}).set(1)
