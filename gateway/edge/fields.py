"""Which fields a request may carry, per endpoint, and within which bounds. Read it as a table.

Owns: `TABLE`, the default allow-list, and `DROPPED`, the fields that are accepted and never forwarded.
Promises: a field that is not here is refused unless the policy's `allow_fields` opens it (top names, or dotted names
inside an object). Not here on purpose, because they change scheduling, identity, the prompt or the size behind our back:
kv_transfer_params, ec_transfer_params, vllm_xargs, priority, request_id, session_id, cache_salt (the gateway sets it),
chat_template, documents, mm_processor_kwargs, media_io_kwargs, prompt_embeds, truncate_prompt_tokens, use_beam_search.
Talks to: `checks`.
"""

from __future__ import annotations

from gateway.edge.checks import Check, Fields, anything, boolean, choice, either, integer, items, never, number, table, text, tree
from gateway.edge.routes import Parser

MAX_CAP = 2**31 - 1  # the largest output cap that is read; what fits is decided by the slices
MAX_N = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS_BYTES = 256 * 1024
MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 32

_cap = integer(1, MAX_CAP)
_logprobs = integer(0, 20)
_tools = tree(MAX_TOOLS_BYTES, MAX_DEPTH, list)
_schema = tree(MAX_SCHEMA_BYTES, MAX_DEPTH)
_grammar = text(16 * 1024)
_tool_choice = either(choice("none", "auto", "required"), tree(4096, 8))
_stop = either(text(1024), items(text(1024), 64))
_template_kwargs = Fields({"enable_thinking": boolean, "thinking": boolean})

_thinking = Fields({
    "type": choice("enabled", "disabled", "adaptive"), "budget_tokens": integer(1024, MAX_CAP), "display": text(32),
})  # fmt: skip
_response_format = Fields({
    "type": choice("text", "json_object", "json_schema"),
    "json_schema": Fields({"name": text(128), "description": text(4096), "schema": _schema, "strict": boolean}),
})  # fmt: skip
_structured_outputs = Fields({
    "json": either(_schema, text(MAX_SCHEMA_BYTES)),
    "regex": text(1024),
    "choice": items(text(1024), 1024),
    "grammar": _grammar,
    "json_object": boolean,
    "disable_any_whitespace": boolean,
    "disable_additional_properties": boolean,
    "whitespace_pattern": text(256),
})  # fmt: skip

_SAMPLING: dict[str, Check] = {
    "temperature": number(0, 100),
    "top_p": number(0, 1),
    "top_k": integer(-1, MAX_CAP),
    "min_p": number(0, 1),
    "seed": integer(-(2**63), 2**63 - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 10),
}
_GENERATION: dict[str, Check] = {
    **_SAMPLING,
    "n": integer(1, MAX_N),
    "stop": _stop,
    "stop_token_ids": items(integer(0, MAX_CAP), 128),
    "stream": boolean,
    "stream_options": Fields({"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean}),
    "logit_bias": table(number(-100, 100), 1024),
    "length_penalty": number(-10, 10),
    "ignore_eos": boolean,
    "min_tokens": integer(0, MAX_CAP),
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
    "add_special_tokens": boolean,
    "allowed_token_ids": items(integer(0, MAX_CAP), 4096),
    "bad_words": items(text(256), 256),
    "prompt_logprobs": _logprobs,
    "logprob_token_ids": items(integer(0, MAX_CAP), 128),
    "return_tokens_as_token_ids": boolean,
    "return_token_ids": boolean,
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "user": text(512),
}

TABLE: dict[Parser, dict[str, Check]] = {
    "chat": {
        **_GENERATION,
        "model": text(256),
        "messages": anything,
        "max_tokens": _cap,
        "max_completion_tokens": _cap,
        "logprobs": boolean,
        "top_logprobs": _logprobs,
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": boolean,
        "reasoning_effort": choice("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "thinking_token_budget": integer(0, MAX_CAP),
        "include_reasoning": boolean,
        "chat_template_kwargs": _template_kwargs,
        "add_generation_prompt": boolean,
        "continue_final_message": boolean,
        "echo": boolean,
    },
    "completions": {
        **_GENERATION,
        "model": text(256),
        "prompt": anything,
        "max_tokens": integer(0, MAX_CAP),
        "logprobs": _logprobs,
        "echo": boolean,
    },
    "responses": {
        **_SAMPLING,
        "model": text(256),
        "input": anything,
        "instructions": text(16 * 1024 * 1024),
        "max_output_tokens": _cap,
        "max_tool_calls": integer(1, 128),
        "stream": boolean,
        "stop": _stop,
        "stop_token_ids": items(integer(0, MAX_CAP), 128),
        "logit_bias": table(number(-100, 100), 1024),
        "top_logprobs": _logprobs,
        "include": items(choice("message.output_text.logprobs", "reasoning.encrypted_content"), 2),
        "tools": _tools,
        "tool_choice": _tool_choice,
        "parallel_tool_calls": boolean,
        "reasoning": Fields({"effort": text(16), "summary": text(16), "generate_summary": text(16)}),
        "include_reasoning": boolean,
        "text": Fields({
            "format": Fields({
                "type": choice("text", "json_object", "json_schema"), "name": text(128), "description": text(4096),
                "schema": _schema, "strict": boolean,
            }),
            "verbosity": choice("low", "medium", "high"),
        }),
        "structured_outputs": _structured_outputs,
        "truncation": choice("disabled"),
        "background": never,  # the answer would outlive the request that was admitted
        "store": boolean,
        "ignore_eos": boolean,
        "skip_special_tokens": boolean,
        "include_stop_str_in_output": boolean,
        "user": text(512),
    },
    "messages": {
        "model": text(256),
        "messages": anything,
        "system": anything,
        "max_tokens": _cap,
        "stop_sequences": items(text(1024), 64),
        "stream": boolean,
        "temperature": number(0, 100),
        "top_p": number(0, 1),
        "top_k": integer(-1, MAX_CAP),
        "tools": _tools,
        "tool_choice": tree(4096, 8),
        "thinking": _thinking,
        "output_config": Fields({
            "effort": choice("low", "medium", "high", "xhigh", "max"),
            "format": Fields({"type": choice("json_schema"), "schema": _schema}),
        }),
        "chat_template_kwargs": _template_kwargs,
    },
    "embeddings": {
        "model": text(256),
        "input": anything,
        "dimensions": integer(1, 65_536),
        "encoding_format": choice("float", "base64"),
        "add_special_tokens": boolean,
        "use_activation": boolean,
        "user": text(512),
    },
    "rerank": {
        "model": text(256),
        "query": anything,
        "documents": anything,
        "top_n": integer(0, MAX_CAP),
        "use_activation": boolean,
        "user": text(512),
    },
    "score": {
        "model": text(256),
        "text_1": anything,
        "text_2": anything,
        "queries": anything,
        "documents": anything,
        "items": anything,
        "data_1": anything,
        "data_2": anything,
        "use_activation": boolean,
        "user": text(512),
    },
    "tokenize": {
        "model": text(256),
        "prompt": anything,
        "messages": anything,
        "tools": _tools,
        "add_special_tokens": boolean,
        "add_generation_prompt": boolean,
        "continue_final_message": boolean,
        "return_token_strs": boolean,
        "chat_template_kwargs": _template_kwargs,
    },
    "detokenize": {"model": text(256), "tokens": anything},
    "count_tokens": {
        "model": text(256),
        "messages": anything,
        "system": anything,
        "tools": _tools,
        "tool_choice": tree(4096, 8),
        "thinking": _thinking,
        "chat_template_kwargs": _template_kwargs,
    },
    # Multipart parts, as text.
    "transcription": {},
    "translation": {},
    "none": {},
}  # fmt: skip

_AUDIO_TEXT = (
    "model", "language", "to_language", "response_format", "stream", "stream_include_usage",
    "stream_continuous_usage_stats", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty",
    "repetition_penalty", "presence_penalty", "max_completion_tokens", "timestamp_granularities[]", "include[]",
    "chunking_strategy",
)  # fmt: skip
TABLE["transcription"] = TABLE["translation"] = {
    **dict.fromkeys(_AUDIO_TEXT, text(256)),
    "prompt": text(4096),
    "hotwords": text(4096),
}

# Taken without complaint, because official clients send them, and never forwarded: they mean nothing to the engine,
# or would let one caller name another's data.
_OPENAI_EXTRAS: dict[str, Check] = {
    "metadata": table(anything, 16),
    "safety_identifier": text(512),
    "prompt_cache_key": text(512),
}
DROPPED: dict[Parser, dict[str, Check]] = {
    "chat": {**_OPENAI_EXTRAS, "store": boolean, "service_tier": text(32), "verbosity": text(32)},
    "completions": {**_OPENAI_EXTRAS, "best_of": integer(1, MAX_N), "suffix": text(0)},
    "responses": {**_OPENAI_EXTRAS, "service_tier": text(32), "stream_options": anything},
    "messages": {"metadata": table(anything, 16), "service_tier": text(32)},
    "embeddings": {"metadata": table(anything, 16)},
}
DROPPED_NAMES: dict[Parser, frozenset[str]] = {parser: frozenset(DROPPED.get(parser, ())) for parser in TABLE}


# A field that some endpoint knows is held to what it means there, wherever a policy opens it. Parts of uploads mean their own.
_ELSEWHERE: dict[str, Check] = {
    name: check
    for parser, table in reversed(TABLE.items())
    for name, check in table.items()
    if check is not anything and parser not in ("transcription", "translation")
}


def allowed(parser: Parser, extra: tuple[str, ...] = ()) -> Fields:
    """The allow-list of one endpoint, with the names that the policy opens beyond it: with any value where none is known."""
    known = {**DROPPED.get(parser, {}), **TABLE[parser]}
    for name in extra:
        if name in _ELSEWHERE:
            known.setdefault(name, _ELSEWHERE[name])
    return Fields(known).opened(extra)
