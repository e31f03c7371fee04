"""A record holds: its own slice, replayed through the gateway for two minutes, does not break its p95 bound.

The bound is broken when the share of answers beyond it is significantly over 5 % (one-sided binomial, alpha 0.01). The clock is
the caller's: from the request's last byte to the end of the answer, with what the gateway itself adds and any wait in its queue.

    python -m pytest -s -m 'live and slow' tests/live/test_replay_live.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from gateway.evidence.record import Slice, load
from gateway.forward.endpoint import Endpoint
from gateway.forward.upstream import Upstream
from gateway.qualify import sizes
from gateway.qualify.client import Job, Place
from gateway.qualify.load import Amount, Load, Wave
from gateway.qualify.plan import Cell, Limits, TokenRange
from gateway.qualify.prompts import Prompts, Vocabulary
from gateway.qualify.samples import RawSample
from tests.bench.overload import binomial_tail
from tests.live.harness import VllmServer
from tests.live.qualified import PLAN, gateway_before, qualify
from tests.support.attested import AttestedGateway
from tests.support.client import KEY

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
SECONDS = float(os.environ.get("PLIMSOLL_REPLAY_S", "120"))
ALPHA, SHARE_OVER_P95 = 0.01, 0.05
BURST_EVERY = 4


def plan(folder: Path) -> Path:
    """The live tests' plan at its highest level alone, over repeats that last: a bound cannot know moods it has not seen."""
    document = yaml.safe_load(PLAN.read_bytes())
    (cell,) = document["cells"]
    cell |= {"concurrency": cell["concurrency"][-1:], "min_seconds": SECONDS / 5, "max_seconds": SECONDS}
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(document | {"repeats": 5}), encoding="utf-8")
    return path


async def replay(gateway: AttestedGateway, box: Slice, seconds: float) -> list[RawSample]:
    """The mix that was measured, drawn anew over what the slice claims, as many at once as it allows."""
    cell = Cell(
        input_tokens=TokenRange(**box.input_tokens.model_dump()),
        output_tokens=TokenRange(**box.output_tokens.model_dump()),
        concurrency=(box.concurrency.max,),
    )
    upstream = Upstream(
        Endpoint.from_url(gateway.url), api_key=KEY.encode(), instance="replay", connect_timeout_s=5, attest=False, max_idle=64
    )
    prompts = Prompts("completions", "tiny", cell, Vocabulary.common(), f"replay/{time.time_ns()}")

    def job(size: sizes.Size, wave: int, lane: int) -> Job:
        request = upstream.request(prompts.path, b"replay-%d-%d" % (wave, lane), b"application/json", prompts.body(size))
        return Job(Place(0, cell.concurrency[0], 0, wave, lane), size, request)

    def wave(number: int, group: list[sizes.Size]) -> Wave:
        return [job(size, number, lane) for lane, size in enumerate(group)]

    waves = (wave(number, group) for number, group in enumerate(sizes.waves(cell, cell.concurrency[0], seed=23)))
    try:
        return await Load(upstream, Limits(), began=time.perf_counter()).closed(
            waves, BURST_EVERY, Amount(requests=1, min_seconds=seconds, max_seconds=seconds + 60)
        )
    finally:
        upstream.close()


async def test_a_slice_that_was_measured_holds_through_the_gateway(vllm_server: VllmServer, tmp_path: Path) -> None:
    measured = qualify(vllm_server, tmp_path, plan(tmp_path))
    (box,) = load(measured.raw).slices
    bound = box.levels[-1].e2e_ms.p95_upper
    assert bound is not None, "repeats that differ this much support no bound: the machine is too busy to measure on"
    async with gateway_before(vllm_server, tmp_path / "gateway", measured.raw) as gateway:
        samples = await replay(gateway, box, SECONDS)
    times = [sample.e2e_ms for sample in samples if sample.e2e_ms is not None]
    over = sum(each > float(bound) for each in times)
    chance = binomial_tail(over, len(times), SHARE_OVER_P95)
    print(
        f"\n{len(times)} answers in {SECONDS:g} s, {box.concurrency.max} at once; p95 was at most {float(bound):.0f} ms; "
        f"beyond it {over} ({over / len(times):.1%})\nso many or more by chance, were 5 % beyond it: {chance:.3g}; "
        f"broken below {ALPHA}"
    )
    assert len(times) == len(samples), [sample.detail for sample in samples if sample.status != "ok"][:3]
    assert chance >= ALPHA
