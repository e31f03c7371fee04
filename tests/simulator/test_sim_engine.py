"""The engine core on virtual time: what batches, what waits, what is preempted, and that it all repeats."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.simulator.config import ConfigError, CostModel, SimulatorConfig
from gateway.simulator.engine import Engine
from gateway.simulator.sequence import Event, Finish, Phase, Preempt, SequenceSpec, Step, Token

WORDS = tuple(range(100, 200))
SMALL = SimulatorConfig(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, block_size=4, num_blocks=64)


def spec(prompt: int, output: int, base: int = 0, **more: object) -> SequenceSpec:
    return SequenceSpec(prompt=tuple(range(base, base + prompt)), max_tokens=output, **more)  # type: ignore[arg-type]


def run(engine: Engine, now: float = 0.0, limit: int = 5000) -> list[Step]:
    steps: list[Step] = []
    while engine.has_work():
        assert len(steps) < limit, "the engine does not come to an end"
        steps.append(engine.step(now))
        now = steps[-1].ends_at
    return steps


def events(steps: list[Step]) -> list[Event]:
    return [event for step in steps for event in step.events]


def test_same_seed_same_trace_and_another_seed_another() -> None:
    def trace(seed: int) -> list[Step]:
        engine = Engine(replace(SMALL, seed=seed), WORDS)
        for number in range(12):
            engine.add(spec(10 + 7 * number, 5 + number, base=number, seed=seed + number), now=0.01 * number)
        return run(engine)

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


def test_a_sequence_makes_exactly_its_tokens_and_counts_add_up() -> None:
    engine = Engine(SMALL, WORDS)
    first, second = engine.add(spec(10, 3), 0.0), engine.add(spec(20, 7, base=50), 0.0)
    happened = events(run(engine))
    made = {seq: sum(isinstance(e, Token) and e.seq_id == seq for e in happened) for seq in (first, second)}
    assert made == {first: 3, second: 7}
    assert [e for e in happened if isinstance(e, Finish)] == [Finish(first, "length"), Finish(second, "length")]
    assert (engine.stats.prompt_tokens, engine.stats.generation_tokens, engine.stats.finished) == (30, 10, 2)
    assert engine.kv_usage == 0.0


def test_a_step_batches_decodes_so_that_more_sequences_cost_little_more() -> None:
    cost = CostModel(jitter=0.0)

    def seconds(sequences: int) -> float:
        engine = Engine(SimulatorConfig(cost=cost, max_num_seqs=16), WORDS)
        for number in range(sequences):
            engine.add(spec(8, 100, base=number), 0.0)
        return run(engine)[-1].ends_at

    one, eight, sixteen, seventeen = seconds(1), seconds(8), seconds(16), seconds(17)
    assert one < eight < sixteen < 1.5 * one, "a batch shares its steps"
    assert seventeen > 1.8 * one, "the seventeenth had to wait for a seat"


def test_seats_and_budget_are_never_exceeded_and_running_ones_come_first() -> None:
    engine = Engine(SMALL, WORDS)
    for number in range(20):
        engine.add(spec(50, 10, base=number), 0.0)
    now, longest = 0.0, 0
    while engine.has_work():
        step = engine.step(now)
        now = step.ends_at
        longest = max(longest, step.prefill_tokens + step.decode_seqs)
        assert engine.stats.running <= 4
    assert longest == 64, "the budget is used and not passed"
    assert engine.stats.peak_running == 4
    assert engine.stats.peak_in_flight == 20


def test_a_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    engine = Engine(SMALL, WORDS)
    engine.add(spec(4, 40), 0.0)
    engine.step(0.0)
    long = engine.add(spec(200, 2, base=500), 0.0)
    step = engine.step(0.1)
    sequence = engine.sequence(long)
    assert (step.prefill_tokens, step.decode_seqs) == (63, 1)
    assert sequence is not None
    assert sequence.phase is Phase.PREFILL
    steps = 1
    while sequence.phase is Phase.PREFILL:
        engine.step(0.2)
        steps += 1
    assert steps == 4, "63 tokens a step, the decode takes the 64th"


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    config = replace(SMALL, num_blocks=128, max_num_batched_tokens=256, enable_chunked_prefill=False)
    engine = Engine(config, WORDS)
    engine.add(spec(200, 2), 0.0)
    engine.add(spec(200, 2, base=300), 0.0)
    assert [step.prefill_tokens for step in run(engine)][:2] == [200, 200]


def test_when_blocks_run_out_the_youngest_is_recomputed_and_still_makes_its_tokens() -> None:
    config = replace(SMALL, max_model_len=96, num_blocks=24, enable_prefix_caching=False)
    engine = Engine(config, WORDS)
    ids = [engine.add(spec(20, 40, base=100 * number), 0.0) for number in range(3)]
    happened = events(run(engine))
    lost = {event.seq_id for event in happened if isinstance(event, Preempt)}
    assert lost
    assert ids[0] not in lost, "the oldest keeps its blocks"
    assert engine.stats.preemptions == sum(isinstance(event, Preempt) for event in happened)
    made = {seq: sum(isinstance(e, Token) and e.seq_id == seq for e in happened) for seq in ids}
    assert made == dict.fromkeys(ids, 40)
    assert engine.kv_usage == 0.0


def test_abort_frees_blocks_and_seat_at_once_and_late_news_changes_nothing() -> None:
    engine = Engine(SMALL, WORDS)
    ids = [engine.add(spec(20, 50, base=100 * number), 0.0) for number in range(5)]
    engine.step(0.0)
    assert engine.stats.running == 4
    before = engine.kv_usage
    assert engine.abort(ids[0])
    assert engine.kv_usage < before
    assert not engine.abort(ids[0])
    assert engine.abort(ids[4]), "a waiting one too"
    assert (engine.stats.in_flight, engine.stats.aborted) == (3, 2)
    assert not any(getattr(event, "seq_id", 0) in (ids[0], ids[4]) for event in events(run(engine)))


def test_prefix_cache_saves_prefill_and_a_salt_keeps_callers_apart() -> None:
    engine = Engine(SMALL, WORDS)
    engine.add(spec(40, 1), 0.0)
    cold = run(engine)[0].prefill_tokens
    engine.add(spec(40, 1), 1.0)
    warm = run(engine, 1.0)[0].prefill_tokens
    engine.add(spec(40, 1, salt=9), 2.0)
    salted = run(engine, 2.0)[0].prefill_tokens
    assert (cold, warm, salted) == (40, 4, 40), "whole blocks are reused, the last one is computed"
    assert engine.stats.prefix_hits == 36
    off = Engine(replace(SMALL, enable_prefix_caching=False), WORDS)
    off.add(spec(40, 1), 0.0)
    run(off)
    off.add(spec(40, 1), 1.0)
    assert run(off, 1.0)[0].prefill_tokens == 40


def test_a_paused_sequence_keeps_its_seat_and_makes_nothing() -> None:
    engine = Engine(SMALL, WORDS)
    stuck, other = engine.add(spec(8, 5), 0.0), engine.add(spec(8, 5, base=90), 0.0)
    engine.step(0.0)
    engine.pause(stuck)
    assert not any(isinstance(e, Token) and e.seq_id == stuck for e in events(run(engine)))
    assert engine.sequence(other) is None
    assert (engine.stats.running, engine.has_work()) == (1, False)
    engine.pause(stuck, paused=False)
    run(engine)
    assert engine.stats.finished == 2


def test_eos_script_and_pooling_end_where_they_should() -> None:
    engine = Engine(SMALL, WORDS)
    engine.add(spec(8, 50, eos_after=3), 0.0)
    engine.add(spec(8, 50, base=20, eos_after=2, script=(7, 9)), 0.0)
    engine.add(spec(8, 0, base=40), 0.0)
    happened = events(run(engine))
    assert sorted((e.seq_id, e.reason) for e in happened if isinstance(e, Finish)) == [(1, "stop"), (2, "stop"), (3, "length")]
    assert [e.token for e in happened if isinstance(e, Token) and e.seq_id == 2] == [7, 9]
    assert not any(isinstance(e, Token) and e.seq_id == 3 for e in happened)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_blocks": 4},
        {"max_num_seqs": 0},
        {"speed": 0.0},
        {"enable_chunked_prefill": False},
        {"served_model_names": ()},
    ],
)
def test_a_configuration_that_could_not_serve_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SimulatorConfig(**bad)  # type: ignore[arg-type]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 30), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(1, 30), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.booleans())
def test_nothing_leaks_whatever_happens(operations: list[tuple[str, int, int, int]], caching: bool) -> None:
    config = replace(SMALL, max_model_len=96, num_blocks=26, enable_prefix_caching=caching)
    engine = Engine(config, WORDS)
    now = 0.0
    for name, first, second, third in operations:
        if name == "add":
            engine.add(spec(first, second, base=40 * third), now)
        elif name == "abort":
            engine.abort(first)
        else:
            now = engine.step(now).ends_at
        assert 0.0 <= engine.kv_usage <= 1.0
        stats = engine.stats
        assert stats.running <= config.max_num_seqs
        assert stats.started == stats.in_flight + stats.finished + stats.aborted
    run(engine, now)
    assert (engine.kv_usage, engine.stats.in_flight) == (0.0, 0)
