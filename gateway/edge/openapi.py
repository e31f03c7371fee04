"""The OpenAPI 3.1 document of both listeners, served to operators at /openapi.json.

Owns its text. Paths, methods and roles come from the route table, the operators' bodies from their schemas, so that the
document cannot name what does not exist. Pure.
"""

from __future__ import annotations

from typing import Any

from gateway.edge import admin_schema
from gateway.edge.responses import status_of
from gateway.edge.routes import MODEL, ROUTES, Route
from gateway.errors import Reason

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_MESSAGES: Json = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}}
_INPUT: Json = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_MAX: Json = {"type": "integer", "minimum": 1}
# The fields each reader needs or is mostly used with; the full allow-list is enforced by the gateway.
_BODIES: dict[str, tuple[list[str], Json]] = {
    "chat": (["model", "messages"], {"messages": _MESSAGES, "max_completion_tokens": _MAX, "stream": {"type": "boolean"}}),
    "completions": (["model", "prompt"], {"prompt": _INPUT, "max_tokens": _MAX, "stream": {"type": "boolean"}}),
    "responses": (["model", "input"], {"input": _TEXT, "max_output_tokens": _MAX, "stream": {"type": "boolean"}}),
    "messages": (["model", "messages", "max_tokens"], {"messages": _MESSAGES, "max_tokens": _MAX}),
    "embeddings": (["model", "input"], {"input": _INPUT}),
    "rerank": (["model", "query", "documents"], {"query": _TEXT, "documents": {"type": "array", "items": _TEXT}}),
    "score": (["model", "text_1", "text_2"], {"text_1": _INPUT, "text_2": _INPUT}),
    "tokenize": (["model"], {"prompt": _TEXT, "messages": _MESSAGES}),
    "detokenize": (["model", "tokens"], {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}),
    "count_tokens": (["model", "messages"], {"messages": _MESSAGES}),
}
_ADMIN: list[tuple[str, str, str, type[Any] | None]] = [
    ("get", "/admin/status", "Backends, verdicts, what is in flight, queues and breakers", None),
    ("get", "/admin/records", "The evidence records in the store", None),
    ("post", "/admin/records", "Push a record; the answer has its verdict on each backend", None),
    ("get", "/admin/retest", "Demand and changes outside the measured slices", None),
    ("post", "/admin/retest/plan", "The plan that would cover a share of that demand", admin_schema.PlanRequest),
    ("post", "/admin/explain", "Would a request be admitted now, and why", admin_schema.ExplainRequest),
    ("post", "/admin/reload", "Read the policy file again", None),
    ("get", "/admin/journal", "The latest requests that were not served, and why", None),
    ("get", "/admin/audit", "The latest actions of operators", None),
    ("post", "/admin/backends/{name}/drain", "Admit nothing more to a backend", None),
    ("post", "/admin/backends/{name}/undrain", "Admit to it again", None),
    ("post", "/admin/backends/{name}/reset-breaker", "Close a backend's breaker", None),
    ("get", "/console", "All of this as a page", None),
    ("get", "/openapi.json", "This document", None),
]


def document(version: str) -> Json:
    """The whole document."""
    paths: dict[str, Json] = {}
    for raw, route in ROUTES.items():
        paths.setdefault(raw.decode(), {})[route.method.lower()] = _public(route)
    paths["/v1/models/{id}"] = {"get": _public(MODEL) | {"parameters": [_parameter("id")]}}
    for method, path, summary, body in _ADMIN:
        paths.setdefault(path, {})[method] = _operator(method, path, summary, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Plimsoll", "version": version, "description": "Capacity-aware admission in front of vLLM."},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error(), "Message": _message()},
        },
    }


def _public(route: Route) -> Json:
    operation: Json = {
        "operationId": route.name,
        "tags": [route.kind],
        "x-roles": sorted(route.roles),
        "responses": _answers(_RELAYED if route.kind == "proxy" else _LOCAL),
    }
    if route.parser in _BODIES:
        required, properties = _BODIES[route.parser]
        schema = {"type": "object", "required": required, "properties": {"model": _TEXT, **properties}}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif route.method == "POST":
        parts = {"file": {"type": "string", "format": "binary"}, "model": _TEXT}
        schema = {"type": "object", "required": ["file", "model"], "properties": parts}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return operation


def _operator(method: str, path: str, summary: str, body: type[Any] | None) -> Json:
    operation: Json = {
        "operationId": f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": summary,
        "tags": ["operator"],
        "x-roles": ["operator"],
        "responses": _answers(_LOCAL),
    }
    if "{name}" in path:
        operation["parameters"] = [_parameter("name")]
    if path == "/admin/journal":
        fields = admin_schema.JournalQuery.model_json_schema()["properties"]
        operation["parameters"] = [{"name": n, "in": "query", "schema": s} for n, s in fields.items()]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}
    elif path == "/admin/records" and method == "post":
        record = {"type": "object", "description": "A capacity-evidence-record/v1"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": record}}}
    return operation


_LOCAL = (
    Reason.INVALID_BODY, Reason.INVALID_API_KEY, Reason.NOT_PERMITTED, Reason.MODEL_NOT_FOUND, Reason.METHOD_NOT_ALLOWED,
    Reason.REQUEST_TIMEOUT, Reason.BODY_TOO_LARGE, Reason.UNSUPPORTED_ENCODING, Reason.RATE_LIMITED, Reason.NO_QUALIFIED_RECORD,
)  # fmt: skip
_RELAYED = (*_LOCAL, Reason.UPSTREAM_RESET, Reason.EXECUTION_TIMEOUT)


def _answers(reasons: tuple[Reason, ...]) -> Json:
    error = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    answers: Json = {"200": {"description": "The answer"}, "201": {"description": "Something new was stored"}}
    return answers | {str(status): error for status in sorted({status_of(reason) for reason in reasons})}


def _parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _error() -> Json:
    codes = {"type": "string", "enum": [reason.value for reason in Reason if reason is not Reason.OK]}
    fields = {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": codes}
    inner = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


def _message() -> Json:
    role = {"type": "string", "enum": ["system", "user", "assistant"]}
    return {"type": "object", "required": ["role", "content"], "properties": {"role": role, "content": _TEXT}}
