"""The lab: eight small records with a known verdict, to learn the rules from and to hold the evaluator to them.

Owns: the fixtures in `records/lab/`, made here from two configurations of one invented model, and the table of `plimsoll lab`.
Promises: deterministic, no server, no clock (each fixture has its own `now`). `python -m gateway.evidence.lab [DIRECTORY]`
writes the files again. Config A: one accelerator, context 8192, 8 sequences. Config B: two, 16384, 16 sequences.
Talks to: `verdict`, through the same types as everything else.
"""

import copy
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gateway import policy
from gateway.errors import PlimsollError
from gateway.evidence.canonical import digest
from gateway.evidence.identity import ObservedIdentity, identity_of
from gateway.evidence.record import ALL_TRIGGERS, ASSUMPTION, RecordError, instant, validate
from gateway.evidence.target import Target
from gateway.evidence.verdict import Verdict, evaluate

Json = dict[str, Any]
NOW = "2026-02-01T00:00:00Z"
FIELDS = tuple(Verdict.__dataclass_fields__)[:8]


class LabError(PlimsollError):
    """A fixture cannot be used; the message names it and the reason."""


class LabRow(NamedTuple):
    """One fixture: what was expected, the verdict that came out, and what it teaches."""

    name: str
    expected: dict[str, str]
    verdict: Verdict
    explanation: str

    @property
    def agrees(self) -> bool:
        """Whether all eight fields are as expected."""
        return self.verdict.fields == self.expected


def run_lab(directory: Path | None = None) -> tuple[LabRow, ...]:
    """Evaluate the fixtures in `directory` (sorted by name), or the built-in ones. Raises `LabError`."""
    return tuple(run_fixture(fixture) for fixture in (fixtures() if directory is None else _read(directory)))


def run_fixture(fixture: Json) -> LabRow:
    """Evaluate one fixture. Raises `LabError` when it is not one."""
    name = str(fixture.get("name"))
    try:
        record = validate(fixture["record"])
        document = fixture["observed"]["configuration"]
        observed = ObservedIdentity(
            source=fixture["observed"]["source"],
            identity=identity_of(document, digest(document)),
            document=document,
            kv_cache_tokens=fixture["observed"]["kv_cache_tokens"],
        )
        target = Target.from_policy(policy.Target.model_validate(fixture["target"]))
        verdict = evaluate(record, observed, target, instant(fixture["now"]))
        return LabRow(name, fixture["expected"], verdict, fixture["explanation"])
    except (KeyError, TypeError, ValueError, RecordError) as error:
        raise LabError(f"{name}: not a lab fixture: {error}") from error


def fixtures() -> tuple[Json, ...]:
    """The eight fixtures, in the order of the rules they teach."""
    return (
        _fixture("01-valid-baseline", "Everything is known, measured, inside and met: PASS, for this slice and no other."),
        _fixture(
            "02-beyond-concurrency",
            "The same server is asked for 12 at once; 8 were measured. Nothing is extrapolated: DEFER.",
            target=_target(2048, 512, 12),
            expected={"slice_state": "OUTSIDE", "service_state": "NOT_EVALUATED", **_defer("OUT_OF_SLICE", retest=True)},
        ),
        _fixture(
            "03-changed-configuration",
            "One scheduler limit was raised. The server still answers, but it is not the one that was measured: DEFER.",
            observed=_observed(_with(_config_a(), "scheduler", max_num_seqs=16)),
            expected={"provenance_state": "MISMATCH", **_NOT_JUDGED, **_defer("IDENTITY_CHANGED", retest=True)},
        ),
        _fixture(
            "04-incomplete-provenance",
            "The record does not say which revision of the model ran, so its numbers belong to nothing: DEFER.",
            record=_with(_record(), "identity", model_revision=None),
            expected={"provenance_state": "INCOMPLETE", **_NOT_JUDGED, **_defer("PROVENANCE_INCOMPLETE", retest=False)},
        ),
        _fixture(
            "05-unknown-warmup",
            "Nobody knows whether the server was warm. An omitted warm-up may be stated; an unknown one is not enough: DEFER.",
            record=_with(_record(), "protocol", warmup_state="unknown", warmup_requests=None),
            expected={"measurement_state": "WARMUP_UNKNOWN", **_NOT_JUDGED, **_defer("WARMUP_UNKNOWN", retest=True)},
        ),
        _fixture(
            "06-slo-missed",
            "The estimate of the p95 is under the limit, its upper bound is over it; the target asks for the bound: DEFER.",
            record=_slow(_record()),
            expected={"service_state": "MISSED", **_defer("SLO_MISSED", retest=True)},
        ),
        _fixture(
            "07-missing-boundary-note",
            "The capacity is proven; what the API key covers is not written down. That is no benchmark failure: CONDITIONAL.",
            record={**_record(), "security_boundary_note": None},
            expected={
                "security_boundary_state": "MISSING",
                "final_decision": "CONDITIONAL",
                "reason_class": "BOUNDARY_NOTE_MISSING",
            },
        ),
        _fixture(
            "08-transfer",
            "The same revision with twice the context, two accelerators and more at once is another server: DEFER, measure it.",
            observed=_observed(config_b()),
            target=_target(4096, 1024, 12),
            expected={"provenance_state": "MISMATCH", **_NOT_JUDGED, **_defer("IDENTITY_CHANGED", retest=True)},
        ),
    )


def write(directory: Path) -> tuple[Path, ...]:
    """Write the fixture files; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for fixture in fixtures():
        path = directory / f"{fixture['name']}.json"
        path.write_text(fixture_text(fixture), encoding="utf-8")
        paths.append(path)
    return tuple(paths)


def fixture_text(fixture: Json) -> str:
    """A fixture as the file holds it."""
    return json.dumps(fixture, indent=1, ensure_ascii=False) + "\n"


def _read(directory: Path) -> Iterable[Json]:
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise LabError(f"{directory}: no fixtures here")
    for path in paths:
        try:
            yield json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise LabError(f"{path.name}: {error}") from error


_PASS = {
    "provenance_state": "COMPLETE",
    "measurement_state": "COMPLETE",
    "slice_state": "INSIDE",
    "service_state": "MET",
    "security_boundary_state": "RECORDED",
    "retest_state": "NOT_REQUIRED",
    "final_decision": "PASS",
    "reason_class": "QUALIFIED",
}
_NOT_JUDGED = {"slice_state": "NOT_EVALUATED", "service_state": "NOT_EVALUATED"}


def _defer(reason: str, *, retest: bool) -> dict[str, str]:
    required = "REQUIRED" if retest else "NOT_REQUIRED"
    return {"retest_state": required, "final_decision": "DEFER", "reason_class": reason}


def _fixture(
    name: str,
    explanation: str,
    *,
    record: Json | None = None,
    observed: Json | None = None,
    target: Json | None = None,
    expected: dict[str, str] | None = None,
) -> Json:
    return {
        "name": name,
        "explanation": explanation,
        "now": NOW,
        "target": target or _target(2048, 512, 8),
        "observed": observed or _observed(_config_a()),
        "record": record or _record(),
        "expected": {**_PASS, **(expected or {})},
    }


def _target(tokens_in: int, tokens_out: int, concurrency: int) -> Json:
    return {
        "slice": {"input": tokens_in, "output": tokens_out, "concurrency": concurrency},
        "slo": {"e2e_ms_p95": 1800, "output_tokens_per_s_min": 120, "timeouts_max": 0, "errors_max": 0},
        "confidence": 0.95,
    }


def _observed(document: Json) -> Json:
    return {"source": "attested", "configuration": document, "kv_cache_tokens": 65536}


def _config_a() -> Json:
    return {
        "schema": "plimsoll-configuration/v1",
        "model": {"id": "atlas-7b", "revision": "3f1c9a7e", "dtype": "bfloat16", "quantization": None, "max_model_len": 8192},
        "parallelism": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "scheduler": {"max_num_batched_tokens": 8192, "max_num_seqs": 8, "enable_chunked_prefill": True, "policy": "fcfs"},
        "cache": {"block_size": 16, "gpu_memory_utilization": "0.9", "cache_dtype": "auto", "enable_prefix_caching": True},
        "versions": {"vllm": "0.32.0"},
        "hardware": {"profile": "1 x Example Accelerator (80 GiB)"},
    }


def config_b() -> Json:
    """The other configuration of the same revision."""
    document = _with(_config_a(), "model", max_model_len=16384)
    document = _with(document, "parallelism", tensor_parallel_size=2)
    document = _with(document, "scheduler", max_num_batched_tokens=16384, max_num_seqs=16)
    return _with(document, "hardware", profile="2 x Example Accelerator (80 GiB)")


def _record() -> Json:
    return record_for(_config_a(), 2048, 512, 8)


def record_for(document: Json, tokens_in: int, tokens_out: int, concurrency: int) -> Json:
    """A sound record of an attested server: two levels of one slice, every statistic well inside the lab's target."""
    identity = identity_of(document, digest(document))
    half, full = _level(max(1, concurrency // 2), 1110), _level(concurrency, 1640)
    box: Json = {
        "task": "generate",
        "features": [],
        "prefix_reuse": "none",
        "input_tokens": {"min": 1, "max": tokens_in},
        "output_tokens": {"min": 1, "max": tokens_out},
        "concurrency": {"min": 1, "max": concurrency},
        "observed_input_tokens": {"min": 1, "max": tokens_in},
        "observed_output_tokens": {"min": 1, "max": tokens_out},
        "levels": [half, full],
    }
    return {
        "schema": "capacity-evidence-record/v1",
        "identity": {
            "model_revision": identity.model_revision,
            "vllm_version": identity.vllm_version,
            "server_configuration_hash": identity.server_configuration_hash,
            "hardware_profile": identity.hardware_profile,
        },
        "configuration": document,
        "capabilities": {"continuous_batching": True, "chunked_prefill": True, "prefix_caching": True},
        "protocol": {
            "tool": "lab fixture",
            "started_at": "2026-01-15T09:00:00Z",
            "warmup_state": "completed",
            "warmup_requests": 32,
            "arrival": "closed_loop",
            "dataset": "random_uniform",
            "seed": 7,
            "repeats": 3,
            "path": "direct",
            "kv_cache_tokens": 65536,
            "confidence": "0.95",
            "identity_source": "attested",
            "assumptions": [ASSUMPTION],
        },
        "slices": [box],
        "samples": None,
        "security_boundary_note": {
            "api_key_covers": "paths under /v1; metrics, tokenizing and /invocations answer without a key",
            "external_boundary": "the server listens on a private network; the gateway is the only way in",
        },
        "retest_triggers": list(ALL_TRIGGERS),
        "valid_until": "2026-07-15T00:00:00Z",
        "supersedes": None,
    }


def _level(concurrency: int, p95: int) -> Json:
    return {
        "concurrency": concurrency,
        "requests": 1200,
        "errors": 0,
        "timeouts": 0,
        "e2e_ms": {"p50": "900", "p95": str(p95), "p99": str(p95 + 80), "p95_upper": str(p95 + 31)},
        "ttft_ms": {"p50": "80", "p95": "140", "p95_upper": "146"},
        "queue_ms": {"p50": "1", "p95": "6"},
        "queue_source": "vllm_metrics",
        "output_tokens_per_s": "131.0",
        "output_tokens_per_s_lower": "127.5",
        "requests_per_s": "2.1",
    }


def _slow(record: Json) -> Json:
    changed = copy.deepcopy(record)
    changed["slices"][0]["levels"][-1]["e2e_ms"] = {"p50": "900", "p95": "1780", "p99": "1990", "p95_upper": "1835"}
    return changed


def _with(document: Json, group: str, **values: Any) -> Json:
    changed = copy.deepcopy(document)
    changed[group].update(values)
    return changed


if __name__ == "__main__":
    for written in write(Path(sys.argv[1] if len(sys.argv) > 1 else "records/lab")):
        print(written)
