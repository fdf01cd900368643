"""What shares memory in eager shares it when compiled, nothing else does: outputs, inputs, parameters and buffers."""

from __future__ import annotations

import pytest
from alias_programs import ALIASES
from programs import check, of_way, rows


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), rows(ALIASES))
def test_memory_is_shared_as_in_eager(name: str, train: bool) -> None:
    """Seen by the storages, and by what the caller writes to each output."""
    check(ALIASES[name], train)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), rows(ALIASES, of_way("inductor")))
def test_through_inductor(name: str, train: bool) -> None:
    check(ALIASES[name], train, inductor=True)


@pytest.mark.parametrize(("name", "train"), rows(ALIASES, of_way("dynamic")))
def test_with_symbolic_sizes(name: str, train: bool) -> None:
    check(ALIASES[name], train, how={"dynamic": True})
