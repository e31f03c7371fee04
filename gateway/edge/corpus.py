"""A small fixed corpus of hard texts, on which our counting is compared with the server's own.

Owns: the texts. Promises: the same bodies each time, small, in the form /tokenize takes. Talks to: nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXTS = (
    "a",
    " ",
    "  leading and trailing  ",
    "line\nline\r\n\n\n\ttab",
    "1234567890 3.14159 1e-9 0x7f",
    "don't can't I'LL you've",
    "naïve café Ångström e\u0301 o\u0308 \u1e9b\u0323",
    "你好，世界。こんにちは 안녕하세요 สวัสดี مرحبا שלום नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇳🇴 ☕️ 1️⃣",
    "ﬃ ﷺ ① ½ ㎏ Ⅷ ﹅ \u00a0\u2003\u3000",
    "\u200b\u200d\ufeff\u202e\u0000\u0007\u001b\u007f\ufffd\U0010fffd",
    "𝒳𝔘 \U0001d15e \U00020000",
    "def f(x):\n    return {'a': [x, *y], \"b\": x ** 2}\n\n\n        # deep",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<s></s><|end|><|im_start|>system\n[INST] <<SYS>> <pad> <unk>",
    "__init__ ▁▁ \u2581x Ġ Ċ",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wind & waves at a place, in <knots> and °C",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Ålesund", "Cádiz"]}, "hours": {"type": "integer", "default": 3}},
            "required": ["place"],
        },
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ålesund", "hours": 3}'}}


def bodies(*, chat: bool) -> Iterator[dict[str, Any]]:
    """Bodies of /tokenize, without the model: every text as a prompt, and, with a chat template, in conversations."""
    for text in TEXTS:
        yield {"prompt": text}
    if not chat:
        return
    yield {"messages": [{"role": "user", "content": "hello"}]}
    yield {"messages": [{"role": "user", "content": "\n".join(TEXTS)}]}
    yield {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]}
    yield {
        "messages": [
            {"role": "user", "content": TEXTS[6]},
            {"role": "assistant", "content": TEXTS[8]},
            {"role": "user", "content": TEXTS[12]},
        ]
    }
    yield {"messages": [{"role": "user", "content": "How is the sea?"}], "tools": [TOOL]}
    yield {
        "messages": [
            {"role": "user", "content": "How is the sea?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "calm"},
        ],
        "tools": [TOOL],
    }
