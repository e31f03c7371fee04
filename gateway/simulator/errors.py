"""vLLM's error envelope.

Owns `ApiError`, which a handler raises and the exchange turns into `{"error": {message, type, param, code}}`. Validation
errors are 400 and unknown models 404, never 422. Talks to nobody.
"""

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

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": self.message, "type": _TYPES[self.status], "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict[str, Any]:
        """The envelope of /v1/messages."""
        return {"type": "error", "error": {"type": _TYPES[self.status], "message": self.message}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param)


def model_not_found(model: object) -> ApiError:
    """404, in vLLM's words."""
    return ApiError(404, f"The model `{model}` does not exist.", "model")


def too_long(limit: int, length: int, param: str) -> ApiError:
    """400 for a prompt that leaves no room for one token."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, your request has {length} input tokens. "
        "Please reduce the length of the input messages.",
        param,
    )
