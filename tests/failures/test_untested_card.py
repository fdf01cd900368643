"""A target that no card has run: nothing is used unasked, and no wrong kernel comes into a user's graph, whichever way
it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import HERE, INNER, Half, close, half, left_to_inductor, raised, run, streams
from torch import Tensor
from untested_card import ROW, At1, At37, Everywhere, LastRow, Right, Swapped, Unwritten, untested_card

from coda_inductor.codegen.target import SM_90A
from coda_inductor.core import errors
from coda_inductor.core.settings import Settings
from coda_inductor.inductor import joint_pass
from coda_inductor.kernels import launch, proof
from coda_inductor.passes.switches import ATTENTION, ELEMENTWISE, LOSS, POSITIONS, WINDOWS

BF16 = torch.bfloat16
WRONG = "is wrong on this card: at M = "
pytestmark = pytest.mark.usefixtures("uncached")


def test_nobody_is_given_them_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One message says that there are kernels, that no such card has run them, how to get them and what to send."""
    untested_card(monkeypatch, tmp_path, asked=False)
    said = left_to_inductor("kernels for sm_100a are compiled, not yet run on such a card: they are used if asked for")[
        0
    ]
    assert "CODA_INDUCTOR_TARGET=sm_100a or options={'target': 'sm_100a'}" in said
    assert "`coda-inductor doctor --check`" in said and not launch.LAUNCHES
    raised(monkeypatch, "compiled, not yet run on such a card")


def test_another_cards_target_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    untested_card(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "sm_90a")
    left_to_inductor("the target sm_90a is for another card than this one, whose target is sm_100a")


@pytest.mark.parametrize("tune", ["quick", "off"])
def test_right_kernels_are_used_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tune: str
) -> None:
    untested_card(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune)
    model, x = half(BF16), streams(BF16)
    state = torch.get_rng_state()
    ran = run(model, *x)
    assert tune == "quick" or torch.equal(torch.get_rng_state(), state)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions and ran.regions[0] > 1
    kept = list((tmp_path / "kernels" / "proofs").glob("*.json"))
    assert len(kept) >= ran.regions[0]


@pytest.mark.sampled
@pytest.mark.parametrize("tune", ["quick", "off"])
@pytest.mark.parametrize("build", [LastRow, At37, At1, Unwritten, Everywhere])
def test_a_wrong_kernel_comes_into_no_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: type[Right], tune: str
) -> None:
    untested_card(monkeypatch, tmp_path, build)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune)
    found_by_tuning = tune == "quick" and build in (Everywhere, LastRow)
    said = left_to_inductor("is right: relative error" if found_by_tuning else WRONG)[0]
    assert HERE in said and not list((tmp_path / "kernels").rglob("*.json"))


def in_this_order(first: str, second: str) -> Half:
    """The model, whose gate and up lie in one tensor."""
    model = half(BF16)
    both = torch.cat([model.get_parameter(f"{name}.weight") for name in (first, second)]).detach()
    for name, part in zip((first, second), both.split(INNER), strict=True):
        model.get_submodule(name).weight = torch.nn.Parameter(part, requires_grad=False)
    return model


@pytest.mark.parametrize("tune", ["quick", "off"])
def test_wrong_for_the_other_order_of_weights_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tune: str) -> None:
    """Which order they have is known when the graph runs."""
    untested_card(monkeypatch, tmp_path, Swapped)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune)
    x = streams(BF16)
    for first, second, ok in (("gate", "up", True), ("up", "gate", False)):
        model = in_this_order(first, second)
        ran = run(model, *x)
        close(ran.output, model(*x).detach())
        assert ran.regions and ran.regions[0] > 1
        assert ran == [] if ok else (len(ran) == 1 and WRONG in ran[0] and "separate operations" in ran[0])
    assert sum(launch.FALLBACKS.values()) == 1


def another_process(monkeypatch: pytest.MonkeyPatch, directory: Path, build: type[Right]) -> None:
    """Begins, on the same store, with these kernels."""
    errors.said.clear()
    untested_card(monkeypatch, directory, build)


@pytest.mark.parametrize("tune", ["quick", "off"])
def test_what_is_remembered_is_proved_for_these_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tune: str
) -> None:
    """The same store, in which tiles and groups are remembered, after the compiler has made other kernels."""
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", tune)
    untested_card(monkeypatch, tmp_path)
    assert run(half(BF16), *streams(BF16)).regions[0] > 1
    for build in (At1, At37):
        another_process(monkeypatch, tmp_path, build)
        left_to_inductor(WRONG)


def test_a_proof_that_was_edited_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The right kernel's proof, made to speak of the wrong one's machine code, under the name that it would have."""
    untested_card(monkeypatch, tmp_path)
    assert run(half(BF16), *streams(BF16)).regions[0] > 1
    kept = [*(tmp_path / "kernels" / "proofs").glob("*.json")]
    another_process(monkeypatch, tmp_path, At1)
    code = proof.machine_code(planted(tmp_path, At1.__name__))
    for path in kept:
        facts = {**json.loads(path.read_text()), "code": code}
        told = {name: value for name, value in facts.items() if name not in ("errors", "seal")}
        proof.path_of(tmp_path / "kernels", told).write_text(json.dumps(facts))
    left_to_inductor(WRONG)


def planted(directory: Path, text: str) -> Path:
    """A folder of machine code as `Right` leaves it."""
    place = directory / "planted"
    (place / "made").mkdir(parents=True)
    (place / "made" / "kernel.o").write_text(text)
    return place


def test_a_proof_is_believed_by_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So nothing is compared again, of weights that lie in the same order."""
    untested_card(monkeypatch, tmp_path)
    first = run(in_this_order("gate", "up"), *streams(BF16))
    another_process(monkeypatch, tmp_path, Right)

    def again(*asked: Any, **how: Any) -> Any:
        raise AssertionError("compared again")

    monkeypatch.setattr(proof, "compared", again)
    second = run(in_this_order("gate", "up"), *streams(BF16))
    assert second == [] and second.regions == first.regions and torch.equal(second.output, first.output)


class WrongIfTiny(Right):
    """Wrong in the tiles for few rows."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if self.config in ROW.tiny:
            outs[0] *= 1.1


def test_another_bucket_is_proved_when_the_graph_meets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    untested_card(monkeypatch, tmp_path, WrongIfTiny)
    model = half(BF16)
    x = streams(BF16)
    for t in x:
        torch._dynamo.mark_dynamic(t, 0)
    ran = run(model, *x)
    assert ran == [] and ran.regions[0] > 1
    few = streams(BF16, 8)
    compiled = torch.compile(model, backend="coda", dynamic=True)
    with torch.no_grad():
        close(compiled(*x), model(*x).detach())
        with pytest.warns(RuntimeWarning, match=WRONG):
            found = compiled(*few)
        close(found, model(*few).detach())
    assert launch.FALLBACKS


def test_elementwise_passes_and_windows_stay_as_they_are() -> None:
    """No oracle compares their kernels on the card."""
    settings = Settings(target="auto", disable=frozenset({"gauge"}))
    assert joint_pass.within(settings, ROW).disable == {"gauge", ELEMENTWISE, WINDOWS, POSITIONS, ATTENTION, LOSS}
    assert joint_pass.within(settings, SM_90A) is settings
