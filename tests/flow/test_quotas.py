"""Quotas: what is refused burns nothing, Retry-After is exact, clocks that step back give nothing away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Reason
from gateway.flow.demand import Limits
from gateway.flow.quotas import Account


def test_in_flight_is_bounded_and_comes_back() -> None:
    account = Account(Limits(max_in_flight=2), 0.0)
    for _ in range(2):
        assert account.check(1, 0.0) is None
        account.take(1)
    refusal = account.check(1, 0.0)
    assert refusal is not None and refusal.reason is Reason.CONCURRENCY_LIMITED
    account.settle(1, 1)
    assert account.check(1, 0.0) is None


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 4000), st.floats(0, 40), st.integers(0, 100)), min_size=1, max_size=40),
)
def test_retry_after_is_exact_and_rejections_burn_nothing(quota: int, asks: list[tuple[int, float, int]]) -> None:
    account, now = Account(Limits(tokens_per_minute=quota), 0.0), 0.0
    granted = 0.0
    for tokens, gap, used in asks:
        now += gap
        refusal = account.check(tokens, now)
        if refusal is None:
            account.take(tokens)
            account.settle(tokens, min(used, tokens))
            granted += min(used, tokens)
        elif refusal.retry_after_s is None:
            assert tokens > quota
        else:
            wait = refusal.retry_after_s
            for _ in range(3):
                assert account.check(tokens, now) is not None
            probe = Account(Limits(tokens_per_minute=quota), now)
            assert probe.tokens is not None and account.tokens is not None
            probe.tokens.level = account.tokens.level
            assert probe.check(tokens, now + wait * 0.99 - 0.001) is not None or wait < 0.01
            assert probe.check(tokens, now + wait + 1e-6) is None
        assert granted <= quota * (1 + now / 60) + 1e-6


def test_a_clock_that_steps_back_refills_nothing() -> None:
    account = Account(Limits(requests_per_minute=1), 100.0)
    assert account.check(1, 100.0) is None
    account.take(1)
    for now in (70.0, 100.0, 40.0, 159.9):
        assert account.check(1, now) is not None
    assert account.check(1, 160.0) is None


def test_a_reload_keeps_what_was_used_of_a_quota_that_did_not_change() -> None:
    account = Account(Limits(requests_per_minute=1, tokens_per_minute=100), 0.0)
    account.take(10)
    account.adopt(Limits(requests_per_minute=1, tokens_per_minute=200), 0.0)
    assert account.tokens is not None and account.tokens.level == 200
    refusal = account.check(1, 0.0)
    assert refusal is not None and refusal.reason is Reason.RATE_LIMITED


def test_more_than_was_reserved_is_owed() -> None:
    account = Account(Limits(tokens_per_minute=600), 0.0)
    account.take(100)
    account.settle(100, 700)
    refusal = account.check(1, 0.0)
    assert refusal is not None and refusal.retry_after_s == 101 * 60 / 600
