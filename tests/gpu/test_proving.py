"""On a Hopper GPU whose row is pretended not to be tested: right kernels prove themselves, but not while a CUDA graph
is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from codegen_cases import CASES, blank_outputs, random_inputs, relative_error, token_scale

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.kernels import launch, proof
from coda_inductor.kernels.prebuild import Job, prebuild


def missing() -> str:
    """Why kernels cannot run here, "" if they can."""
    try:
        target.available(torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    except Unsupported as refusal:
        return str(refusal)
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "none")]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of its own, filled by all cores at once."""
    directory = str(tmp_path_factory.mktemp("store") / "kernels")
    regions = [make(1000, 528) for make in CASES]
    prebuild([Job(r, legality.candidates(r, 512)[0], swapped) for r in regions for swapped in orders(r)], directory)
    return directory


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has run this card's kernels."""
    monkeypatch.setitem(target.TARGETS, SM_90A.name, replace(SM_90A, tested=False, overlaps=False))
    monkeypatch.setattr(launch, "KERNELS", {})


def orders(region: Region) -> tuple[bool, ...]:
    return (False, True) if len(region.products) == 2 and not region.half else (False,)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_right_kernels_prove_themselves(make: Callable[[int, int], Region], cache_dir: str) -> None:
    region = make(1000, 528)
    m = 333
    for up_first in orders(region):
        inputs, outs = random_inputs(region, m, "cuda", up_first=up_first), blank_outputs(region, m, "cuda")
        state, before = torch.cuda.get_rng_state(), launch.LAUNCHES[region.digest]
        launch.kernel(region.text, cache_dir)(inputs, outs)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert launch.LAUNCHES[region.digest] == before + 1 and not launch.FALLBACKS
        for out, wanted in zip(outs, interpret(region, inputs), strict=True):
            assert relative_error(out, wanted) < proof.allowed(region)


def test_the_next_process_believes_it(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region = token_scale(1000, 528)
    launch.kernel(region.text, cache_dir).build(333)
    assert any((Path(cache_dir) / "proofs").iterdir())
    monkeypatch.setattr(launch, "KERNELS", {})
    monkeypatch.setattr(proof, "compared", None)
    launch.kernel(region.text, cache_dir).build(333)


def test_nothing_is_proved_while_a_graph_is_captured(tmp_path: Path) -> None:
    """It holds the operations on torch then, and the kernel once that is known to be right."""
    region = token_scale(1000, 528)
    inputs, store = random_inputs(region, 333, "cuda"), str(tmp_path / "kernels")
    (wanted,) = interpret(region, inputs)
    torch.cuda.synchronize()
    for kernels in (0, 1):
        (out,) = blank_outputs(region, 333, "cuda")
        kernel, before = launch.kernel(region.text, store), launch.LAUNCHES[region.digest]
        kernel.compiled(legality.candidates(region, 333)[0])  # compiling is no part of this
        graph = torch.cuda.CUDAGraph()
        if kernels:
            kernel(inputs, [out])
            before += 1
            out.fill_(float("nan"))
        with torch.cuda.graph(graph):
            kernel(inputs, [out])
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, wanted) < proof.TOLERANCE
        assert launch.LAUNCHES[region.digest] == before + kernels and bool(launch.FALLBACKS) != bool(kernels)
        launch.FALLBACKS.clear()
