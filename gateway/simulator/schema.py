"""Request bodies, as far as the simulator reads them.

Owns the pydantic models of the routes. Unknown fields are ignored, as in vLLM. Promises: a body of the wrong type is a 400 in
vLLM's envelope. Talks to nobody.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.simulator.errors import InvalidBodyError

MAX_N = 16_384
MAX_PROMPTS = 1024


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class Sampling(_Body):
    """What the generating routes share."""

    n: int = Field(default=1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


Prompt = str | list[int] | list[str] | list[list[int]]


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None


class CountTokensRequest(_Body):
    """POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = Field(default=None, ge=0)


class EmbeddingRequest(_Body):
    """POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=4096)


class ScoreRequest(_Body):
    """POST /v1/score."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class RerankRequest(_Body):
    """POST /v1/rerank."""

    query: str
    documents: list[str] = Field(min_length=1)
    top_n: int = Field(default=0, ge=0)


class TokenizeRequest(_Body):
    """POST /tokenize, in its completion or chat form."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: list[int]


BodyT = TypeVar("BodyT", bound=_Body)


def read(kind: type[BodyT], raw: bytes) -> BodyT:
    """Parse a JSON body. Raises ApiError 400 with the first thing that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(["body", *(str(part) for part in first["loc"])])
        count = error.error_count()
        message = f"{count} validation error{'s' if count > 1 else ''}:\n  {where}: {first['msg']}"
        raise InvalidBodyError(message, where) from error
