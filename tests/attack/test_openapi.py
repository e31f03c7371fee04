"""The operators' interface does what its own document says, whatever an operator sends: schemathesis makes the requests."""

from __future__ import annotations

import asyncio

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.edge import openapi
from tests.support.gateway import KEYS

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def play(base: str, document: str, role: str, key: str, examples: int) -> dict[str, int]:
    """Requests to the listener at `base`, on each operation that a role may use; how many, by operation.

    Every other body that names a model names one that is there, so that more than the refusal of a name is met.
    """
    schema = schemathesis.openapi.from_url(document, headers={"authorization": f"Bearer {KEYS['operator']}"})
    headers, made = {"authorization": f"Bearer {key}"}, dict[str, int]()
    for found in schema.get_all_operations():
        operation = found.ok()
        raw = operation.definition.raw
        if role not in raw["x-roles"] or ("operator" in raw["tags"]) != (role == "operator"):
            continue

        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            made[case.operation.label] = count = made.get(case.operation.label, 0) + 1
            if isinstance(case.body, dict) and "model" in case.body and count % 2:
                case.body["model"] = "tiny"
            answer = case.call(base_url=base, headers=headers, timeout=10)
            case.validate_response(answer, checks=CHECKS)

        check()
    return made


async def test_operators_routes_conform(fort):
    base = f"http://127.0.0.1:{fort.gateway.admin_port}"
    made = await asyncio.to_thread(play, base, f"{base}/openapi.json", "operator", KEYS["operator"], 12)
    document = openapi.document("any")
    operators = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if "operator" in operation.get("tags", ())
    }
    assert set(made) == operators - {"GET /openapi.json"}  # the document itself was read to begin with
    assert sum(made.values()) > 40
    assert fort.calls == 0
