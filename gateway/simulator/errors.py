"""vLLM's error envelope.

Owns `ApiError`, which a handler raises and the exchange turns into `{"error": {message, type, param, code}}`. Validation
errors are 400 and unknown models 404, never 422. Talks to nobody.
"""

from collections.abc import Iterable
from typing import Any

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A refusal with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = _TYPES[status]

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict[str, Any]:
        """The envelope of /v1/messages."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class InvalidBodyError(ApiError):
    """The body is not of the route's form: refused before the handler, in OpenAI's envelope on every route."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(400, message, param)
        self.kind = "Bad Request"

    def anthropic_body(self) -> dict[str, Any]:
        """The same envelope as elsewhere, as vLLM has it."""
        return self.body()


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param)


def model_not_found(model: object, names: Iterable[str]) -> ApiError:
    """404, with the names that are served."""
    return ApiError(404, f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}.", "model")


def too_long(limit: int, length: int) -> ApiError:
    """400 for a prompt that leaves no room for one token."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens.",
        "input_tokens",
    )
