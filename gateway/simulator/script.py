"""What a constrained answer says: the smallest JSON that satisfies a schema, and which tool is called.

Owns `instance_of` and `chosen_tool`. Pure. A recursive schema makes the real engine answer 500, and so it does here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.simulator.errors import ApiError

_MAX_DEPTH = 32
_MAX_ITEMS = 64


def instance_of(schema: Mapping[str, Any]) -> Any:
    """A value of `schema`: objects with what is required, first enum value, shortest list. ApiError 500 on recursion."""
    return _instance(schema, schema, 0)


def _instance(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ApiError(500, "Failed to compile the grammar: recursive schema")
    if not isinstance(schema, Mapping):
        return {}
    if "$ref" in schema:
        return _instance(_resolve(str(schema["$ref"]), root), root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for union in ("anyOf", "oneOf", "allOf"):
        if schema.get(union):
            return _instance(schema[union][0], root, depth + 1)
    return _typed(schema, root, depth)


def _typed(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "string":
            return "ship"
        case "integer" | "number":
            return schema.get("minimum", 7)
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [
                _instance(schema.get("items", {}), root, depth + 1)
                for _ in range(min(_MAX_ITEMS, int(schema.get("minItems", 1))))
            ]
    properties = schema.get("properties", {})
    wanted = schema.get("required", list(properties)) if isinstance(properties, Mapping) else []
    return {name: _instance(properties.get(name, {"type": "string"}), root, depth + 1) for name in wanted}


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            node = node.get(part, {}) if isinstance(node, Mapping) else {}
    return node


def structured_text(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None) -> str | None:
    """The text a constrained request produces; None when it is free. Raises ApiError."""
    schema: Any = None
    match (response_format or {}).get("type"):
        case "json_object":
            schema = {"properties": {"answer": {"type": "string"}, "items": {"type": "array", "items": {"type": "integer"}}}}
        case "json_schema":
            holder = (response_format or {}).get("json_schema") or {}
            schema = holder.get("schema", holder) if isinstance(holder, Mapping) else {}
    options = structured or {}
    if options.get("choice"):
        return str(options["choice"][0])
    if "grammar" in options:
        if "".join(str(options["grammar"]).split()) == "root::=root":
            raise ApiError(500, "Failed to compile the grammar: recursive rule")
        return "ship"
    if options.get("json"):
        schema = orjson.loads(options["json"]) if isinstance(options["json"], str) else options["json"]
    return None if schema is None else orjson.dumps(instance_of(schema)).decode()


def chosen_tool(tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None) -> tuple[str, str] | None:
    """(name, JSON arguments) of the tool that a `required` or named choice calls; None when none is called. Raises ApiError."""
    if choice in (None, "none", "auto"):
        return None
    functions = [tool.get("function", tool) for tool in tools or ()]
    if isinstance(choice, Mapping):
        name = (choice.get("function") or choice).get("name")
        functions = [function for function in functions if function.get("name") == name]
    if not functions:
        raise ApiError(400, "tool_choice names no tool of this request.", "tool_choice")
    function = functions[0]
    parameters = function.get("parameters") or function.get("input_schema") or {}
    return str(function.get("name")), orjson.dumps(instance_of(parameters)).decode()
