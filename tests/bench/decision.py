"""Microseconds of processor time that a decision takes: `python -m tests.bench.decision`. Prints one JSON document.

`pair`: one enqueue and one grant, which are two decisions, with a thousand requests waiting. `through`: a request that is granted
at once, and its settlement. `growth`: how much more a pair costs with ten thousand waiting than with ten.
"""

from __future__ import annotations

import json
import time

from gateway.flow import controller as flow
from gateway.flow.grant import Grant
from tests.flow.helpers import box, controller, demand
from tests.flow.test_flow_cost import median_cost


def through() -> float:
    """Seconds for a request and its settlement."""
    made, asked = controller(box(concurrency=64)), demand()
    begun = time.process_time()
    for _ in range(500):
        answer = made.request(asked, 1.0)
        assert isinstance(answer, Grant)
        answer.settle(1.0, 100, 20)
    return (time.process_time() - begun) / 500


def main() -> None:
    pairs = median_cost(1000, 20, 5000)
    short, long = median_cost(10, 10, 400), median_cost(10_000, 200, 400)
    print(json.dumps({
        "compiled": flow.__file__.endswith(".so"),
        "pair_us": {"p50": round(pairs[2500] * 1e6, 1), "p99": round(pairs[4950] * 1e6, 1)},
        "through_us": round(min(through() for _ in range(200)) * 1e6, 2),
        "growth": round(long[200] / short[200], 2),
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
