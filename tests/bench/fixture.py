"""Writes what the benchmark runs on: policy.yaml and the record beside it. `python -m tests.bench.fixture`

The configuration is that of the benchmark's stand-in server, declared in the policy; the slice is wide enough that the load
is never refused. The numbers in the record are of no real server.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import yaml

from gateway.evidence.canonical import digest
from gateway.evidence.lab import record_for
from gateway.evidence.record import dump, record_id, validate

HERE = Path(__file__).resolve().parent
KEY = "sk-bench"
KV_TOKENS = 2**24  # more than the whole slice reserves, so that the budget never decides
DOCUMENT = {
    "schema": "plimsoll-configuration/v1",
    "model": {"id": "tiny", "revision": "bench-1", "dtype": "float32", "quantization": None, "max_model_len": 4096},
    "parallelism": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
    "scheduler": {"max_num_batched_tokens": 8192, "max_num_seqs": 1024, "enable_chunked_prefill": True, "policy": "fcfs"},
    "cache": {"block_size": 16, "gpu_memory_utilization": "0.9", "cache_dtype": "auto", "enable_prefix_caching": True},
    "versions": {"vllm": "0.32.0"},
    "hardware": {"profile": "a stand-in without a model"},
}


def policy(identity: dict[str, str]) -> dict[str, object]:
    """Everything on: keys, admission against the record, metrics, the journal to a file."""
    return {
        "server": {"listen": "127.0.0.1:9200", "admin_listen": "127.0.0.1:9201"},
        "records": "records",
        "backends": {
            "a": {
                "url": "http://127.0.0.1:9100",
                "identity": {**identity, "configuration": DOCUMENT, "kv_cache_tokens": KV_TOKENS},
            }
        },
        "models": {
            "tiny": {
                "backends": ["a"],
                "target": {"conditional": "admit"},
                "tokenizer": "../../gateway/simulator/model",
            }
        },
        "tenants": {"bench": {}},
        "keys": [
            {"id": "bench", "hash": f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "role": "client", "tenant": "bench"}
        ],
        "journal": {"path": "journal.jsonl"},
    }


def main() -> None:
    raw = record_for(DOCUMENT, 3072, 1024, 2048)
    raw["protocol"] = {**raw["protocol"], "kv_cache_tokens": KV_TOKENS}
    record = validate({**raw, "valid_until": None})
    folder = HERE / "records"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    (folder / f"{record_id(record)}.json").write_bytes(dump(record))
    assert record.identity.server_configuration_hash == digest(DOCUMENT)
    text = yaml.safe_dump(policy(record.identity.model_dump()), sort_keys=False, width=120)
    header = "# What `make bench` measures. Written by tests/bench/fixture.py, with the record in records/.\n"
    (HERE / "policy.yaml").write_text(header + text, encoding="utf-8")


if __name__ == "__main__":
    main()
