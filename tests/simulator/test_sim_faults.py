"""Each fault, as a caller sees it on the wire."""

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.simulator.faults import Fault, FaultBoard, FaultError, FaultKind, fault_from, parse_fault
from gateway.simulator.server import SimulatorServer

BODY = {"model": "tiny", "prompt": "ship", "max_tokens": 30, "ignore_eos": True, "stream": True}
WHOLE = {**BODY, "stream": False}


def metric(text: str, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


async def raw_stream(sim: SimulatorServer, body: dict[str, object], seconds: float = 5.0) -> tuple[bytes, bool]:
    """Bytes that came, and whether the connection ended in a reset. Reads until the end or for `seconds`."""
    reader, writer = await asyncio.open_connection(sim.host, sim.port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(seconds):
            while part := await reader.read(65536):
                parts.append(part)
    except ConnectionResetError:
        return b"".join(parts), True
    except TimeoutError:
        pass
    finally:
        writer.close()
    return b"".join(parts), False


async def until(condition: object, seconds: float = 5.0) -> None:
    """Wait for a condition; fails when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_reset_mid_stream(sim: SimulatorServer) -> None:
    await sim.set_fault("reset;after=3")
    got, was_reset = await raw_stream(sim, BODY)
    assert was_reset
    assert got.count(b"data: ") <= 3
    assert b"[DONE]" not in got
    await until(lambda: sim.stats.in_flight == 0)


async def test_reset_before_the_answer(sim: SimulatorServer) -> None:
    await sim.set_fault("reset;times=1")
    assert await raw_stream(sim, BODY) == (b"", True)
    got, was_reset = await raw_stream(sim, BODY, 0.5)
    assert not was_reset, "one request was hit, the next is not"
    assert b"[DONE]" in got


async def test_fin_without_the_last_chunk(sim: SimulatorServer) -> None:
    await sim.set_fault("fin;after=3")
    got, was_reset = await raw_stream(sim, BODY)
    assert not was_reset
    assert got.count(b"data: ") == 3
    assert not got.endswith(b"0\r\n\r\n")
    await until(lambda: sim.stats.in_flight == 0)


@pytest.mark.parametrize("kind", ["fin", "reset"])
async def test_a_whole_answer_is_torn(sim: SimulatorServer, client: httpx.AsyncClient, kind: str) -> None:
    await sim.set_fault(f"{kind};after=0")
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        await client.post("/v1/completions", json=WHOLE)


@pytest.mark.parametrize("comments", [False, True])
async def test_stall_holds_the_sequence_and_comments_are_not_progress(sim: SimulatorServer, comments: bool) -> None:
    await sim.set_fault(f"stall;after=2;keepalive={int(comments)}")
    got, _ = await raw_stream(sim, BODY, seconds=1.3)
    assert got.count(b"data: ") == 2
    assert (b": keep-alive" in got) is comments
    assert sim.stats.generation_tokens < 30, "the engine did not go on either"
    await until(lambda: sim.stats.in_flight == 0)
    assert sim.stats.aborted == 1, "the caller left, the sequence was aborted"


async def test_a_stall_that_ends_loses_nothing(sim: SimulatorServer) -> None:
    await sim.set_fault("stall;after=2;seconds=0.1;times=1")
    got, _ = await raw_stream(sim, BODY, seconds=1.0)
    assert b"data: [DONE]" in got
    assert sim.stats.finished == 1


async def test_errors_on_request(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await sim.set_fault("error500;times=1")
    assert (await client.post("/v1/completions", json=WHOLE)).json()["error"]["code"] == 500
    await sim.set_fault("busy503;times=1")
    busy = await client.post("/v1/completions", json=WHOLE)
    assert busy.status_code == 503
    assert "retry-after" not in busy.headers
    assert (await client.post("/v1/completions", json=WHOLE)).status_code == 200


async def test_an_error_inside_a_stream_is_an_event_then_done(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await sim.set_fault("stream_error;after=2")
    reply = await client.post("/v1/completions", json=BODY)
    lines = [line for line in reply.text.splitlines() if line]
    assert reply.status_code == 200
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 500
    assert lines[-1] == "data: [DONE]"
    assert 'finish_reason":"' not in reply.text
    typed = await client.post(
        "/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
    )
    assert "event: error\ndata: " in typed.text
    assert "[DONE]" not in typed.text


async def test_a_silent_tool_parser_says_nothing_while_tokens_are_made(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await sim.set_fault("silent_tools;after=25")
    events = 0
    async with client.stream("POST", "/v1/completions", json=BODY) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                events += 1
                if events == 1:
                    assert sim.stats.generation_tokens >= 25
    assert events <= 6
    assert sim.stats.finished == 1


async def test_slow_prefill_costs_the_whole_engine_time(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    async def ttft() -> float:
        text = (await client.get("/metrics")).text
        return metric(text, "vllm:time_to_first_token_seconds_sum")

    long = {"prompt": "ship " * 400, "max_tokens": 1}
    await client.post("/v1/completions", json=long)
    plain = await ttft()
    await sim.set_fault("slow_prefill;factor=1000")
    await client.post("/v1/completions", json={**long, "cache_salt": "other"})
    assert await ttft() - plain > 100 * 1e-6 * 400, "the modelled time, not the clock of this machine"


async def test_a_frozen_engine_keeps_answering_health(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await sim.set_fault("freeze")
    waiting = asyncio.create_task(client.post("/v1/completions", json=WHOLE))
    await until(lambda: sim.stats.in_flight == 1)
    before = (await client.get("/metrics")).text
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200
    after = (await client.get("/metrics")).text
    count = "vllm:iteration_tokens_total_count"
    assert metric(before, count) == metric(after, count)
    assert metric(after, "vllm:num_requests_waiting") + metric(after, "vllm:num_requests_running") == 1
    await sim.clear_faults()
    assert (await waiting).status_code == 200


async def test_refuse_for_a_while(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    await client.get("/health")
    await sim.set_fault("refuse")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(sim.host, sim.port)
    assert (await client.get("/health")).status_code == 200, "an open connection lives on"
    await sim.clear_faults()
    async with httpx.AsyncClient() as fresh:
        assert (await fresh.get(sim.url + "/health")).status_code == 200
    await sim.set_fault("refuse;seconds=0.05")
    await until(lambda: sim._listener is not None)


async def test_control_routes_and_header(sim: SimulatorServer, client: httpx.AsyncClient) -> None:
    assert (await client.post("/sim/fault", json={"kind": "error500", "times": 1})).status_code == 200
    assert (await client.post("/v1/completions", json=WHOLE)).status_code == 500
    assert (await client.post("/sim/fault", content=b"nonsense")).status_code == 400
    assert (await client.post("/sim/fault", content=b"restart;no_such=1")).status_code == 400
    headers = {"x-sim-fault": "busy503"}
    assert (await client.post("/v1/completions", json=WHOLE, headers=headers)).status_code == 503
    await client.post("/sim/fault", json={"kind": "error500"})
    assert (await client.delete("/sim/fault")).status_code == 200
    assert (await client.post("/v1/completions", json=WHOLE)).status_code == 200
    assert (await client.get("/sim/stats")).json()["finished"] == 1


async def test_control_is_absent_unless_allowed() -> None:
    async with SimulatorServer() as plain, httpx.AsyncClient(base_url=plain.url) as http:
        assert (await http.post("/sim/fault", content=b"crash")).status_code == 404
        reply = await http.post("/v1/completions", json={**WHOLE, "max_tokens": 1}, headers={"x-sim-fault": "error500"})
        assert reply.status_code == 200


async def test_a_caller_that_leaves_is_aborted_within_a_step(sim: SimulatorServer) -> None:
    for body in (BODY, {**WHOLE, "max_tokens": 3000}, {**BODY, "max_tokens": 3000}):
        _, writer = await asyncio.open_connection(sim.host, sim.port)
        raw = json.dumps({**body, "max_tokens": 3000}).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
        await until(lambda: sim.stats.running == 1)
        began = sim.stats.iterations
        writer.close()
        await until(lambda: sim.stats.in_flight == 0)
        assert sim.stats.iterations - began < 1000
    assert sim.stats.aborted == 3
    assert sim.engine.kv_usage == 0.0


async def test_a_half_close_is_leaving_too(sim: SimulatorServer) -> None:
    _, writer = await asyncio.open_connection(sim.host, sim.port)
    raw = json.dumps({**BODY, "max_tokens": 3000}).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
    await until(lambda: sim.stats.running == 1)
    writer.write_eof()
    await until(lambda: sim.stats.aborted == 1)
    writer.close()


@given(
    st.builds(
        Fault,
        st.sampled_from(sorted(set(FaultKind) - {FaultKind.RESTART})),
        after=st.none() | st.integers(0, 99),
        seconds=st.none() | st.floats(0, 99),
        times=st.none() | st.integers(1, 9),
        factor=st.floats(1, 99),
        keepalive=st.booleans(),
    )
)
def test_a_fault_is_written_and_read_back(fault: Fault) -> None:
    names = ("after", "seconds", "times", "factor", "keepalive")
    named = {name: getattr(fault, name) for name in names if getattr(fault, name) is not None}
    text = ";".join([fault.kind, *(f"{name}={value}" for name, value in named.items())])
    assert parse_fault(text) == fault
    assert fault_from({"kind": fault.kind, **named}) == fault


@pytest.mark.parametrize("text", ["", "melt", "stall;after=x", "stall;colour=red", "freeze;max_num_seqs=3"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(FaultError):
        parse_fault(text)


def test_the_board_counts_and_replaces() -> None:
    board = FaultBoard()
    board.add(parse_fault("stall;times=2"))
    board.add(parse_fault("stall;after=1;times=1"))
    board.add(parse_fault("fin"))
    assert [fault.kind if (fault := board.draw()) else None for _ in range(3)] == ["stall", "fin", "fin"]
    board.clear()
    assert board.draw() is None
