from __future__ import annotations

import pytest

from gateway.flow.deadlines import caller_deadline, patience


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ((b"30", None, b"10"), 10.0),
        (("0.5",), 0.5),
        ((None, None), None),
        ((b"0", b"-3", b"nan", b"inf", b"soon", b"", b"\xff"), None),
        ((b"1e400", b"7"), 7.0),
        (("NOT_GIVEN", "60"), 60.0),
    ],
)
def test_the_least_positive_timeout_counts(stated: tuple[str | bytes | None, ...], seconds: float | None) -> None:
    assert patience(stated) == seconds


@pytest.mark.parametrize(("told", "at"), [(None, None), (1.0, 100.9), (100.0, 198.0), (0.05, 100.0)])
def test_the_answer_comes_a_little_before_the_caller_gives_up(told: float | None, at: float | None) -> None:
    assert caller_deadline(100.0, told) == at
