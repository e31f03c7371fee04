"""Reading single numbers out of a Prometheus text exposition, without building all of it: it is polled while vLLM is busy."""

from __future__ import annotations

import math


def total(exposition: bytes, name: str) -> float | None:
    """The sum over all label sets of the samples called exactly `name`; None when there is none that is a finite number."""
    wanted, found = name.encode("ascii"), None
    for line in exposition.split(b"\n"):
        if not line.startswith(wanted) or line[len(wanted) : len(wanted) + 1] not in (b"{", b" "):
            continue
        try:
            value = float(line[line.rfind(b"}") + 1 :].split()[0] if b"}" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            found = value + (found or 0.0)
    return found
