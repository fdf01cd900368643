"""doctor --check: every case of a target compared on the card that is here, or compiled only; the interpreter is the
card."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import Ask, needs_compiler
from asking import ask as ask
from asking import folder as folder
from codegen_cases import CASES, norm_producer, swiglu
from untested_card import ROW, At37, Right, Swapped, Unwritten, untested_card

from coda_inductor.codegen import target
from coda_inductor.commands import check
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels.prebuild import Job, Outcome


def small(monkeypatch: pytest.MonkeyPatch, *cases: Callable[[int, int], Region]) -> None:
    """Small Regions, of these cases only if there are any, and no compiler."""

    def made(jobs: Iterable[Job], store: str) -> dict[Job, Outcome]:
        return {job: Outcome("nvvm says no" if job.region.n == 8 else "", 1.0) for job in jobs}

    monkeypatch.setattr(check, "outcomes", made)
    monkeypatch.setattr(check, "N", 72)
    monkeypatch.setattr(check, "K", 64)
    if cases:
        monkeypatch.setattr(check, "CASES", cases)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Callable[[type[Right]], None]:
    """A card of the target whose kernels are of that class."""

    def made(build: type[Right]) -> None:
        untested_card(monkeypatch, tmp_path, build, asked=False)
        gpu = {"name": "a card", "arch": "sm_100", "bytes": 10**9}
        monkeypatch.setattr(check, "gpu", lambda i: gpu)

    return made


def test_all_cases_are_compared(card: Any, monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    card(Right)
    small(monkeypatch)
    status, facts, _ = ask("doctor", "--check", "--json")
    assert status == 0 and facts["target"] == ROW.name and facts["ran"] and facts["problems"] == []
    checked = {row["case"] for row in facts["cases"] if row["verdict"] == check.RIGHT}
    refused = {row["case"] for row in facts["cases"] if row["verdict"] == check.REFUSED}
    assert checked | refused == {make.__name__ for make in CASES} and len(checked) > 20
    rows = [row for row in facts["cases"] if row["verdict"] == check.RIGHT]
    of_samples = {(768, 768, 4608), (1152, 1152, 4608)}
    assert {tuple(e["m"] for e in row["errors"]) for row in rows} == {(1, 37, 4097), (8, 40, 4104), *of_samples}
    assert all(e["relative"] == e["peak"] == 0 for row in rows for e in row["errors"])
    assert {row["case"] for row in rows if row["swapped"]} >= {"swiglu", "lane_sums"}
    status, said, _ = ask("doctor", "--check")
    assert status == 0 and said.startswith("coda-inductor doctor --check, for sm_100a (compiled, not yet run on such")
    assert f"{len(rows)} kernels: {len(rows)} right" in said and "a card (sm_100, 1.0 GB)" in said
    assert "please report all of this, also if all is right" in said
    (line,) = [line for line in said.splitlines() if line.startswith("norm_producer ")]
    assert line.split()[4:] == ["0.0e+00", "0.0e+00", "0.0e+00", "0.004", "right"]


@pytest.mark.parametrize(
    ("build", "wrong"),
    [(At37, "at M = 37 relative"), (Unwritten, "at M = 4097 relative error nan"), (Swapped, "M = 1 ")],
)
def test_what_is_wrong_is_a_problem(
    card: Any, monkeypatch: pytest.MonkeyPatch, ask: Ask, build: type[Right], wrong: str
) -> None:
    """All sizes are said, also behind the first that is wrong."""
    card(build)
    small(monkeypatch, norm_producer, swiglu)
    status, facts, _ = ask("doctor", "--check", "--json")
    only = ["swiglu"] if build is Swapped else ["norm_producer", "swiglu", "swiglu"]
    bad = [row for row in facts["cases"] if row["verdict"] == check.WRONG]
    assert status == 1 and [row["case"] for row in bad] == only and len(facts["problems"]) == len(only)
    assert all(wrong in row["why"] and len(row["errors"]) == 3 for row in bad)
    status, said, _ = ask("doctor", "--check")
    assert status == 1 and said.count("PROBLEM: ") == len(only) and f"{len(only)} WRONG" in said


class Refused(Right):
    """The driver does not take it."""

    def __call__(self, inputs: Any, outs: Any) -> None:
        raise RuntimeError("no kernel image is available")


def test_what_does_not_compile_or_launch_is_a_problem(card: Any, monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    card(Refused)
    small(monkeypatch, norm_producer, lambda n, k: replace(norm_producer(n, k), n=8))
    status, facts, _ = ask("doctor", "--check", "--json")
    whys = [row["why"] for row in facts["cases"] if row["verdict"] == check.FAILED]
    assert status == 1 and len(whys) == 2 and whys[1] == "nvvm says no"
    assert "fails at M = 1: RuntimeError: no kernel image is available" in whys[0]


def test_what_is_refused_is_no_problem(card: Any, monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    card(Right)
    small(monkeypatch, norm_producer, swiglu)
    monkeypatch.setitem(target.TARGETS, ROW.name, replace(ROW, max_operands=1))
    status, said, _ = ask("doctor", "--check")
    assert status == 0 and "norm_producer: refused: 2 operands, 1 at most" in said
    assert "2 kernels: 2 right, 1 case refused" in said


def test_without_such_a_card_kernels_are_compiled_only(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr(target, "capability", lambda device=None: None)
    monkeypatch.setattr(target, "available", lambda capability, untested: None)
    small(monkeypatch, norm_producer)
    status, said, _ = ask("doctor", "--check", "--target", ROW.name)
    assert status == 0 and "compiled only: a card of sm_100 is needed to run them" in said
    assert "1 kernel: 1 compiled, not run" in said and "please report" not in said
    assert ask("doctor", "--check", "--json")[1]["target"] == target.SM_90A.name
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", ROW.name)
    assert ask("doctor", "--check", "--json")[1]["target"] == ROW.name


def test_what_cannot_be_answered_is_said(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    status, _, error = ask("doctor", "--target", ROW.name)
    assert status == 2 and "--target is about --check" in error

    def missing(capability: Any, untested: bool) -> None:
        raise Unsupported("quack-kernels is not installed", hint='pip install "quack-kernels"')

    monkeypatch.setattr(target, "available", missing)
    status, _, error = ask("doctor", "--check")
    assert status == 2 and "quack-kernels is not installed" in error


@needs_compiler
def test_the_compiler_makes_them_for_any_target(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr(check, "CASES", (norm_producer,))
    status, facts, _ = ask("doctor", "--check", "--target", ROW.name, "--json")
    (row,) = facts["cases"]
    assert status == 0 and row["verdict"] in (check.COMPILED, check.RIGHT) and row["stack"] == 0 < row["registers"]
