"""Builds the simulator's model directory: a byte-level BPE tokenizer, a chat template and the usual config files.

Owns how `model/` came to be; run `python -m gateway.simulator.model_build DIR` to make it again. Promises the same bytes on
each run: the training text is generated here from a fixed seed. Not used while serving. Talks to `tokenizers`.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1536
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ONSETS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "oo")
_CODAS = ("", "", "n", "r", "s", "t", "l", "nd", "ck", "sh", "m", "p")
_COMMON_TEXT = (
    "the of and to in is that for it with as was on be at by this have from or one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know ship load line "
    "deep cargo port sea wind wave draft hull crew captain freight measure limit "
)
_COMMON = tuple(_COMMON_TEXT.split())
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def training_text(seed: int = 1876, lines: int = 4000) -> Iterator[str]:
    """Lines of plausible words, numbers, code and JSON, the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    made = [
        "".join(rng.choice(part) for _ in range(rng.randint(1, 3)) for part in (_ONSETS, _VOWELS, _CODAS)) for _ in range(600)
    ]
    for _ in range(lines):
        words = [rng.choice(_COMMON) if rng.random() < 0.6 else rng.choice(made) for _ in range(rng.randint(5, 14))]
        if rng.random() < 0.1:
            yield json.dumps({"name": words[0], "value": rng.randint(0, 999), "items": words[1:4]})
        elif rng.random() < 0.1:
            yield f"def {words[0]}({words[1]}):\n    return {words[2]} + {rng.randint(0, 99)}"
        else:
            yield " ".join(words).capitalize() + rng.choice(".!?,")


def build_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer; no normaliser, so that a byte is never less than a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def model_files() -> dict[str, object]:
    """The JSON files beside tokenizer.json, by name."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"config.json": config, "tokenizer_config.json": tokenizer_config, "generation_config.json": {"eos_token_id": [0, 2]}}


def build(directory: Path) -> None:
    """Write the model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    for name, content in model_files().items():
        (directory / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model")
