"""The gateway's token counts beside those of a real vLLM: the same ids, and a bound that is never below them."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import httpx

from gateway.edge import body
from gateway.edge.body import ModelRules
from gateway.edge.corpus import TEXTS, TOOL, bodies
from gateway.edge.routes import ROUTES
from gateway.edge.tokens import CountPool, TokenCounter
from gateway.policy import Model
from tests.live.harness import VllmServer

HARD = (
    "", " ", "\n", "\t\t", "\u0000", "\u200d", "e\u0301" * 40, "👩‍👩‍👧‍👦" * 12, "🇳🇴🇸🇪🇩🇰" * 9, "👍🏽☕️1️⃣#️⃣" * 9,
    "ﷺ" * 30, "ﬃ①½㎏Ⅷ" * 9, "\U0001d15e" * 20,
    "a" * 3000, "ab " * 800, "9" * 500, "<|end|>", "<|role|>user\n", "<|end" + "|>", "<tool_call>{}</tool_call>", "▁▁ Ġ Ċ",
    "".join(map(chr, range(32, 127))), "".join(map(chr, range(0x80, 0x180))), "\u202e\u2066mixed\u2069 שלום مرحبا",
)  # fmt: skip
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": text} for text in HARD[:16]]},
    {"messages": [{"role": role, "content": text} for text in TEXTS for role in ("user", "assistant")]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in HARD[6:12]]}], "tools": [TOOL] * 5},
    {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False},
)  # fmt: skip
_PER_BLOCK = 12


def unicode_samples() -> Iterator[str]:
    """A few assigned characters of every 128 code points of the first two planes, and of every 2048 beyond."""
    start = 0
    while start < 0x110000:
        width = 128 if start < 0x20000 else 2048
        known = [chr(c) for c in range(start, start + width) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
        if known:
            yield "".join(known[:: max(1, len(known) // _PER_BLOCK)])
        start += width


def requests() -> list[dict[str, Any]]:
    """Bodies that /tokenize and the gateway both read."""
    texts = [*HARD, *unicode_samples()]
    return [{"prompt": text} for text in texts if text] + [*bodies(chat=True), *CHATS]


async def differences(server: VllmServer) -> tuple[int, list[str]]:
    """(bodies compared, what differs in words). The counter is made from what the server hands out, as the gateway does."""
    pool = CountPool()
    counter = TokenCounter.from_payload(server.get("/plimsoll/tokenizer").json(), pool)
    found: list[str] = []
    room = asyncio.Semaphore(4)
    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=60, trust_env=False) as client:

        async def compare(asked: dict[str, Any]) -> None:
            async with room:
                answer = await client.post("/tokenize", json={"model": "tiny", **asked})
            theirs = answer.json()["count"]
            ours, bound = await counted(counter, asked)
            if ours != theirs or (bound is not None and bound < theirs):
                found.append(f"ours {ours}, bound {bound}, theirs {theirs}: {json.dumps(asked)[:200]}")

        every = requests()
        await asyncio.gather(*map(compare, every))
    pool.close()
    return len(every), found


async def counted(counter: TokenCounter, asked: dict[str, Any]) -> tuple[int, int | None]:
    """The exact count and the upper bound of a request body, by the way that a request goes."""
    route = ROUTES[b"/v1/completions" if "prompt" in asked else b"/v1/chat/completions"]
    raw = json.dumps({"model": "tiny", **asked}).encode()
    rules = ModelRules.from_policy("tiny", Model(backends=("a",)), lora=False)
    parsed = body.parse(route, b"application/json", raw, {"tiny": rules}.get)
    assert isinstance(parsed, body.Parsed), parsed
    return await counter.count(parsed, asyncio.get_running_loop().time() + 60), counter.bound(parsed)[1]
