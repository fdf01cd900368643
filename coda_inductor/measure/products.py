"""The plain products of a Region's matrices by cuBLAS: a yardstick for its kernel that takes no compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coda_inductor.core.dtypes import EIGHT_BITS
from coda_inductor.core.region import Region
from coda_inductor.measure import timing

ROUNDS = 25


def plain_products(region: Region, inputs: Sequence[Tensor]) -> Callable[[], object] | None:
    """What multiplies each pair of the Region's matrices once, into memory that is there. None where cuBLAS does not
    multiply them as they lie, or memory is short."""
    calls = list[Callable[[], object]]()
    try:
        for p in region.products:
            for i, j in p.pairs:
                a = inputs[i] if p.a_layout == "mk" else inputs[i].t()
                b = inputs[j] if p.b_layout == "kn" else inputs[j].t()
                calls.append(_product(a, b, region.fast))
            if region.half:
                break  # both products are halves of one matrix's rows
        for call in calls:
            call()
    except RuntimeError:  # of 8-bit matrices only some layouts and sizes; or there is no memory for it
        return None

    def run() -> None:
        for call in calls:
            call()

    return run


def _product(a: Tensor, b: Tensor, fast: bool) -> Callable[[], object]:
    if a.dtype not in EIGHT_BITS:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
        return lambda: torch.mm(a, b, out=out)
    one = torch.ones((), dtype=torch.float32, device=a.device)
    kept: dict[str, Tensor] = {}

    def run() -> None:
        kept["out"] = torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


def beside_products(call: Callable[[], object], region: Region, inputs: Sequence[Tensor]) -> tuple[float, float] | None:
    """The ms of a Region's kernel, as `call` launches it, and of its plain products, by turns. None without these."""
    plain = plain_products(region, inputs)
    if plain is None:
        return None
    calls = [call, plain]
    ours, theirs = timing.by_turns(calls, ROUNDS, timing.launching(calls))
    return ours, theirs
