"""The load generator against a server: bursts, limits, late sending, and what each bad end is called."""

import asyncio
from itertools import islice

import pytest

from gateway.qualify import sizes
from gateway.qualify.bench import Bench, LevelKey
from gateway.qualify.client import Job, Place, clock
from gateway.qualify.load import Amount, Heartbeat, Load, Wave
from gateway.qualify.plan import Limits, Plan
from gateway.qualify.prompts import Prompts
from gateway.qualify.samples import RawSample
from gateway.qualify.session import Session
from gateway.simulator.server import SimulatorServer
from tests.qualify.support import FAST, Quiet, plan, session_on


def jobs(session: Session, chosen: Plan, concurrency: int, waves: int) -> list[Wave]:
    """Waves of jobs as a run makes them."""
    prompts = Prompts(chosen.route, session.model, chosen.cells[0], session.vocabulary, "load")
    made = []
    for wave, group in enumerate(islice(sizes.waves(chosen.cells[0], concurrency, 1), waves)):
        made.append([
            Job(Place(0, concurrency, 0, wave, wave * concurrency + lane), size,
                session.upstream.request(prompts.path, b"r", b"application/json", prompts.body(size)))
            for lane, size in enumerate(group)
        ])  # fmt: skip
    return made


async def send(
    session: Session, chosen: Plan, waves: list[Wave], burst: int | None = 4, limits: Limits | None = None
) -> list[RawSample]:
    load = Load(session.upstream, limits or chosen.timeouts, began=clock())
    return await load.closed(iter(waves), burst, Amount(sum(map(len, waves)), 0, 60))


async def test_a_burst_has_all_workers_in_flight_and_never_more() -> None:
    chosen = plan()
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        samples = await send(session, chosen, jobs(session, chosen, 6, 8))
        assert len(samples) == 48
        assert {sample.status for sample in samples} == {"ok"}
        assert sim.peak_in_flight == 6
        assert max(sample.in_flight for sample in samples) == 6
        for wave in (0, 4):  # each block begins with all dispatched in one turn: before any of them was answered
            burst = [sample for sample in samples if sample.wave == wave]
            assert max(s.sent_at for s in burst) < min(s.first_at or 0.0 for s in burst)
            assert sorted(s.in_flight for s in burst) == [1, 2, 3, 4, 5, 6]


async def test_lengths_are_enforced_and_the_servers_count_is_kept() -> None:
    chosen = plan()
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        for sample in await send(session, chosen, jobs(session, chosen, 3, 8)):
            assert (sample.input_tokens, sample.output_tokens) == (sample.asked_input, sample.asked_output)
            assert sum(events for _, events in sample.event_times) <= sample.asked_output
            assert 0 < (sample.ttft_ms or 0) <= (sample.e2e_ms or 0)


@pytest.mark.parametrize(
    ("fault", "status", "error"),
    [
        ("error500", "error", "status"),
        ("busy503", "error", "status"),
        ("stream_error;after=1", "error", "stream_error"),
        ("reset;after=1", "error", "truncated"),
        ("fin;after=1", "error", "truncated"),
    ],
)
async def test_a_broken_answer_is_an_error_of_its_kind(fault: str, status: str, error: str) -> None:
    chosen = plan(cell={"output_tokens": {"min": 4, "max": 8}})
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        await sim.set_fault(fault)
        samples = await send(session, chosen, jobs(session, chosen, 2, 2))
        assert {(sample.status, sample.error) for sample in samples} == {(status, error)}
        assert all(sample.e2e_ms is None and sample.output_tokens is None for sample in samples)


@pytest.mark.parametrize(
    ("fault", "limits", "detail"),
    [
        ("stall", Limits(first_token_s=0.2), "first_token_s"),
        ("stall;after=2", Limits(execution_s=0.3), "execution_s"),
    ],
)
async def test_a_limit_makes_a_timeout_and_frees_the_server(fault: str, limits: Limits, detail: str) -> None:
    chosen = plan(cell={"output_tokens": {"min": 6, "max": 8}})
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        await sim.set_fault(fault)
        samples = await send(session, chosen, jobs(session, chosen, 2, 1), limits=limits)
        assert [sample.status for sample in samples] == ["timeout", "timeout"]
        assert detail in (samples[0].detail or "")
        await sim.clear_faults()
        assert {sample.status for sample in await send(session, chosen, jobs(session, chosen, 2, 1))} == {"ok"}


async def test_a_server_that_is_gone_is_an_error_for_every_request() -> None:
    chosen = plan()
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        waves = jobs(session, chosen, 2, 2)
        await sim.stop()
        samples = await send(session, chosen, waves)
    assert {(sample.status, sample.error) for sample in samples} == {("error", "connect")}
    assert len(samples) == 4


async def test_an_open_loop_counts_the_wait_for_room() -> None:
    """No coordinated omission: what a slow server keeps waiting at the client is in the latency."""
    chosen = plan(cell={"output_tokens": {"min": 8, "max": 8}})
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        ready = [job for wave in jobs(session, chosen, 1, 30) for job in wave]
        load = Load(session.upstream, chosen.timeouts, began=clock())
        samples = await load.opened(ready, rate=10_000.0, cap=1, amount=Amount(30, 0, 60), seed=1)
    assert sim.peak_in_flight <= 1 or max(s.in_flight for s in samples) == 1
    ordered = sorted(samples, key=lambda sample: sample.sent_at)
    waits = [sample.sent_at - sample.intended_at for sample in ordered]
    service = [(s.last_at or 0) - s.sent_at for s in ordered]
    # All were due at once, and one is served at a time: the last waited for nearly all the others, and its latency says so.
    assert waits[-1] > 0.8 * sum(service[:-1])
    assert (ordered[-1].e2e_ms or 0) / 1000 == pytest.approx(waits[-1] + service[-1])


async def test_the_time_limit_of_a_level_ends_it() -> None:
    chosen = plan()
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        load = Load(session.upstream, chosen.timeouts, began=clock())
        samples = await load.closed(iter(jobs(session, chosen, 2, 500)), 1, Amount(1000, 0, 0.3))
        assert 0 < len(samples) < 1000


async def test_an_interrupted_run_leaves_nothing_in_flight() -> None:
    chosen = plan(cell={"output_tokens": {"min": 8, "max": 8}})
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        await sim.set_fault("stall;after=1")
        task = asyncio.create_task(send(session, chosen, jobs(session, chosen, 4, 4)))
        while sim.peak_in_flight < 4:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sim.clear_faults()
        async with asyncio.timeout(5):
            while sim.stats.running + sim.stats.waiting:
                await asyncio.sleep(0.005)


async def test_prompts_that_the_prefix_cache_served_make_a_part_void() -> None:
    """The same seed twice on one server must not be helped by the cache; a generator that repeats itself is caught."""
    chosen = plan(repeats=1, cell={"input_tokens": {"min": 64, "max": 64}, "concurrency": [2], "requests": 12, "batches": 6})
    async with SimulatorServer(FAST) as sim, session_on(sim, chosen) as session:
        key = LevelKey(0, 2)
        for _ in range(2):
            assert (await Bench(session, chosen, Quiet()).measure([key]))[key].void is None

        class Repeating(Bench):
            def _prompts(self, cell, seed):  # type: ignore[no-untyped-def]
                return Prompts("completions", "tiny", cell, session.vocabulary, "always the same", 0)

        quiet = Quiet()
        assert (await Repeating(session, chosen, quiet).measure([key]))[key].void is None
        found = (await Repeating(session, chosen, quiet).measure([key]))[key]
        assert found.void is not None
        assert "prefix cache" in found.void
        assert len(quiet.notes) == 2


async def test_the_heartbeat_sees_a_blocked_loop() -> None:
    async with Heartbeat() as heartbeat:
        await asyncio.sleep(0.03)
        end = clock() + 0.2
        while clock() < end:
            pass
        await asyncio.sleep(0.02)
    assert heartbeat.lag_ms > 100
