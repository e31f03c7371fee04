"""The tiny model that the real vLLM is tested with: the same bytes everywhere, and tokenizers that do what they say."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2.sandbox
import pytest
from tokenizers import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "vllm-cpu" / "make_model.py"
KINDS = ("none", "nfc", "nfkc", "sentencepiece", "metaspace")
TEXT = "The captain measured the load.\n\n  Two spaces, 12345, naïve 中文 🚢 <|nothing|> \t end "


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, dict[str, Any]]]:
    make_model = load_script()
    return {kind: make_model.documents(kind) for kind in KINDS}


def tokenizer(models: dict[str, dict[str, dict[str, Any]]], kind: str) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(models[kind]["tokenizer.json"]))


def test_the_files_have_the_same_bytes_on_every_run(tmp_path: Path) -> None:
    """Two processes with different hash seeds write the same files."""
    digests = []
    for seed in ("1", "2"):
        target = tmp_path / seed
        subprocess.run([sys.executable, str(SCRIPT), str(target)], check=True, env={"PYTHONHASHSEED": seed})
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in target.iterdir()})
    assert digests[0] == digests[1]
    assert set(digests[0]) == {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_survives_the_way_there_and_back(models: dict[str, dict[str, dict[str, Any]]], kind: str) -> None:
    loaded = tokenizer(models, kind)
    assert loaded.decode(loaded.encode(TEXT, add_special_tokens=False).ids) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_learned_words_and_fits_the_embedding(models: dict[str, dict[str, dict[str, Any]]], kind: str) -> None:
    loaded = tokenizer(models, kind)
    config = models[kind]["config.json"]
    assert loaded.get_vocab_size() <= config["vocab_size"] and config["vocab_size"] % 64 == 0
    assert len(loaded.encode("the captain measured the load", add_special_tokens=False).ids) <= 8
    ids = {token: loaded.token_to_id(models[kind]["tokenizer_config.json"][f"{token}_token"]) for token in ("bos", "eos")}
    assert ids == {"bos": config["bos_token_id"], "eos": config["eos_token_id"]}


def test_the_normalisers_differ_as_their_names_say(models: dict[str, dict[str, dict[str, Any]]]) -> None:
    """A ligature is taken apart by NFKC alone; a letter and its accent are joined by NFC and NFKC."""
    counts = {kind: len(tokenizer(models, kind).encode("ﷺ", add_special_tokens=False).ids) for kind in ("none", "nfc", "nfkc")}
    assert counts["none"] == counts["nfc"] == 3 and counts["nfkc"] > 11
    joined = {kind: tokenizer(models, kind).encode("e\u0301").ids == tokenizer(models, kind).encode("é").ids for kind in KINDS}
    assert joined == {"none": False, "nfc": True, "nfkc": True, "sentencepiece": False, "metaspace": False}


def test_sentencepiece_prepends_its_mark_and_falls_back_to_bytes(models: dict[str, dict[str, dict[str, Any]]]) -> None:
    for kind in ("sentencepiece", "metaspace"):
        tokens = tokenizer(models, kind).encode("ship 𝄞").tokens
        assert tokens[:3] == ["<s>", "▁", "ship"] or tokens[:2] == ["<s>", "▁ship"]
        assert tokens[-4:] == ["<0xF0>", "<0x9D>", "<0x84>", "<0x9E>"]


def test_the_chat_template_renders_turns_tools_and_the_prompt(models: dict[str, dict[str, dict[str, Any]]]) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(models["none"]["tokenizer_config.json"]["chat_template"])
    tool = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "depth", "arguments": {"place": "bow"}}}
    messages = [
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7 m"},
    ]
    text = template.render(messages=messages, tools=[tool], add_generation_prompt=True, bos_token="<|bos|>")
    assert text.startswith("<|bos|><|role|>system\n")
    assert "<|role|>user\nHow deep?<|end|>\n" in text
    assert text.count("</tool_call>") == 2 and '"place": "bow"' in text
    assert text.endswith("<|role|>tool\n7 m<|end|>\n<|role|>assistant\n")


def test_an_unknown_normaliser_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown normalizer 'nfd'"):
        load_script().documents("nfd")
