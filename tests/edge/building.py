"""Tokenizers, rules and requests that the tests of the edge share."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gateway.edge import body, routes, tokens
from gateway.errors import Refusal

SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]
KINDS = ("none", "nfc", "nfkc", "sentencepiece", "metaspace", "llama3")
CORPUS = [
    "the captain measured the load before the ship left the harbour, and the line was above the water",
    "def admit(request): return request.tokens <= slice.tokens  # 123 456",
    "naïve café Ångström 你好世界 こんにちは 👍🏽 привет",
] * 4
TEMPLATE = (
    "{{- bos_token }}{%- if tools %}{{- 'tools: ' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}{{- '<s>' + message['role'] + '\\n' }}{%- if message['content'] %}"
    "{{- message['content'] | trim }}{%- endif %}{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- call.function | tojson(indent=2) }}{%- endfor %}{%- endif %}{{- '</s>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message['content'] %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@functools.cache
def tokenizer_json(kind: str) -> str:
    """A small trained tokenizer.json of one kind."""
    byte_level = kind in ("none", "nfc", "nfkc", "llama3")
    made = Tokenizer(models.BPE() if byte_level else models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else ["▁"]
    specials = SPECIALS if byte_level else [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "llama3":
        split = pre_tokenizers.Split(pattern=" ?\\w+", behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind in ("nfc", "nfkc"):
        made.normalizer = normalizers.NFC() if kind == "nfc" else normalizers.NFKC()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.decoder = decoders.ByteLevel() if byte_level else decoders.ByteFallback()
    if not byte_level:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return _bytes_as_plain_tokens(made.to_str())


def _bytes_as_plain_tokens(text: str) -> str:
    """The trainer marks byte tokens as special; in a real tokenizer they are plain vocabulary."""
    description = json.loads(text)
    description["added_tokens"] = [item for item in description["added_tokens"] if not item["content"].startswith("<0x")]
    return json.dumps(description)


def payload(kind: str = "none", template: str | None = TEMPLATE) -> dict[str, Any]:
    """What a backend hands out."""
    return {
        "tokenizer": tokenizer_json(kind),
        "chat_template": template,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "flags": {},
    }


def counter(kind: str = "none", template: str | None = TEMPLATE, pool: tokens.CountPool | None = None) -> tokens.TokenCounter:
    return tokens.TokenCounter.from_payload(payload(kind, template), pool or tokens.CountPool())


def rules(**changes: Any) -> body.ModelRules:
    return body.ModelRules(**{"name": "tiny", "upstream_model": "tiny", **changes})


def parse(path: str, document: Any, content_type: bytes = b"application/json", **changes: Any) -> body.Parsed | Refusal:
    """A body on a route, under rules that know only the model tiny. `document` may be bytes."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return body.parse(routes.ROUTES[path.encode()], content_type, raw, {"tiny": rules(**changes)}.get)


def accepted(path: str, document: Any, **changes: Any) -> body.Parsed:
    found = parse(path, document, **changes)
    assert isinstance(found, body.Parsed), found
    return found


def refused(path: str, document: Any, **changes: Any) -> Refusal:
    found = parse(path, document, **changes)
    assert isinstance(found, Refusal), found
    return found


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
