"""What a program overwrites, draws or does in an order, it does as in eager: outputs, mutated inputs, buffers,
gradients, random numbers and shared memory are eager's, in float64, with the Regions of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_programs import BESIDE, OTHER_SIZES, TABLES
from draw_programs import COLLECTIVES, DRAWS
from effect_programs import EFFECTS
from effect_reads import matrix
from late_programs import LATE
from programs import check, compiled, difference, inductor_is_right, inductor_is_wrong, of_way, off, rows, seen
from reinplaced_programs import REINPLACED

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes import tables

MATRIX = matrix()
ALL = MATRIX | EFFECTS | DRAWS | LATE | REINPLACED


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), rows(ALL, inductor_is_right))
def test_reads_see_what_was_there(name: str, train: bool) -> None:
    check(ALL[name], train)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), rows(ALL, inductor_is_wrong))
def test_also_where_inductor_is_wrong(name: str, train: bool) -> None:
    check(ALL[name], train)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "train"), rows(ALL, of_way("inductor")))
def test_through_inductor(name: str, train: bool) -> None:
    """Compiled to the end."""
    check(ALL[name], train, inductor=True)


@pytest.mark.parametrize(("name", "train"), rows(ALL, of_way("dynamic")))
def test_with_symbolic_sizes(name: str, train: bool) -> None:
    check(ALL[name], train, how={"dynamic": True})


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "train"), rows(COLLECTIVES))
def test_collectives_write(name: str, train: bool, one_rank: None) -> None:
    check(COLLECTIVES[name], train)


# ---- what is no Region


@pytest.mark.parametrize(("name", "train"), rows(BESIDE))
def test_what_stands_beside_attention_reads_what_was_there(name: str, train: bool) -> None:
    check(BESIDE[name], train, how={"sizes": OTHER_SIZES})


@pytest.mark.parametrize(("name", "train"), rows(TABLES))
def test_tables_read_what_was_there(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "WORTH", 1)
    monkeypatch.setattr(tables, "REPEATED", 2)
    check(TABLES[name], train, how={"sizes": OTHER_SIZES})
    assert sum(len(report.tables) for report in REPORTS) >= 1


# ---- autocast


@pytest.mark.parametrize(("name", "train"), rows(ALL, of_way("autocast")))
def test_under_autocast(name: str, train: bool) -> None:
    """About as exact as eager under autocast, against float64."""

    def cast(compile: Callable[[Any], Any], model: Any) -> Callable[..., Any]:
        run = compile(model)

        def call(*args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return run(*args)

        return call

    how: dict[str, Any] = {"dtype": torch.float32}
    exact = seen(ALL[name], lambda model: model, train)
    eager = seen(ALL[name], partial(cast, lambda model: model), train, **how)
    found = compiled(ALL[name], train, how=how, around=cast)
    assert difference(found.seen, eager, exact=1.0) == ""
    mine, theirs = off(found.seen.values, exact.values), off(eager.values, exact.values)
    assert all(mine[value] < 1.5 * error + 1e-3 for value, error in theirs.items()), (mine, theirs)
    assert found.regions >= 1 and not found.said
