"""How compiled graphs hand a Region its outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import lane_sums, norm_gradients, random_inputs, scores, swiglu_backward
from compiling import close, pretend
from torch import Tensor

from coda_inductor.codegen import source
from coda_inductor.codegen.tiles import Config
from coda_inductor.core import blocks
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Reduction, Region
from coda_inductor.kernels import executable
from coda_inductor.kernels.executable import Executable, Parts
from coda_inductor.ops import lowering

PLAIN = swiglu_backward(64, 32)
MIXED = replace(PLAIN, reductions=(Reduction("dgg"), Reduction("dgg", "M"), Reduction("duu")))


@pytest.mark.parametrize("region", [lane_sums(64, 32), norm_gradients(64, 32), PLAIN, MIXED])
def test_outputs_have_the_regions_order(region: Region) -> None:
    outs = blocks.outputs(region, [torch.empty(6, 32)] * region.matrices)
    shapes = [(6, 64)] * len(region.stores) + [(6,) if r.over == "N" else (64,) for r in region.reductions]
    layouts = lowering._layouts(region, 6, torch.device("cpu"))
    assert [tuple(out.shape) for out in outs] == shapes == [tuple(map(int, x.size)) for x in layouts]
    assert all(out.is_contiguous() for out in outs)
    assert [out.stride() for out in outs] == [tuple(map(int, x.stride)) for x in layouts]


def test_sums_over_both_axes_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One over M stands between two over N."""
    pretend(monkeypatch, tmp_path)
    lowering.register()
    inputs = random_inputs(MIXED, 301, "cpu")
    torch._dynamo.reset()
    text = MIXED.text
    with torch._inductor.config.patch(force_disable_caches=True):  # whose key knows nothing of ours
        f = torch.compile(lambda *given: torch.ops.coda.region(list(given), text, "sm_90a"), fullgraph=True)
        found = f(*inputs)
    for out, wanted in zip(found, interpret(MIXED, inputs), strict=True):
        assert out.shape == wanted.shape
        close(out, wanted)


@pytest.mark.parametrize("make", [norm_gradients, swiglu_backward, lambda n, k: MIXED, scores])
@pytest.mark.parametrize("unread", [False, True])
def test_sums_have_partial_results_and_a_place(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], Region], unread: bool
) -> None:
    """What the kernel is given for each: a number for each tile, one tile's behind another's, and where the sum goes,
    scratch if nobody reads it."""
    region, m = make(64, 32), 300
    names, asked = source.slots(region), list[tuple[Any, ...]]()
    fields = tuple(f for f in (*names.operands, *names.stores, *names.sums) if f not in ("c", "D"))
    fields += (*map(source.whole, names.sums), *source.DOORS)
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    config = Config(128, 32, 1, 1, True)
    run = Executable(region, config, Parts(lambda *given: asked.append(given), fields, 8, None))
    inputs = random_inputs(region, m, "cpu")
    outs: list[Tensor | None] = list(blocks.outputs(region, inputs))
    first = len(region.stores)
    outs[first:] = [None] * len(region.reductions) if unread else outs[first:]
    run.prepare(inputs, outs)(0, 0)
    given = dict(zip(fields, asked[0][4], strict=True))
    for slot, r, out in zip(names.sums, region.reductions, outs[first:], strict=True):
        parts, whole = given[slot], given[source.whole(slot)]
        length, tiles = (m, -(-region.n // 32)) if r.over == "N" else (region.n, -(-m // 128))
        assert parts.shape == ((m, tiles) if r.over == "N" else (tiles, region.n))
        assert (parts.t() if r.over == "N" else parts).stride() == (length, 1)
        assert whole.shape == (length,) and whole.dtype == parts.dtype == torch.float32
        assert (whole is out) is (out is not None)
    places = sorted((given[slot].data_ptr(), 4 * given[slot].numel()) for slot in names.sums)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
