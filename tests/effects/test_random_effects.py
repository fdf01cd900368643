"""Random programs with effects are eager's (random_effects.py), and get Regions."""

from __future__ import annotations

from functools import cache

import pytest
from random_effects import made, tried, under_inductor
from sampling import chosen

COUNT = 150
BY_INDUCTOR = (0, 45, 90, 135)


@cache
def regions(seed: int) -> int:
    """Of a program that is right; fails with the source of one that is not."""
    m = made(seed)
    said, count, seconds = tried(m, inductor=seed in BY_INDUCTOR)
    if said:
        pytest.fail(f"seed {seed}: {said}\nInductor alone: {under_inductor(m) or 'right'}\n{m.source}")
    assert seconds < 10
    return count


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_program_is_eagers(seed: int) -> None:
    regions(seed)


@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
def test_most_random_programs_get_regions(whole: bool) -> None:
    """Otherwise the tests above would say little."""
    names = {f"{test_a_random_program_is_eagers.__name__}[{seed}]": seed for seed in range(COUNT)}
    found = [regions(names[name]) for name in (names if whole else chosen([*names]))]
    assert sum(found) >= 2 * len(found) and sum(not n for n in found) < 0.15 * len(found)
