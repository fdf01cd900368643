"""Planning: what becomes a Region and what does not, with which inputs and outputs, and for what reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import captured, compiled, read
from odd_programs import ODD
from small_tensors import rms
from torch import Tensor
from zoo import Decoder, Shape, token_ids

from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import Region
from coda_inductor.patterns.lift import lift
from coda_inductor.plan import search
from coda_inductor.plan.build import build
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Conflict, Draft, cycle
from coda_inductor.plan.plan import Plan
from coda_inductor.plan.search import plan
from coda_inductor.rewrite.derive import derive
from coda_inductor.rewrite.laws import LAWS
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.program import Program

ALL = frozenset(law.name for law in LAWS)


def R(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def planned(function: Callable[..., Any], *args: Any, laws: frozenset[str] = ALL, **given: Any) -> Plan:
    (graph,) = captured(function, *args)
    return plan(lift(graph.graph), laws, **given)


def regions(made: Plan) -> list[Region]:
    return [build(made, draft).region for draft in made.unique()]


def summary(region: Region) -> tuple[int, list[str], int, int]:
    """Products, the extents of the operands, stores, sums."""
    return len(region.products), sorted(o.extent for o in region.operands), len(region.stores), len(region.reductions)


def half(a: Tensor, x: Tensor, g: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """From attention's output to the end of a Llama layer."""
    h = x + F.linear(a, o)
    n = rms(h) * g
    return h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)


HALF = tuple((2, 6, 8) if i < 2 else s for i, s in enumerate(((), (), (8,), (8, 8), (12, 8), (12, 8), (8, 12))))


def half_inputs() -> tuple[Tensor, ...]:
    return tuple(R(*shape) for shape in HALF)


def test_half_a_layer_is_the_program_of_the_paper() -> None:
    """o-proj: residual and gain in, stream and scaled stream out, and a sum of squares; gate and up as one product with
    the row's factor; down with the residual. Nothing is left but these."""
    made = planned(half, *half_inputs())
    assert [summary(r) for r in regions(made)] == [
        (1, ["feature", "tile"], 2, 1),
        (2, ["token"], 1, 0),
        (1, ["tile"], 1, 0),
    ]
    assert not made.refused
    pair = regions(made)[1]
    assert pair.products[0].a == pair.products[1].a  # both read the one scaled stream
    assert "sigmoid" in [let.op for let in pair.lets] and "rsqrt" in [let.op for let in pair.lets]


def test_without_the_laws_the_norm_stays_a_pass() -> None:
    for laws in (frozenset[str](), ALL - {"bilinearity"}):
        made = planned(half, *half_inputs(), laws=laws)
        assert not made.firings
        # The sum of squares still leaves o-proj's epilogue; what is scaled by it does not.
        assert [summary(r) for r in regions(made)][1:] == [(2, [], 1, 0), (1, ["tile"], 1, 0)]
        assert any("its own product is still making" in r.reason for r in made.refused)


def test_without_the_gauge_an_operand_of_two_readers_stays() -> None:
    assert not planned(half, *half_inputs(), laws=ALL - {"gauge"}).firings

    def one_reader(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return rms(x @ w) @ v

    assert len(planned(one_reader, R(12, 6), R(6, 8), R(8, 4), laws=ALL - {"gauge"}).firings) == 1


def test_a_banned_product_is_left_with_the_given_reason() -> None:
    made = planned(half, *half_inputs(), limits=Limits({0: "it lost"}))
    assert all(0 not in {a.bit for a in d.space.accs} for d in made.unique())
    assert "it lost" in {r.reason for r in made.refused}


def test_an_undeferred_product_reads_what_the_user_wrote() -> None:
    made = planned(half, *half_inputs(), limits=Limits(undeferred=0b10))
    assert not made.firings


def test_bare_products_are_not_regions() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return x @ w, torch.addmm(b, x, 2 * w), (x @ (3 * w)).view(2, 6, 8).transpose(0, 1)

    assert not planned(f, R(12, 6), R(6, 8), R(8)).unique()


def test_equal_layers_are_equal_regions() -> None:
    """The key of a kernel says nothing of where its Region stands."""
    torch.manual_seed(0)
    model = Decoder(Shape(layers=4)).double().eval()
    _, (report,) = compiled(model, token_ids(), run=False)
    digests = [site.region.digest for site in report.sites]
    assert len(digests) == 6 * 4 - 3 + 1
    assert len(set(digests)) <= 6


def test_planning_twice_gives_the_same_program() -> None:
    model = Decoder(Shape(norm="LayerNorm", bias=True, kv=2, layers=3)).double().eval()
    ids = token_ids()
    texts = [[site.region.text for r in compiled(model, ids, run=False)[1] for site in r.sites] for _ in range(2)]
    assert texts[0] == texts[1] and texts[0]


@pytest.mark.parametrize("name", ["cross_norm", "cross_opaque", "cross_three", "cross_norm_then"])
def test_regions_never_wait_for_each_other(name: str) -> None:
    function, inputs = ODD[name]
    made = planned(function, *inputs())
    drafts = made.unique()
    assert drafts and not cycle([d.deps & ~d.space.mask for d in drafts], [d.space.mask for d in drafts])
    assert any("wait for each other" in r.reason for r in made.refused)


REASONS: dict[str, Callable[..., Any]] = {
    "still making": lambda x, w, v: rms(x @ w),
    "runs later": lambda x, w, v: (x @ w) * (x @ w).cumsum(0),
    "not two halves": lambda x, w, v: (x @ w).view(8, 4, 2)[..., 0].relu() * (x @ w).view(8, 4, 2)[..., 1],
    "halves are needed as well": lambda x, w, v: (torch.relu((x @ w)[:, :4]) * (x @ w)[:, 4:], torch.relu(x @ w)),
    "more than two products": lambda x, w, v: ((x @ w) * (x @ v), (x @ v) * (x @ (w * v)), (x @ w) * (x @ (w * v))),
    "its memory order": lambda x, w, v: torch.relu((x @ w).t().contiguous()),
    "other axes than its product": lambda x, w, v: torch.relu((x @ w)[None] * v[:1].t()[:, :, None]),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_left_has_a_reason(reason: str) -> None:
    made = planned(REASONS[reason], R(8, 8), R(8, 8), R(8, 8))
    assert any(reason in r.reason for r in made.refused), [r.reason for r in made.refused]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ODD)
def test_planning_settles_and_is_well_formed(name: str) -> None:
    """Every Region of every odd graph verifies, and no node is supplied twice."""
    for r in read("odd", name):
        made = plan(r.lifted)
        assert all(build(made, draft).region for draft in made.unique())
        supplied = [n for d in made.unique() for n in d.supplies]
        assert len(supplied) == len(set(supplied))


def test_a_conflict_while_building_is_planned_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building asks once more where everything comes from: what excludes each other then is decided again, too."""
    raised = list[Draft]()

    def conflicting(made: Plan, draft: Draft) -> Built:
        if len(raised) < 2 and len(draft.space.accs) == 2:
            raised.append(draft)
            bits = [a.bit for a in draft.space.accs]
            if len(raised) == 1:
                raise Conflict(Limits(undeferred=sum(1 << bit for bit in bits)))
            raise Conflict(Limits(dict.fromkeys(bits, "it excludes another")))
        return build(made, draft)

    whole = planned(half, *half_inputs())
    monkeypatch.setattr(search, "build", conflicting)
    made = planned(half, *half_inputs())
    assert [len(b.region.products) for b in whole.builts] == [1, 2, 1]
    assert [len(b.region.products) for b in made.builts] == [1, 1]  # gate and up are Inductor's now
    assert whole.firings and not any(f.product in (1, 2) for f in made.firings) and len(raised) == 2
    monkeypatch.setattr(search, "build", _never)
    with pytest.raises(BrokenInvariant, match="does not settle"):
        planned(half, *half_inputs())


def _never(made: Plan, draft: Draft) -> Built:
    raise Conflict(Limits(undeferred=1))


def test_questions_change_nothing() -> None:
    """Also before demand is worked off: of a plan under way, of which nothing is decided yet."""
    (graph,) = captured(half, *half_inputs())
    lifted = lift(graph.graph)
    program = Program(lifted)
    made = Plan(program, derive(program, ALL))
    terms = [program.new[t] for t in lifted.term.values()]

    def state() -> object:
        drafts = [(d.space.accs, list(d.stores), list(d.sums), dict(d.supplies)) for d in made.drafts.values()]
        return drafts, set(made.kept), set(made.sums), list(made._todo), dict(made.combined)

    def ask() -> int:
        answers = 0
        for t in terms:
            for space in [d.space for d in made.drafts.values()] or [program.space(a) for a in program.wholes]:
                with contextlib.suppress(Unsupported, Conflict):
                    answers += made.where(t, space) is not None
        for acc in program.wholes:
            with contextlib.suppress(Unsupported, Conflict):
                answers += made.operand(acc) is not None
        return answers

    for _ in range(2):
        before = state()
        assert ask() > 10 and state() == before
        made.run()
