"""How compiled graphs hand a Region its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import lane_sums, norm_gradients, random_inputs, scores, swiglu_backward
from compiling import Centred, Interpreted, close, pretend
from torch import Tensor

from coda_inductor.codegen import executable, source, tune
from coda_inductor.codegen.executable import Executable, Parts
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Reduction, Region
from coda_inductor.inductor import launching


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_over_a_row_are_rows_of_one_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dynamic: bool) -> None:
    """LayerNorm's two; each starts at a multiple of 16 bytes, as an input of the next kernel must."""
    sums: list[list[Tensor]] = []

    class Watched(Interpreted):
        def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
            super().__call__(inputs, outs)
            sums.append([out for out in outs[len(self.region.stores) :] if out is not None])

    pretend(monkeypatch, tmp_path, Watched)
    torch._dynamo.reset()
    model = Centred().to(torch.bfloat16)
    compiled = torch.compile(model, backend="coda", dynamic=dynamic)
    for tokens, pitch in ((301, 304), (320, 320)):
        sums.clear()
        x = torch.randn(tokens, model.first.weight.shape[0], dtype=torch.bfloat16)
        with torch.no_grad():
            close(compiled(x), model(x))
        pairs = [pair for pair in sums if len(pair) == 2]
        assert pairs, [len(p) for p in sums]
        for first, second in pairs:
            assert first.shape == second.shape == (tokens,) and first.stride() == second.stride() == (1,)
            assert second.data_ptr() - first.data_ptr() == 4 * pitch
            assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


PLAIN = swiglu_backward(64, 32)
MIXED = replace(PLAIN, reductions=(Reduction("dgg"), Reduction("dgg", "M"), Reduction("duu")))


@pytest.mark.parametrize("region", [lane_sums(64, 32), norm_gradients(64, 32), PLAIN, MIXED])
def test_outputs_come_apart_in_the_regions_order(region: Region) -> None:
    outs = tune.outputs(region, [torch.empty(6, 32)] * region.matrices)
    shapes = [(6, 64)] * len(region.stores) + [(6,) if r.over == "N" else (64,) for r in region.reductions]
    assert [tuple(out.shape) for out in outs] == shapes
    layouts = launching._layouts(region, 6, torch.device("cpu"))
    buffers = [torch.empty_strided([int(s) for s in x.size], [int(s) for s in x.stride]) for x in layouts]
    found = launching.apart(region, buffers)
    assert [tuple(out.shape) for out in found if out is not None] == shapes
    several = sum(r.over == "N" for r in region.reductions) > 1
    assert launching.together(region) == several and (len(buffers) < len(shapes)) == several
    if several:
        unread = [out is None for out in launching.apart(region, [*buffers[:-1], None])]
        assert unread == [False] * len(region.stores) + [r.over == "N" for r in region.reductions]


def test_sums_over_both_axes_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One over M stands between two over N, which share a tensor."""
    pretend(monkeypatch, tmp_path)
    launching.register()
    inputs = random_inputs(MIXED, 301, "cpu")
    torch._dynamo.reset()
    found = torch.compile(lambda *given: torch.ops.coda.region(list(given), MIXED.text, "sm_90a"))(*inputs)
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
    fields += tuple(map(source.whole, names.sums))
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    config = Config(128, 32, 1, 1, True)
    run = Executable(region, config, Parts(lambda *given: asked.append(given), fields, 8, None))
    inputs = random_inputs(region, m, "cpu")
    outs: list[Tensor | None] = list(tune.outputs(region, inputs))
    first = len(region.stores)
    outs[first:] = [None] * len(region.reductions) if unread else outs[first:]
    run(inputs, outs)
    given = dict(zip(fields, asked[0][4], strict=True))
    for slot, r, out in zip(names.sums, region.reductions, outs[first:], strict=True):
        parts, whole = given[slot], given[source.whole(slot)]
        length, tiles = (m, -(-region.n // 32)) if r.over == "N" else (region.n, -(-m // 128))
        assert parts.shape == ((m, tiles) if r.over == "N" else (tiles, region.n))
        assert (parts.t() if r.over == "N" else parts).stride() == (length, 1)
        assert whole.shape == (length,) and whole.dtype == parts.dtype == torch.float32
        assert (whole is out) is (out is not None)
    apart = [given[slot].data_ptr() for slot in names.sums]
    assert len({*apart}) == len(apart)
