import asyncio
import threading
import time
from typing import Any

import pytest

from gateway.edge import corpus, tokenize, tokens
from gateway.edge.routes import ROUTES
from gateway.errors import Reason, Refusal, Refused
from gateway.policy import MediaRules

from .building import KINDS, PARTS_TEMPLATE, accepted, chat, counter, payload, rules


def soon(seconds: float = 20) -> float:
    return asyncio.get_running_loop().time() + seconds


def with_tools(text: str = "sea?") -> Any:
    return accepted("/v1/chat/completions", chat(text, tools=[corpus.TOOL]))


async def test_counts_are_cached_by_what_is_counted() -> None:
    made = counter()
    first = await made.count(with_tools(), soon())
    made._pool.close()  # from here on nothing can be counted anew
    assert await made.count(accepted("/v1/chat/completions", chat("sea?", tools=[corpus.TOOL], max_tokens=7)), soon()) == first
    with pytest.raises(RuntimeError):
        await made.count(with_tools("other"), soon())


async def test_ids_need_no_tokenizer() -> None:
    parsed = accepted("/v1/completions", {"model": "tiny", "prompt": [[1, 2, 3], [4]]})
    assert tokens.NoCounter().bound(parsed) == (3, 3) == counter().bound(parsed)
    assert await tokens.NoCounter().count(parsed, soon()) == 3
    text = accepted("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert tokens.NoCounter().bound(text) == (1, None)
    with pytest.raises(Refused) as error:
        await tokens.NoCounter().count(text, soon())
    assert error.value.refusal.reason is Reason.OUT_OF_SLICE_INPUT


async def test_media_are_added_to_the_text() -> None:
    made = counter("none", PARTS_TEMPLATE)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, part]}
    parsed = accepted("/v1/chat/completions", {"model": "tiny", "messages": [message]}, media=MediaRules(image_tokens=1000))
    assert made.bound(parsed)[1] is None
    assert 1000 < await made.count(parsed, soon()) < 1100


async def test_the_loop_runs_while_a_large_text_is_counted() -> None:
    made = counter()
    parsed = accepted("/v1/completions", {"model": "tiny", "prompt": "the captain measured naïve loads " * 15_000})
    task = asyncio.create_task(made.count(parsed, soon()))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 5
    assert await task > 15_000


async def test_too_large_and_too_late_are_refusals() -> None:
    made = counter()
    huge = accepted("/v1/completions", {"model": "tiny", "prompt": "x" * (tokens.MAX_COUNT_BYTES + 1)})
    with pytest.raises(Refused) as error:
        await made.count(huge, soon())
    assert error.value.refusal.reason is Reason.OUT_OF_SLICE_INPUT
    with pytest.raises(Refused) as error:
        await made.count(with_tools("late"), asyncio.get_running_loop().time() - 1)
    assert "in time" in error.value.refusal.message


async def test_stuck_threads_never_block_the_callers_and_are_forgiven() -> None:
    pool = tokens.CountPool(workers=1, waiting=1)
    release = threading.Event()

    def stuck() -> int:
        release.wait(30)
        return 1

    with pytest.raises(Refused):
        await pool.run(stuck, soon(0.05))
    with pytest.raises(Refused) as error:
        await pool.run(lambda: 2, soon())
    assert error.value.refusal.reason is Reason.QUEUE_FULL
    release.set()
    for _ in range(1000):
        try:
            assert await pool.run(lambda: 3, soon()) == 3
            break
        except Refused:
            await asyncio.sleep(0.01)
    else:
        pytest.fail("the pool did not recover")
    pool.close()


async def test_long_texts_never_stand_before_short_ones() -> None:
    pool = tokens.CountPool(workers=1)
    release = threading.Event()
    long = [asyncio.create_task(pool.run(lambda: release.wait(30), soon(), size=10**6)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await pool.run(lambda: 3, soon(), size=10) == 3
    assert pool.pending == 3 and not any(task.done() for task in long)
    release.set()
    assert await asyncio.gather(*long) == [True] * 3
    pool.close()


@pytest.mark.parametrize("what", ["a text", "a pair", "ids"])
async def test_others_run_while_something_long_is_read(what: str) -> None:
    """The tokenizer holds on to the interpreter in some of its methods: not in those that are used here."""
    made, text, turns = counter(), "ab " * 300_000, 0
    pair = accepted("/v1/score", {"model": "tiny", "text_1": text, "text_2": text})
    work = {
        "a text": lambda: made.encode_ids(text, True), "a pair": lambda: made.count_now(pair),
        "ids": lambda: made.decode([70] * 1_000_000),
    }[what]  # fmt: skip
    task = asyncio.create_task(asyncio.to_thread(work))
    while not task.done():
        await asyncio.sleep(0.002)
        turns += 1
    assert await task
    assert turns > 5, "the loop stood still"


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_counted_as_the_tokenizer_counts_them_but_each_text_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = counter(kind), 0
    query, documents = " a ship,  naïve ", ["", " ", "b", "the line was above\n", "</s>x", "e\u0301 👍🏽", "the line was above\n"]
    parsed = accepted("/v1/rerank", {"model": "tiny", "query": query, "documents": documents * 100})
    expected = max(len(made.tokenizer.encode(query, document).ids) for document in documents)
    encode = made._encode

    def counted(text: str, specials: bool = True) -> int:
        nonlocal seen
        seen += 1
        return encode(text, specials)

    monkeypatch.setattr(made, "_encode", counted)
    assert made.count_now(parsed) == expected
    assert seen == 7, "one query in 700 pairs is read once"


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    pool = tokens.CountPool(workers=1, waiting=0)
    for _ in range(20):
        task = asyncio.create_task(pool.run(lambda: time.sleep(0.001) or 1, soon()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while pool.pending:
            await asyncio.sleep(0.001)
    assert await pool.run(lambda: 5, soon()) == 5


async def test_a_template_that_refuses_says_why() -> None:
    made = counter("none", "{{ raise_exception('no tools please') }}")
    with pytest.raises(Refused) as error:
        await made.count(with_tools(), soon())
    assert error.value.refusal.reason is Reason.INVALID_BODY
    assert "no tools please" in error.value.refusal.message
    with pytest.raises(Refused) as error:
        await counter("none", None).count(with_tools(), soon())
    assert error.value.refusal.reason is Reason.OUT_OF_SLICE_INPUT


async def test_verify_agrees_with_a_server_of_the_same_kind_and_notices_another() -> None:
    ours, same, other = counter(), counter(), counter("none", PARTS_TEMPLATE)

    def server(of: tokens.TokenCounter) -> tokens.Fetch:
        async def fetch(body: dict[str, Any]) -> list[int]:
            return of._ids_of(body)

        return fetch

    assert await ours.verify(server(same))
    assert ours.mode == "local"
    assert not await ours.verify(server(other))
    assert ours.mode == "remote"
    plain = accepted("/v1/chat/completions", chat("hello"))
    assert ours.bound(plain)[1] is None
    assert await ours.count(plain, soon()) == other.count_now(plain)
    with pytest.raises(Refused):
        await ours.count(accepted("/v1/chat/completions", chat("x" * 40_000)), soon())
    with pytest.raises(Refused):
        await ours.count(accepted("/v1/responses", {"model": "tiny", "input": "x"}), soon())


async def test_remote_counting_is_one_at_a_time() -> None:
    made = counter()
    running = most = 0

    async def fetch(body: dict[str, Any]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return [1, 2, 3]

    assert not await made.verify(fetch)
    counts = await asyncio.gather(*(made.count(accepted("/v1/chat/completions", chat(str(n))), soon()) for n in range(10)))
    assert (counts, most) == ([3] * 10, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": None}, {"tokenizer": ""}, {"tokenizer": "{}"}, {"tokenizer": "[]"}, {"tokenizer": 5},
        {"tokenizer": "\ud800"},
        {"tokenizer": '{"version":"1.0","model":{"type":"BPE","vocab":5}}'}, {"chat_template": "{% for %}"},
    ],
)  # fmt: skip
def test_payloads_that_are_rubbish(changes: dict[str, Any]) -> None:
    with pytest.raises(tokens.TokenizerUnusable):
        tokens.TokenCounter.from_payload({**payload(), **changes}, tokens.CountPool())


@pytest.mark.parametrize(
    "changes", [{"special_tokens": 5}, {"special_tokens": {"a": 5, "bos_token": ""}}, {"chat_template": 7}, {"flags": 1}]
)
def test_payloads_with_odd_extras_still_count(changes: dict[str, Any]) -> None:
    made = tokens.TokenCounter.from_payload({**payload(), **changes}, tokens.CountPool())
    assert made.count_now(accepted("/v1/completions", {"model": "tiny", "prompt": "hello"})) > 0


def ask(path: str, document: dict[str, Any], kind: str = "none") -> dict[str, Any] | Refusal:
    import json

    found = tokenize.read(ROUTES[path.encode()], b"application/json", json.dumps(document).encode(), {"tiny": rules()}.get)
    return found if isinstance(found, Refusal) else tokenize.answer(found, counter(kind), 2048)


def test_tokenize_and_back() -> None:
    found = ask("/tokenize", {"model": "tiny", "prompt": "hello 你好", "return_token_strs": True})
    assert isinstance(found, dict)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    assert ask("/detokenize", {"model": "tiny", "tokens": found["tokens"]}) == {"prompt": "hello 你好"}
    with_specials = ask("/tokenize", {"model": "tiny", "prompt": "a"}, "metaspace")
    without = ask("/tokenize", {"model": "tiny", "prompt": "a", "add_special_tokens": False}, "metaspace")
    assert with_specials["count"] == without["count"] + 1  # type: ignore[index]


def test_tokenize_counts_what_the_request_would() -> None:
    document = chat("sea?", tools=[corpus.TOOL])
    assert ask("/tokenize", document)["count"] == counter().count_now(accepted("/v1/chat/completions", document))  # type: ignore[index]
    message = {"model": "tiny", "messages": [{"role": "user", "content": "sea?"}], "system": "kind"}
    expected = counter().count_now(accepted("/v1/messages", {**message, "max_tokens": 1}))
    assert ask("/v1/messages/count_tokens", message) == {
        "input_tokens": expected,
        "context_management": {"original_input_tokens": expected},
    }


@pytest.mark.parametrize(
    ("path", "document", "reason"),
    [
        ("/tokenize", {"prompt": "x"}, Reason.INVALID_BODY),
        ("/tokenize", {"model": "no", "prompt": "x"}, Reason.MODEL_NOT_FOUND),
        ("/tokenize", {"model": "tiny"}, Reason.INVALID_BODY), ("/tokenize", {"model": "tiny", "prompt": 5}, Reason.INVALID_BODY),
        ("/tokenize", {**chat(), "prompt": "x"}, Reason.INVALID_BODY),
        ("/tokenize", chat(chat_template="{{ 1 }}"), Reason.FIELD_NOT_ALLOWED),
        ("/detokenize", {"model": "tiny", "tokens": "x"}, Reason.INVALID_BODY),
        ("/detokenize", {"model": "tiny", "tokens": [-1]}, Reason.INVALID_BODY),
        ("/detokenize", {"model": "tiny", "tokens": [2**40]}, Reason.INVALID_BODY),
        ("/detokenize", {"model": "tiny", "tokens": [True]}, Reason.INVALID_BODY),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": []}, Reason.INVALID_BODY),
    ],
)  # fmt: skip
def test_questions_that_are_none(path: str, document: dict[str, Any], reason: Reason) -> None:
    found = ask(path, document)
    assert isinstance(found, Refusal)
    assert found.reason is reason
