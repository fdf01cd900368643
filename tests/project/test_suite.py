"""Which cases of a sampled test the suite runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import sample


class Item:
    """A collected case, as far as it is looked at."""

    def __init__(self, name: str, *markers: str) -> None:
        self.path, self.name, self.markers = Path("test_a.py"), name, {*markers}

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers

    def add_marker(self, name: str) -> None:
        self.markers.add(name)


@pytest.mark.parametrize(("cases", "stay"), [(1, 1), (3, 1), (5, 1), (6, 2), (40, 8)])
def test_one_in_five_stays(cases: int, stay: int) -> None:
    items: list[Any] = [Item(f"test_b[{i}]", "sampled") for i in range(cases)]
    sample(items)
    assert sum("slow" not in item.markers for item in items) == stay


def test_others_stay_and_what_is_slow_already_is_not_counted() -> None:
    named = [
        Item("test_b[slow]", "sampled", "slow"),
        Item("test_b[0]", "sampled"),
        Item("test_c[0]"),
        Item("test_c[1]"),
    ]
    items: list[Any] = named
    sample(items)
    assert ["slow" in item.markers for item in items] == [True, False, False, False]


def test_no_parameter_keeps_one_value() -> None:
    """Of two parameters of two values each, in any order, both values stay in some case."""
    items: list[Any] = [Item(f"test_b[{a}-{b}-{c}]", "sampled") for a in range(5) for b in (0, 1) for c in (0, 1)]
    sample(items)
    kept = [item.name for item in items if "slow" not in item.markers]
    assert len(kept) == 4 and {name[-4] for name in kept} == {name[-2] for name in kept} == {"0", "1"}
