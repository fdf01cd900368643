"""What a kernel is compared on before a graph gets it, when, and whether what is kept of it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import CASES, bias_sums, blank_outputs, random_inputs, swiglu, token_scale, turned_left
from torch import Tensor
from untested_card import ROW, At1, Everywhere, Outs, Right, Swapped, Unwritten, untested_card

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Let, Region
from coda_inductor.core.verify import verify
from coda_inductor.kernels import launch, library, proof, record, store
from coda_inductor.kernels.entries import PATHS
from coda_inductor.measure import tune

TILE = Config(128, 128, 1, 1, False)
CPU = torch.device("cpu")


class Lying(Right):
    """Looks at how its weights lie, too."""

    def __call__(self, inputs: Any, outs: Outs) -> None:
        first, *others = self.region.products
        for p in others if not self.region.half else ():
            assert (inputs[p.b].data_ptr() < inputs[first.b].data_ptr()) == self.swapped
        for i, j in zip(*first.pairs, strict=True) if self.region.summed else ():
            assert inputs[i].stride() == inputs[j].stride() and inputs[i].data_ptr() != inputs[j].data_ptr()
        assert all(bool((out == 0 if self.region.adds else out.isnan()).all()) for out in outs if out is not None)
        assert None not in outs
        assert not any(bool(x.isnan().any()) for x in inputs)
        super().__call__(inputs, outs)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_every_case_can_be_compared(make: Callable[[int, int], Region], tmp_path: Path) -> None:
    """At three ragged sizes, of poisoned outputs, in both orders of two weights; a right kernel is not a bit off."""
    region = make(72, 64)
    for swapped in (False, True)[: 1 if region.half or len(region.products) == 1 else 2]:
        kernel = Lying(region, TILE, tmp_path, swapped=swapped)
        found = [*proof.measured(region, TILE, kernel, swapped=swapped)]
        of = 8 if region.m_axis[1] else region.multiple
        assert kernel.sizes == [-(-m // of) * of for m in (1, 37, 4097, 4097, 4097)]
        assert all(error[1:] == (0.0, 0.0) for error in found)


def test_one_wrong_number_is_found_wherever_it_is() -> None:
    """The norm of all hides it among many."""
    region = bias_sums(72, 64)
    inputs = random_inputs(region, 4097, "cpu")
    right = interpret(region, inputs)
    for i, out in enumerate(right):
        for place in (0, len(out) // 2, -1):
            wrong = out.clone()
            wrong[place].view(-1)[-1] += out.double().square().mean().sqrt() / 2
            relative, peak = proof.difference(wrong, out)
            assert not proof.Error(4097, relative, peak).within(proof.TOLERANCE)
            wrong[place].view(-1)[-1] = math.nan
            assert not proof.Error(4097, *proof.difference(wrong, out)).within(proof.TOLERANCE)
        assert i or proof.difference(out, out) == (0.0, 0.0)
    rounded = right[2] * (1 + 1e-3)
    assert proof.Error(4097, *proof.difference(rounded, right[2])).within(proof.TOLERANCE)


class Seldom(Right):
    """Wrong the third time that it runs with many rows."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if m > 64 and len(self.sizes) == 5:
            outs[0] *= 1.1


def test_a_kernel_that_is_wrong_now_and_then_is_run_again(tmp_path: Path) -> None:
    region = token_scale(64, 64)
    *_, error = proof.measured(region, TILE, Seldom(region, TILE, tmp_path))
    assert not error.within(proof.TOLERANCE)


def test_pieces_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = torch.randn(101, 7), torch.randn(101, 7)
    whole = proof.difference(found, wanted)
    assert whole[0] == pytest.approx(
        float((found.double() - wanted.double()).norm() / wanted.double().norm()), rel=1e-12
    )
    monkeypatch.setattr(proof, "PIECE", 20)
    assert proof.difference(found, wanted) == pytest.approx(whole, rel=1e-12)


def test_the_last_size_is_ragged_of_many_tiles_and_within_memory() -> None:
    assert proof.sizes(token_scale(4096, 4096), TILE, 148) == (1, 37, 4097)
    assert proof.sizes(turned_left(4096, 4096), TILE, 148) == (8, 40, 4104)
    *_, few = proof.sizes(token_scale(64, 4096), TILE, 148)
    assert few // TILE.tile_m >= proof.WAVES * 148 and few % 64 == 1
    *_, wide = proof.sizes(token_scale(128256, 8192), TILE, 148)
    assert 4 * TILE.tile_m < wide < 4097 and wide % 64 == 1
    assert wide * 128256 * 4 < proof.BYTES


def test_logarithms_are_compared_on_positive_numbers(tmp_path: Path) -> None:
    region = token_scale(64, 64)
    lets = (*region.lets[:-1], Let("l", "log", ("acc",)), Let("y", "mul", ("l", "r")))
    region = verify(replace(region, lets=lets))
    assert len([*proof.measured(region, TILE, Right(region, TILE, tmp_path))]) == 3
    lets = (*lets[:-1], Let("z", "mul", ("l", 0.0)), Let("y", "log", ("z",)))
    region = verify(replace(region, lets=lets))
    with pytest.raises(Unsupported, match="random numbers give no finite results"):
        next(proof.measured(region, TILE, Right(region, TILE, tmp_path)))


class Raises(Right):
    """Cannot be launched."""

    error: Exception = RuntimeError("no kernel image is available")

    def __call__(self, inputs: Any, outs: Outs) -> None:
        raise self.error


class TooLarge(Raises):
    error = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("build", "said"),
    [(Raises, "fails at M = 1: RuntimeError: no kernel image"), (TooLarge, "no memory for M = 1"),
     (Unwritten, "at M = 4097 relative error nan"), (Everywhere, "at M = 1 relative error 1.0e-01, of one number")],
)  # fmt: skip
def test_a_launch_falls_back_counts_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: type[Right], said: str
) -> None:
    """Outside of tuning, as a graph from a cache does. Under strict it is raised."""
    untested_card(monkeypatch, tmp_path, build)
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 8, "cpu"), torch.empty(8, 64, dtype=torch.bfloat16)
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    with pytest.warns(RuntimeWarning, match=said) as caught:
        kernel(inputs, [out])
        kernel(inputs, [out])
    assert len(caught) == 1 and sum(launch.FALLBACKS.values()) == 2 and not launch.LAUNCHES
    assert torch.equal(out, interpret(region, inputs)[0])
    with pytest.raises(Unsupported, match=said):
        launch.kernel(region.text, str(tmp_path / "kernels"), strict=True)(inputs, [out])


def test_each_order_of_weights_and_each_bucket_is_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    untested_card(monkeypatch, tmp_path, Swapped)
    region = swiglu(64, 32)
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    for m, up_first in ((8, False), (8, True), (300, False)):
        inputs = random_inputs(region, m, "cpu", up_first=up_first)
        before, outs = launch.LAUNCHES[region.digest], [torch.empty(m, 64, dtype=torch.bfloat16) for _ in range(3)]
        if up_first:
            with pytest.warns(RuntimeWarning, match=r"its second weight first is wrong on this card"):
                kernel(inputs, outs)
        else:
            kernel(inputs, outs)
        assert all(map(torch.equal, outs, interpret(region, inputs)))
        assert launch.LAUNCHES[region.digest] == before + (not up_first)


def test_a_kernel_is_proved_once_and_draws_nothing_of_the_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    untested_card(monkeypatch, tmp_path)
    region = token_scale(64, 32)
    kernel, inputs = launch.kernel(region.text, str(tmp_path / "kernels")), random_inputs(region, 8, "cpu")
    out, state = torch.empty(8, 64, dtype=torch.bfloat16), torch.get_rng_state()
    for _ in range(3):
        kernel(inputs, [out])
    assert torch.equal(torch.get_rng_state(), state)
    ((compiled),) = kernel._compiled.values()
    assert compiled.sizes == [1, 37, 4097, 4097, 4097, 8, 8, 8]


def test_it_is_compared_outside_of_the_modes_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fake tensors while a graph is compiled, another default dtype of a user's context, inference mode."""
    from torch._subclasses import FakeTensorMode

    untested_card(monkeypatch, tmp_path)
    region = token_scale(64, 32)
    with FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        launch.kernel(region.text, str(tmp_path / "kernels")).build(8)


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs on torch then, and is compared when it runs outside; what is known is used at once."""
    untested_card(monkeypatch, tmp_path)
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 8, "cpu"), torch.empty(8, 64, dtype=torch.bfloat16)

    def ran(captured: bool) -> bool:
        monkeypatch.setattr(launch, "capturing", lambda: captured)
        before = launch.LAUNCHES[region.digest]
        launch.kernel(region.text, str(tmp_path / "kernels"))(inputs, [out])
        assert torch.equal(out, interpret(region, inputs)[0])
        return launch.LAUNCHES[region.digest] > before

    with pytest.warns(RuntimeWarning, match=r"captured before it was compared .* \(run the model once before\)"):
        assert not ran(True)
    assert ran(False) and ran(True)
    launch.KERNELS.clear()  # another process, to which this store tells it
    monkeypatch.setattr(proof, "compared", None)
    assert ran(True)


def test_a_target_that_was_run_proves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And its launches are as they were: the compiled kernel's own."""
    untested_card(monkeypatch, tmp_path)
    monkeypatch.setattr(target, "capability", lambda device=None: target.SM_90A.capability)
    monkeypatch.setattr(proof, "prove", None)
    region = token_scale(64, 32)
    kernel, inputs = launch.kernel(region.text, str(tmp_path / "kernels")), random_inputs(region, 8, "cpu")
    kernel(inputs, [torch.empty(8, 64, dtype=torch.bfloat16)])
    assert [*kernel._ready.values()] == [*kernel._compiled.values()] and not (tmp_path / "kernels/proofs").exists()


def test_no_door_reaches_a_kernel_that_must_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = list[tuple[int, int]]()

    class Told(Right):
        def prepare(self, inputs: Any, outs: Outs) -> Any:
            def run(entrance: int, way_out: int) -> None:
                asked.append((entrance, way_out))
                self(inputs, outs)

            return run

    untested_card(monkeypatch, tmp_path, Told)
    region = token_scale(64, 32)
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    work = [(kernel, random_inputs(region, 8, "cpu"), blank_outputs(region, 8, "cpu")) for _ in range(3)]
    launch.together(work)
    assert len(asked) == len(proof.SIZES) + proof.TIMES - 1 + len(work) and set(asked) == {(0, 0)}


def test_tuning_takes_the_fastest_that_is_right_at_every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At its own M, tuning sees nothing wrong with the first."""
    region = token_scale(64, 64)
    first, second, *_ = legality.candidates(region, 512, ROW)

    def build(region: Region, config: Config, directory: Path, **how: Any) -> Right:
        return (At1 if config == first else Right)(region, config, directory, **how)

    untested_card(monkeypatch, tmp_path, build)
    tuned = tune.tune(region, random_inputs(region, 300, "cpu"), str(tmp_path / "kernels"))
    assert tuned.config == second
    assert "is wrong on this card: at M = 1 " in tuned.rows[0]["why"]
    kernel = launch.kernel(region.text, str(tmp_path / "kernels"))
    assert kernel.config(300) == second and record.remembered(kernel.directory, region, 512, target=ROW) == second
    with pytest.raises(Unsupported, match="is wrong on this card"):
        tune.hinted(region, random_inputs(region, 300, "cpu"), str(tmp_path / "kernels"), first)


# ---- what is kept


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a right kernel's proof."""
    untested_card(monkeypatch, tmp_path)
    launch.kernel(token_scale(64, 32).text, str(tmp_path / "kernels")).build(8)
    (path,) = (tmp_path / "kernels" / "proofs").iterdir()
    return path


def believed(tmp_path: Path) -> bool:
    """Does another process believe it?"""
    launch.KERNELS.clear()
    kernel = launch.kernel(token_scale(64, 32).text, str(tmp_path / "kernels"))
    kernel.build(8)
    ((compiled),) = kernel._compiled.values()
    return not compiled.sizes


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (proof, "card"),
        (proof, "driver"),
        (record, "sources_digest"),
        (library, "made_by"),
        (proof, "machine_code"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_proof_is_of_one_card_and_of_one_build(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    assert believed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, lambda *asked: "another")
        assert not believed(tmp_path)
    assert believed(tmp_path)


def test_a_proof_is_of_these_versions_and_this_code(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, "versions", lambda: {"torch": "another"})
        assert not believed(tmp_path)
    (code,) = (tmp_path / "kernels" / "objects").rglob("*.o")
    monkeypatch.setattr(Right, "code", "Altered")
    assert not believed(tmp_path) and code.read_text() == "Altered"
    monkeypatch.setattr(proof, "machine_code", lambda place: "")
    assert not believed(tmp_path) and not believed(tmp_path)  # of what is not on disk nothing is kept


def edits() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """What may have happened to the file."""
    return {
        "smaller errors": lambda found: {**found, "errors": [[m, 1e-9, 1e-9] for m, *_ in found["errors"]]},
        "larger errors, sealed": lambda found: sealed(found, [[m, 0.1, 0.1] for m, *_ in found["errors"]]),
        "two sizes, sealed": lambda found: sealed(found, found["errors"][:2]),
        "another tile": lambda found: {**found, "config": "128x128co1x1"},
        "another tile, sealed": lambda found: sealed({**found, "config": "128x128co1x1"}, found["errors"]),
        "another card": lambda found: {**found, "card": "another"},
        "no seal": lambda found: {name: value for name, value in found.items() if name != "seal"},
        "a list": lambda found: [found],
        "errors of text": lambda found: {**found, "errors": "none"},
    }


def sealed(found: dict[str, Any], errors: Any) -> dict[str, Any]:
    facts = {name: value for name, value in found.items() if name not in ("errors", "seal")}
    return proof.sealed(facts, errors)


@pytest.mark.parametrize("how", [*edits(), "cut off", "empty"])
def test_an_edited_proof_is_none(kept: Path, tmp_path: Path, how: str) -> None:
    text = kept.read_text()
    assert believed(tmp_path)
    cut = {"cut off": text[:-40], "empty": ""}
    edited = cut[how] if how in cut else json.dumps(edits()[how](json.loads(text)))
    kept.write_text(edited)
    assert not believed(tmp_path)
    assert kept.read_text() == text and believed(tmp_path)  # it was made anew


def test_a_proof_that_cannot_be_kept_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untested_card(monkeypatch, tmp_path)

    def full(*asked: Any, **how: Any) -> bool:
        raise Unsupported("no space left on device")

    monkeypatch.setattr(store, "write", full)
    assert not believed(tmp_path) and not believed(tmp_path)


def test_no_archive_holds_a_proof(kept: Path) -> None:
    assert not PATHS.fullmatch(f"proofs/{kept.name}") and PATHS.fullmatch(f"tuning/{'0' * 16}-64-{'0' * 16}.json")
