"""Prompts have the length that is asked for, and share nothing by accident."""

from importlib.resources import files

import orjson
import pytest
from tokenizers import Tokenizer

from gateway.qualify.plan import PlanError
from gateway.qualify.prompts import Prompts, Vocabulary
from gateway.qualify.sizes import Size
from tests.qualify.support import plan

TOKENIZER = files("gateway.simulator").joinpath("model/tokenizer.json").read_text()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.of(Tokenizer.from_str(TOKENIZER))


def test_token_ids_have_the_exact_length_and_no_special_token(vocabulary: Vocabulary) -> None:
    prompts = Prompts("completions", "tiny", plan().cells[0], vocabulary, "seed")
    body = orjson.loads(prompts.body(Size("uniform", 37, 5)))
    assert len(body["prompt"]) == 37
    special = {i for i, token in Tokenizer.from_str(TOKENIZER).get_added_tokens_decoder().items() if token.special}
    assert not special & set(body["prompt"])
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (5, 5, True, True)


def test_two_prompts_share_nothing_unless_the_plan_says_so(vocabulary: Vocabulary) -> None:
    prompts = Prompts("completions", "tiny", plan().cells[0], vocabulary, "seed")
    one, other = (orjson.loads(prompts.body(Size("uniform", 64, 1)))["prompt"] for _ in range(2))
    assert one[:16] != other[:16]
    one, other = (orjson.loads(prompts.body(Size("uniform", 64, 1, "a", 32)))["prompt"] for _ in range(2))
    assert one[:32] == other[:32]
    assert one[32:] != other[32:]
    third = orjson.loads(prompts.body(Size("uniform", 64, 1, "b", 32)))["prompt"]
    assert third[:32] != one[:32]


@pytest.mark.parametrize("tokens", [30, 31, 64, 500])
def test_chat_text_counts_as_asked_less_the_template(vocabulary: Vocabulary, tokens: int) -> None:
    prompts = Prompts("chat", "tiny", plan(route="chat").cells[0], vocabulary, "seed", overhead=20)
    content = orjson.loads(prompts.body(Size("uniform", tokens, 4)))["messages"][0]["content"]
    assert vocabulary.count(content) <= tokens - 20
    assert vocabulary.count(content) >= (tokens - 20) * 0.9 - 1


def test_chat_without_a_tokenizer_is_refused() -> None:
    prompts = Prompts("chat", "tiny", plan(route="chat").cells[0], Vocabulary.common(), "seed")
    with pytest.raises(PlanError, match="tokenizer"):
        prompts.body(Size("uniform", 30, 4))


def test_embeddings_ask_for_no_output(vocabulary: Vocabulary) -> None:
    cell = plan(route="embeddings", cell={"task": "pool", "output_tokens": {"min": 0, "max": 0}}).cells[0]
    body = orjson.loads(Prompts("embeddings", "tiny", cell, vocabulary, "s").body(Size("uniform", 9, 0)))
    assert set(body) == {"model", "input"}
    assert len(body["input"]) == 9


@pytest.mark.parametrize("raw", [b"[", b"[]", b'{"tokenizer": "{}"}', b'{"tokenizer": 3}'])
def test_a_tokenizer_that_is_none_is_a_clear_error(raw: bytes) -> None:
    with pytest.raises(PlanError, match="tokenizer"):
        Vocabulary.from_bundle(raw)


def test_a_server_without_tokenizer_json_still_gets_prompts() -> None:
    assert Vocabulary.from_bundle(b'{"tokenizer": null}') == Vocabulary.common()
