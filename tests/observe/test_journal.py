from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Outcome, Reason
from gateway.flow.shape import Shape
from gateway.observe.journal import Journal, PlainLines, _encode, _row
from gateway.observe.sink import FileSink

from .build import exchange


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_tells_the_request(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "j"), wall=lambda: 1_700_000_001.2)
    journal.write(exchange(record="ab12", composition={"decode": 3}, message="fine", client_request_id="c-1", attempts=1))
    assert journal.close()
    (row,) = lines(tmp_path / "j")
    assert row["time"] == "2023-11-14T22:13:20Z"
    expected = {"request_id": "req-1", "client_request_id": "c-1", "key": "acme-1", "tenant": "acme", "class": "interactive",
                "model": "tiny", "backend": "a", "record": "ab12", "route": "chat", "stream": True, "outcome": "served",
                "reason": "ok", "status": 200, "asked_input": 100, "asked_output": 50, "sequences": 1, "input_tokens": 90,
                "output_tokens": 20, "composition": {"decode": 3}, "attempts": 1, "message": "fine"}  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    timings = {"queue_ms": 500, "ttft_ms": 100, "e2e_ms": 1200, "backend_ms": 690}
    assert {name: row[name] for name in timings} == pytest.approx(timings, abs=0.01)


def test_moments_that_never_came_are_null(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "j"))
    journal.write(
        exchange(shape=None, dispatched_at=None, first_at=None, last_at=None, outcome=Outcome.REFUSED, reason=Reason.INVALID_BODY)
    )
    journal.close()
    (row,) = lines(tmp_path / "j")
    assert [row[name] for name in ("task", "asked_input", "ttft_ms", "backend_ms")] == [None] * 4


def test_hostile_text_stays_on_its_line(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "j"))
    journal.write(exchange(client_request_id='x"\r\n{"forged": 1}', message="\ud800 lone", peer="::1"))
    journal.write(exchange(message="m" * 5_000))
    journal.close()
    first, second = lines(tmp_path / "j")
    assert first["client_request_id"] == 'x"\r\n{"forged": 1}' and first["message"] == "? lone"
    assert len(str(second["message"])) == 300


def test_logrotate_then_reopen_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(str(path))
    journal.write(exchange(request_id="before"))
    _until(lambda: path.exists() and path.stat().st_size > 0)
    path.rename(tmp_path / "j.1")
    journal.reopen()
    journal.write(exchange(request_id="after"))
    journal.close()
    assert [row["request_id"] for row in lines(tmp_path / "j.1")] == ["before"]
    assert [row["request_id"] for row in lines(path)] == ["after"]
    assert journal.dropped == 0


def test_a_blocked_pipe_drops_and_counts_and_never_blocks_the_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # six lines or so
    journal = Journal(str(fifo), max_lines=100)
    for _ in range(5_000):  # far more than pipe and buffer hold; nobody reads
        journal.write(exchange())
    assert journal.dropped > 0
    assert not journal.close(timeout_s=0.05)
    os.close(reader)  # the thread's write fails now, and it ends


def test_a_sink_that_cannot_be_opened_loses_lines_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = FileSink(str(tmp_path / "no" / "such" / "folder"))
    sink.write([b"a\n", b"b\n"])
    sink.write([b"c\n"])
    assert sink.lost == 3
    assert sum(str(tmp_path) in record.getMessage() for record in caplog.records) == 1  # threads of other journals may log too
    (tmp_path / "no" / "such").mkdir(parents=True)
    sink.write([b"d\n"])
    sink.close()
    assert sink.lost == 3 and (tmp_path / "no" / "such" / "folder").read_bytes() == b"d\n"


def test_recent_refusals_newest_first_and_filtered() -> None:
    journal = Journal(None)
    journal.write(exchange())
    for n, reason in enumerate([Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.QUEUE_FULL]):
        journal.write(exchange(request_id=f"r{n}", outcome=Outcome.REFUSED, reason=reason, tenant="acme" if n else "zeta"))
    assert [row["request_id"] for row in journal.recent()] == ["r2", "r1", "r0"]
    assert [row["request_id"] for row in journal.recent(reason="queue_full")] == ["r2", "r0"]
    assert [row["request_id"] for row in journal.recent(tenant="zeta")] == ["r0"]
    assert [row["request_id"] for row in journal.recent(1)] == ["r2"]


def test_what_is_kept_in_memory_is_bounded() -> None:
    journal = Journal(None)
    for n in range(2_000):
        journal.write(exchange(request_id=f"r{n}", outcome=Outcome.REFUSED))
    assert len(journal.recent(10_000)) == 500


def test_standard_output_gets_the_lines() -> None:
    program = (
        "from gateway.observe.journal import Journal\nfrom gateway.observe.exchange import Exchange\n"
        "j = Journal('-')\nfor n in range(3): j.write(Exchange(f'r{n}', 'chat', 1.0))\nj.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert [json.loads(line)["request_id"] for line in done.stdout.splitlines()] == ["r0", "r1", "r2"]


def _until(condition: object) -> None:
    """Wait for what the journal's thread does; fails after 5 s."""
    assert callable(condition)
    tick = threading.Event()
    for _ in range(500):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never happened")


@given(
    client=st.one_of(st.none(), st.text("abcXYZ0189._:/+=@-", min_size=1, max_size=64)),
    peer=st.one_of(st.none(), st.sampled_from(["127.0.0.1", "fe80::1%eth0", 'odd"\\'])),
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    features=st.frozensets(st.sampled_from(["logprobs", "media", "lora"])),
    numbers=st.lists(st.integers(0, 2**53), min_size=5, max_size=5),
    times=st.lists(st.floats(0, 1e5), min_size=4, max_size=4),
    wall=st.floats(1e6, 4e9),
    stream=st.booleans(),
)
def test_the_short_way_writes_the_same_document(client, peer, name, features, numbers, times, wall, stream) -> None:
    asked, out, found, written, size = numbers
    moments = [10 + sum(times[: n + 1]) for n in range(4)]
    x = exchange(
        client_request_id=client, peer=peer, tenant=name, model=name, shape=Shape("generate", features, asked, out, 3),
        dispatched_at=moments[0], first_at=moments[1], last_at=moments[2], ended_at=moments[3], queue_s=times[0], stream=stream,
        input_tokens=found, output_tokens=written, response_bytes=size, composition={f"decode:{name}:le1k": 2}, record="r",
    )  # fmt: skip
    short = PlainLines().line(x, wall)
    assert short is not None
    got, expected = orjson.loads(short), orjson.loads(_encode(_row(x, wall)))
    assert list(got) == list(expected)
    began = [dt.datetime.fromisoformat(row.pop("time")) for row in (got, expected)]
    assert abs((began[0] - began[1]).total_seconds()) <= 1e-5
    for each in ("queue_ms", "ttft_ms", "backend_ms", "e2e_ms"):
        assert got.pop(each) == pytest.approx(expected.pop(each), abs=0.0011)
    assert got == expected


@pytest.mark.parametrize(
    "odd",
    [
        {"outcome": Outcome.REFUSED}, {"reason": Reason.QUEUE_FULL}, {"message": "m"}, {"usage_estimated": True}, {"shape": None},
        {"dispatched_at": None}, {"first_at": None}, {"last_at": None}, {"input_tokens": None}, {"output_tokens": None},
        {"composition": None},
    ],
)  # fmt: skip
def test_the_short_way_leaves_the_unusual_alone(odd) -> None:
    assert PlainLines().line(exchange(**{"composition": {}, **odd}), 1e9) is None
