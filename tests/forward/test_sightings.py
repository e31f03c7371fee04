from __future__ import annotations

from gateway.forward.sightings import MIXED_WINDOW_S, Sightings

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def see(*sights: tuple[str, str | None, float]) -> Sightings:
    seen = Sightings()
    for hash_, start, at in sights:
        seen = seen.see(hash_, start, at)
    return seen


def test_a_restart_with_another_configuration_is_not_a_mixture():
    seen = see((A, "1", 0), (A, None, 5), (B, "2", 6), (B, None, 7))
    assert seen.mixed(8) == ()
    assert seen.current is not None and seen.current.hash == B


def test_an_older_process_that_answers_again_is_a_mixture_until_it_is_gone_for_the_window():
    seen = see((A, "1", 0), (B, "2", 1), (A, None, 2), (B, None, 3))
    assert seen.mixed(3) == (A, B)
    later = seen.see(B, "2", 2 + MIXED_WINDOW_S - 0.1)
    assert later.mixed(2 + MIXED_WINDOW_S - 0.1) == (A, B)
    assert later.see(B, "2", 2 + MIXED_WINDOW_S).mixed(2 + MIXED_WINDOW_S) == ()


def test_going_back_to_the_first_configuration_by_a_restart_is_not_a_mixture():
    assert see((A, "1", 0), (B, "2", 5), (A, "3", 9), (A, None, 10)).mixed(10) == ()


def test_two_hashes_that_alternate_in_headers_only_are_a_mixture():
    assert see((A, None, 0), (B, None, 1), (A, None, 2)).mixed(2) == (A, B)


def test_memory_is_bounded():
    seen = Sightings()
    for n in range(1000):
        seen = seen.see(f"sha256:{n:064x}", str(n), n * 0.001)
    assert len(seen.processes) <= 8
