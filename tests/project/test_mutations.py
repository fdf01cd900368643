"""The tests tested: with one guard broken, the check that stands for it fails. Each check is first seen to pass."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from codegen_cases import bias_sums, lane_sums, random_inputs, softmax_sum, weighted_sums
from compiling import pretend
from evaluate import Read, captured
from odd_programs import ODD
from simulated_epilogues import agree, run
from torch import Tensor, fx
from zoo import CASES, Case

from coda_inductor.codegen import source
from coda_inductor.core.region import Region
from coda_inductor.passes import parts, plain
from coda_inductor.patterns import graph as g
from coda_inductor.patterns import slices
from coda_inductor.patterns.axes import Axes
from coda_inductor.patterns.infer import Reading
from coda_inductor.patterns.lift import Lifted
from coda_inductor.patterns.terms import Term, Terms
from coda_inductor.plan import plan, search
from coda_inductor.plan.build import build
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Draft
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite import derive, joint_sums, separate
from coda_inductor.rewrite.laws import LAWS
from coda_inductor.rewrite.limits import NONE
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.space import Space
from coda_inductor.write.vectors import Vectors

sys.path += map(str, Path(__file__).parents[1].glob("*/"))  # the folders of the tests that are tested
import test_bare
import test_laws
import test_lift
import test_row_orders
import test_training_bf16
import test_training_laws
import test_whole_graphs


@pytest.fixture
def mutate() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def table(name: str) -> Callable[[], None]:
    """test_whole_graphs.test_the_table, without Inductor's code generation."""

    def check() -> None:
        model, args = case(name).build()
        reports = test_whole_graphs.check(model, *args)
        assert test_whole_graphs.regions(reports) == (case(name).regions, case(name).deferred)

    return check


def odd(name: str) -> Callable[[], None]:
    return lambda: test_whole_graphs.test_odd_graphs(name)


def rows(name: str, sizes: tuple[int, ...] = ()) -> Callable[[], None]:
    return lambda: test_row_orders.test_rows_in_another_order(name, sizes)


def truth(model: Callable[..., Any], *args: Any) -> None:
    """test_lift.test_every_term_is_its_nodes_value, read anew."""
    for graph in captured(model, *args):
        assert test_lift.untrue(Read(graph)) == []


def lifted(name: str) -> Callable[[], None]:
    def check() -> None:
        torch.manual_seed(0)
        function, inputs = ODD[name]
        truth(function, *inputs())

    return check


def refused(i: int) -> Callable[[], None]:
    return lambda: test_laws.test_no_law_fires_where_it_refuses(LAWS[0], i, True)


def firings(name: str) -> Callable[[], None]:
    """test_laws.test_firings_are_equalities, read anew."""

    def check() -> None:
        model, args = case(name).build()
        for graph in captured(model, *args):
            test_laws.check_firings(Read(graph))

    return check


def expect_red(
    patch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None]
) -> None:
    check()
    break_it(patch)
    with pytest.raises(Exception) as failure:
        check()
    assert "mutation did not apply" not in str(failure.value)


# Each mutation breaks one thing.


def factors_may_vary_over_the_contracted_axis(patch: pytest.MonkeyPatch) -> None:
    def is_late(t: Term, makers: int, over: Any) -> bool:
        return bool(t.deps & makers) and not t.hosts & makers

    patch.setattr(separate, "is_late", is_late)
    patch.setattr(derive, "is_late", is_late)


def the_gauge_is_flipped(patch: pytest.MonkeyPatch) -> None:
    """The product is multiplied by 1 / r."""

    def flipped(terms: Terms, x: Term, makers: int, over: tuple[int, ...]) -> list[separate.Part]:
        parts = separate.separate(terms, x, makers, over)
        return [separate.Part(terms.power(p.late, terms.const(-1.0).coefficient), p.rest) for p in parts]

    patch.setattr(derive, "separate", flipped)


def the_shift_is_not_added_back(patch: pytest.MonkeyPatch) -> None:
    shifted = derive._shifted
    patch.setattr(
        derive, "_shifted", lambda program, tile, vectors, over: (shifted(program, tile, vectors, over)[0], vectors)
    )


def an_operand_is_deferred_though_others_need_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plan, "_settle", lambda self: None)


def regions_may_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "cycle", lambda waits, masks: [])
    patch.setattr(search, "circular", lambda made: NONE)


def a_sum_is_read_as_it_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vectors, "_turned", lambda self, node, made, rows: node)


def any_rows_can_be_turned_to_any(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifted, "can_permute", lambda self, order, wanted: True)


def a_sum_may_be_used_by_its_own_product(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Program, "check", lambda self, t, space: None)


def any_products_share_an_epilogue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Program, "_shares", lambda self, acc, last: True)
    patch.setattr(Program, "_same_features", lambda self, acc, last: True)


def everything_lies_as_its_dimensions(patch: pytest.MonkeyPatch) -> None:
    def as_it_is(self: Program, node: Any, space: Space) -> list[int]:
        return list(range(node.meta["val"].dim()))

    patch.setattr(Program, "turn", as_it_is)


def an_axis_may_stand_twice_in_a_tensor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Axes, "occupy", lambda self, tensor, ids: None)


def halves_are_swapped(patch: pytest.MonkeyPatch) -> None:
    lane = slices.lane

    def swapped(node: Any) -> Any:
        part = lane(node)
        return part and (*part[:3], part[2] - 1 - part[3])

    patch.setattr(slices, "lane", swapped)


def parts_are_swapped(patch: pytest.MonkeyPatch) -> None:
    sliced = parts.sliced

    def swapped(writing: Any, right: Any, dim: int, start: int, stop: int) -> Any:
        width = right.meta["val"].shape[dim]
        return sliced(writing, right, dim, width - stop, width - start)

    patch.setattr(parts, "sliced", swapped)


def transposes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    roots = Reading.roots
    patch.setattr(Reading, "roots", lambda self, node: roots(self, node)[::-1])


def a_root_of_a_square_is_the_value(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("coda_inductor.patterns.terms.positive", lambda t: True)


def rebuilt(change: Callable[[Region], Region]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        changed = []

        def built(plan: Plan, draft: Draft) -> Built:
            made = build(plan, draft)
            made.region = change(made.region)
            changed.append(made.region)
            return made

        patch.setattr(search, "build", built)

    return apply


def _swap_statement(region: Region) -> Region:
    swap = {"add": "mul", "mul": "add", "rsqrt": "sqrt"}
    lets = tuple(dataclasses.replace(x, op=swap.get(x.op, x.op)) if i == 0 else x for i, x in enumerate(region.lets))
    return dataclasses.replace(region, lets=lets)


def _swap_stores(region: Region) -> Region:
    return dataclasses.replace(region, stores=region.stores[::-1])


def _drop_store(region: Region) -> Region:
    return dataclasses.replace(region, stores=region.stores[1:] or region.stores)


def _swap_weights(region: Region) -> Region:
    first, *others = region.products
    if not others:
        return region
    second = others[0]
    swapped = (dataclasses.replace(first, b=second.b), dataclasses.replace(second, b=first.b))
    return dataclasses.replace(region, products=swapped)


a_statement_is_swapped, stores_are_swapped = rebuilt(_swap_statement), rebuilt(_swap_stores)
a_store_is_dropped, weights_are_swapped = rebuilt(_drop_store), rebuilt(_swap_weights)


def what_is_rounded_once_is_read_rounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(g, "only_rounded", lambda node: True)


def a_transposed_left_operand_is_read_in_rows(patch: pytest.MonkeyPatch) -> None:
    original = plain.as_region

    def as_region(node: fx.Node) -> Any:
        if (found := original(node)) is None:
            return None
        (product,) = found[0].products
        return dataclasses.replace(found[0], products=(dataclasses.replace(product, a_layout="mk"),)), found[1]

    patch.setattr(plain, "as_region", as_region)


def bare_gradients() -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        TemporaryDirectory() as folder,
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        pretend(patch, Path(folder))
        patch.setattr(plain, "DEEP_LEAST", 64)
        test_bare.as_good_as_eager(*test_bare.step())


def products_add_up_whatever_they_weigh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(joint_sums, "_ratio", lambda program, whole, con, weight: program.lifted.terms.const(1.0))


def adapters() -> None:
    test_training_laws.test_each_firing_is_an_equality("adapters")


def autocast(name: str) -> Callable[[], None]:
    return lambda: test_training_bf16.test_gradients_under_autocast_are_about_as_exact_as_eagers(name)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (factors_may_vary_over_the_contracted_axis, refused(0)),
    (factors_may_vary_over_the_contracted_axis, refused(1)),
    (the_gauge_is_flipped, firings("norm: hf")),
    (the_gauge_is_flipped, table("norm: hf")),
    (the_gauge_is_flipped, firings("norm: LayerNorm")),
    (the_shift_is_not_added_back, firings("norm: LayerNorm")),
    (the_shift_is_not_added_back, table("norm: LayerNorm")),
    (an_operand_is_deferred_though_others_need_it, table("normalised stream returned")),
    (regions_may_wait_for_each_other, odd("cross_norm")),
    (regions_may_wait_for_each_other, odd("cross_opaque")),
    (a_sum_is_read_as_it_leaves, rows("norm_behind_windows")),
    (any_rows_can_be_turned_to_any, rows("held_in_the_readers_order", (0, 1, 2))),
    (a_sum_may_be_used_by_its_own_product, odd("norm_and_transposed")),
    (any_products_share_an_epilogue, table("norm: hf")),
    (everything_lies_as_its_dimensions, odd("rearranged")),
    (an_axis_may_stand_twice_in_a_tensor, lifted("all_same")),
    (an_axis_may_stand_twice_in_a_tensor, lifted("same_sizes_sq")),
    (an_axis_may_stand_twice_in_a_tensor, odd("lora")),
    (an_axis_may_stand_twice_in_a_tensor, odd("square_bias")),
    (halves_are_swapped, lifted("half_only")),
    (parts_are_swapped, table("mlp: chunk")),
    (transposes_are_forgotten, lifted("xxt")),
    (a_root_of_a_square_is_the_value, lifted("domains")),
    (a_statement_is_swapped, table("norm: hf")),
    (stores_are_swapped, table("norm: hf")),
    (a_store_is_dropped, table("norm: hf")),
    (weights_are_swapped, table("norm: hf")),
    (what_is_rounded_once_is_read_rounded, autocast("bert")),
    (a_transposed_left_operand_is_read_in_rows, bare_gradients),
    (products_add_up_whatever_they_weigh, adapters),
]


@pytest.mark.parametrize("i", range(len(MUTATIONS)), ids=lambda i: f"{MUTATIONS[i][0].__name__}-{i}")
@pytest.mark.sampled
def test_a_broken_guard_is_seen(i: int, mutate: pytest.MonkeyPatch) -> None:
    expect_red(mutate, *MUTATIONS[i])


def no_sum_is_masked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(source, "needs_mask", lambda region, total: False)


def vectors_end_with_zeros(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(source, "_read_past", lambda operand, over: 0.0)


def masks_look_past_the_other_axis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(source, "REAL", {"N": "feature", "M": "token"})


@pytest.mark.parametrize(
    ("make", "break_it"),
    [
        (softmax_sum, no_sum_is_masked),
        (lane_sums, no_sum_is_masked),
        (bias_sums, no_sum_is_masked),
        (bias_sums, masks_look_past_the_other_axis),
        (weighted_sums, vectors_end_with_zeros),
    ],
)
def test_an_unmasked_ragged_sum_is_seen(
    make: Callable[[int, int], Region], break_it: Callable[[pytest.MonkeyPatch], None], mutate: pytest.MonkeyPatch
) -> None:
    region = make(24, 16)
    inputs: list[Tensor] = random_inputs(region, 5, "cpu")

    def check() -> None:
        assert agree(region, run(source.render(region), region, inputs), inputs)

    expect_red(mutate, break_it, check)


def test_space_is_what_the_mutations_take_it_for() -> None:
    """A guard that moves takes its mutation with it: the names that are patched above exist."""
    assert {f.name for f in dataclasses.fields(Space)} == {"accs", "rows", "columns", "heads"}
    for owner, names in (
        (Plan, ("_settle", "rows")),
        (plan, ("cycle",)),
        (Lifted, ("can_permute",)),
        (Vectors, ("_turned",)),
        (Program, ("check", "_shares", "turn")),
        (Axes, ("occupy", "unify")),
        (g, ("only_rounded",)),
        (plain, ("as_region",)),
    ):
        assert all(callable(getattr(owner, name)) for name in names)
