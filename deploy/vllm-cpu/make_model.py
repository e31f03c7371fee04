"""Write a tiny model directory that a real vLLM starts with `--load-format dummy`.

Owns: the configuration, the tokenizer and the chat template of the test model. Promises: standard library only, no
network, and the same bytes in every file on every run, whatever the interpreter or the `tokenizers` release. Talks to:
nothing; setup.sh and the live tests run it.

The tokenizer is trained here, on text made here, by the plain byte-pair algorithm: count adjacent pairs, join the most
frequent one (ties go to the pair that sorts first), repeat. Five variants cover what tokenizers do to a text before they
cut it: none, nfc, nfkc (byte level, with that normaliser), sentencepiece (prepended mark, byte fallback) and metaspace
(the same mark put in by the pre-tokenizer).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "▁"
MERGES = 760
SENTENCES = 4000
NORMALIZERS = ("none", "nfc", "nfkc", "sentencepiece", "metaspace")
PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+")

WORDS = """
the a of to and in is that it for on with as was at by this be are from or have an they which one you had not but what all
were when we there can out other about many then them these so some her would make like him into time has look two more
write go see number no way could people my than first water been call who oil its now find long down day did get come made
may part over new sound take only little work know place year live back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell boy follow came want show
also around form three small set put end does another well large must big even such because turn here why ask went men read
need land different home us move try kind hand picture again change off play spell air away animal house point page letter
mother answer found study still learn should world ship load deep measure server request token queue model capacity cargo
harbour captain sea salt fresh summer winter tropical certificate gauge limit weight depth mark board crew engine signal
weather wind tide river cable anchor rope sail deck hull keel mast bridge compass chart voyage port starboard bow stern
function return value error string list object class import define result number input output start stop reason length
system user assistant tool content message prompt stream answer question example json schema required properties type
""".split()  # noqa: SIM905  (a list literal would fill three hundred lines)

FRAGMENTS = [
    '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}',
    "def measure(load: int, limit: int) -> bool:\n    return load <= limit\n",
    "for item in items:\n    print(item)\n",
    "Grüße aus Köln, naïve façade, señor, déjà vu.",
    "日本語のテキスト 中文文本 한국어",
    "Привет, мир. Γειά σου κόσμε.",
    "https://example.org/path?query=1&page=20",
    "1, 2, 3, 10, 42, 100, 1024, 2048, 65536.",
    "- first\n- second\n- third\n\n",
    "😀 🚢 ⚓ ✓ → ≤",
]

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    '{{- \'<|role|>system\\nYou may call these tools. Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- '<|end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|role|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] %}{{- message['content'] }}{%- endif %}"
    "{%- if message['tool_calls'] %}"
    "{%- for call in message['tool_calls'] %}"
    "{{- '\\n<tool_call>' }}{{- call['function'] | tojson }}{{- '</tool_call>' }}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|role|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Specials:
    """The special tokens of one variant, in id order."""

    bos: str
    eos: str
    others: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.others[:1], self.bos, self.eos, *self.others[1:])


BYTE_LEVEL = Specials("<|bos|>", "<|end|>", ("<|pad|>", "<|role|>"))
SENTENCEPIECE = Specials("<s>", "</s>", ("<unk>", "<|role|>", "<|end|>"))


def corpus(seed: int = 7) -> str:
    """Sentences drawn from WORDS and FRAGMENTS. Only `random()` is used: its sequence is the same in every Python."""
    draw = random.Random(seed)  # noqa: S311  (text to train on, no secret)
    lines: list[str] = []
    for index in range(SENTENCES):
        words = [WORDS[int(draw.random() * len(WORDS))] for _ in range(4 + int(draw.random() * 12))]
        lines.append(" ".join([words[0].capitalize(), *words[1:]]) + ".")
        if index % 20 == 0:
            lines.append(FRAGMENTS[(index // 20) % len(FRAGMENTS)])
    return "\n".join(lines)


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte: itself where printable, else one from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + place) for place, byte in enumerate(hidden)})
    return table


def train(words: Counter[tuple[str, ...]], merges: int) -> list[tuple[str, str]]:
    """Byte-pair merges in order, most frequent first. `words` maps a word's symbols to its count."""
    symbols = [list(word) for word in sorted(words)]
    counts = [words[tuple(word)] for word in symbols]
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, word in enumerate(symbols):
        for pair in itertools.pairwise(word):
            pairs[pair] += counts[index]
            where[pair].add(index)
    learned: list[tuple[str, str]] = []
    while len(learned) < merges:
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        learned.append(best)
        for index in sorted(where.pop(best)):
            _join(symbols[index], counts[index], best, index, pairs, where)
        del pairs[best]
    return learned


def _join(
    word: list[str],
    count: int,
    best: tuple[str, str],
    index: int,
    pairs: Counter[tuple[str, str]],
    where: defaultdict[tuple[str, str], set[int]],
) -> None:
    """Replace `best` by its joined symbol in one word, and keep the pair counts right."""
    for pair in itertools.pairwise(word):
        pairs[pair] -= count
    place = 0
    while place < len(word) - 1:
        if (word[place], word[place + 1]) == best:
            word[place : place + 2] = ["".join(best)]
        place += 1
    for pair in itertools.pairwise(word):
        pairs[pair] += count
        where[pair].add(index)


def _added(tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": place, "content": token, **flags} for place, token in enumerate(tokens)]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], *, unk: str | None) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk is not None,
        "byte_fallback": unk is not None,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
    }


def byte_level(normalizer: str) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json; `normalizer` is none, nfc or nfkc."""
    table = byte_alphabet()
    pieces = Counter(PIECE.findall(corpus()))
    words: Counter[tuple[str, ...]] = Counter()
    for piece, count in pieces.items():
        words[tuple(table[byte] for byte in piece.encode())] += count
    merges = train(words, MERGES)
    tokens = [*BYTE_LEVEL.all, *sorted(table.values()), *("".join(pair) for pair in merges)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(BYTE_LEVEL.all),
        "normalizer": None if normalizer == "none" else {"type": normalizer.upper()},
        "pre_tokenizer": level,
        "post_processor": {**level, "trim_offsets": False},
        "decoder": level,
        "model": _bpe({token: place for place, token in enumerate(dict.fromkeys(tokens))}, merges, unk=None),
    }


def sentencepiece(style: str) -> dict[str, Any]:
    """A SentencePiece-like tokenizer.json with byte fallback; `style` is sentencepiece or metaspace."""
    pieces = Counter(word for word in corpus().replace(" ", " " + MARK).split(" ") if word)
    words = Counter({tuple(piece): count for piece, count in pieces.items()})
    merges = train(words, MERGES)
    letters = sorted({symbol for word in words for symbol in word})
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SENTENCEPIECE.all, *fallback, *letters, *("".join(pair) for pair in merges)]
    prepend = [{"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": {"String": " "}, "content": MARK}]
    whole = style == "sentencepiece"
    bos = {"SpecialToken": {"id": SENTENCEPIECE.bos, "type_id": 0}}
    bos_id = SENTENCEPIECE.all.index(SENTENCEPIECE.bos)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(SENTENCEPIECE.all),
        "normalizer": {"type": "Sequence", "normalizers": prepend} if whole else None,
        "pre_tokenizer": None if whole else {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, bos, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SENTENCEPIECE.bos: {"id": SENTENCEPIECE.bos, "ids": [bos_id], "tokens": [SENTENCEPIECE.bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": _bpe({token: place for place, token in enumerate(dict.fromkeys(tokens))}, merges, unk="<unk>"),
    }


def documents(normalizer: str) -> dict[str, dict[str, Any]]:
    """File name to content of the whole model directory. Raises ValueError for an unknown normaliser."""
    if normalizer not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {normalizer!r}: choose one of {', '.join(NORMALIZERS)}")
    byte_based = normalizer in ("none", "nfc", "nfkc")
    tokenizer = byte_level(normalizer) if byte_based else sentencepiece(normalizer)
    specials = BYTE_LEVEL if byte_based else SENTENCEPIECE
    ids = {name: place for place, name in enumerate(specials.all)}
    vocab_size = -(-len(tokenizer["model"]["vocab"]) // 64) * 64
    ends = {"bos_token_id": ids[specials.bos], "eos_token_id": ids[specials.eos]}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": vocab_size,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **ends,
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": specials.bos,
            "eos_token": specials.eos,
            "pad_token": specials.all[0],
            "unk_token": None if byte_based else "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"temperature": 1.0, "max_new_tokens": 256, **ends},
    }


def write(directory: Path, normalizer: str = "none") -> None:
    """Write the four files of the model into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in documents(normalizer).items():
        text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny model directory for a real vLLM (no weights).")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--normalizer", choices=NORMALIZERS, default="none", help="what the tokenizer does to a text first")
    options = parser.parse_args()
    write(options.directory, options.normalizer)


if __name__ == "__main__":
    main()
