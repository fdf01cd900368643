"""Two products of unlike K in one accumulator: what such a Region means, where it is legal, what its kernel is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from codegen_cases import random_inputs, summed, unlike, unlike_columns

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.target import SM_90A, SM_100A, SM_120A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region, parse
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify
from coda_inductor.kernels import executable
from coda_inductor.kernels.executable import Executable, Parts

TILE = Config(128, 128, 1, 2, True)


def deeper(region: Region, k: int) -> Region:
    """With another K of its second product."""
    (p,) = region.products
    assert p.plus
    return dataclasses.replace(region, products=(dataclasses.replace(p, plus=(*p.plus[:2], k)),))


def test_it_means_one_product_of_what_lies_beside_each_other() -> None:
    region = unlike(64, 128)
    a, w, b, v, x = (t.float() for t in random_inputs(region, 40, "cpu"))
    found, _ = interpret(region, [t.bfloat16() for t in (a, w, b, v, x)])
    wanted = torch.cat([a, b], 1) @ torch.cat([w, v], 1).t() + x
    assert a.shape[1] * 2 == b.shape[1]
    torch.testing.assert_close(found, wanted.bfloat16())
    assert parse(region.text) == region and region.depth == 384 and region.unlike and not summed(64, 128).unlike
    assert "(K=128 + 256, bf16)" in show(region)


def test_what_is_well_formed() -> None:
    region = unlike(64, 128)
    with pytest.raises(BrokenInvariant, match="the same K, said twice"):
        verify(deeper(region, 128))
    with pytest.raises(BrokenInvariant, match="k="):
        verify(deeper(region, 0))


@pytest.mark.parametrize("make", [unlike, unlike_columns])
def test_where_it_is_legal(make: Any) -> None:
    region = make(4096, 4096)
    legality.check(region, SM_90A)
    legality.check(region, SM_120A)
    with pytest.raises(Unsupported, match="unlike k in one sum, on sm_100a"):
        legality.check(region, SM_100A)
    legality.check(deeper(region, 72))  # the second K may end within a step,
    (p,) = region.products
    with pytest.raises(Unsupported, match="k = 72 in one sum, which is not a multiple of 64"):  # the first may not
        legality.check(dataclasses.replace(region, products=(dataclasses.replace(p, k=72),)))


@pytest.mark.parametrize("make", [unlike, unlike_columns])
def test_what_a_kernel_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensors, wherever they lie and with whatever distance from row to row, and how many steps come
    before."""
    region, asked = make(64, 128), list[tuple[Any, ...]]()
    (p,) = region.products
    inputs = random_inputs(region, 40, "cpu")
    fields = (*source.SECONDS, "x0", "c", "r0", "r0w", *source.DOORS)
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    kernel = Executable(region, TILE, Parts(lambda *given: asked.append(given), fields, 8, None))
    kernel.prepare(inputs, [torch.empty(40, 64)] + [torch.empty(0) for _ in region.reductions])(0, 0)
    ((a, b, _, _, given, *_),) = asked
    (first, second), (right, other) = zip(*p.pairs, strict=True)
    assert a is inputs[first] and b is inputs[right]
    assert given[0] is inputs[second] and given[1] is inputs[other]
    assert given[2] * legality.TILE_K == p.k
