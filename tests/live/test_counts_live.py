"""Token counts on a real vLLM, for the byte-level tokenizer of the shared server."""

from __future__ import annotations

from tests.live.counting import differences
from tests.live.harness import VllmServer


async def test_counts_are_those_of_the_server_and_bounds_never_below(vllm_server: VllmServer) -> None:
    compared, found = await differences(vllm_server)
    assert compared > 500
    assert found == []
