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
HEADERS = {"authorization": f"Bearer {KEYS['operator']}"}


def play(base: str) -> dict[str, int]:
    """Requests made, by operation."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json", headers=HEADERS)
    made: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if "operator" not in operation.definition.raw.get("tags", ()):
            continue

        @settings(
            max_examples=12, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            made[case.operation.label] = made.get(case.operation.label, 0) + 1
            answer = case.call(base_url=base, headers=HEADERS, timeout=10)
            case.validate_response(answer, checks=CHECKS)

        check()
    return made


async def test_operators_routes_conform(fort):
    made = await asyncio.to_thread(play, f"http://127.0.0.1:{fort.gateway.admin_port}")
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
