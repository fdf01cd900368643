"""Which tile is fastest? Times the legal configurations of a Region on the tensors given and remembers the winner.

A configuration may win only if its results agree with the interpreter's and its registers did not spill much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda_inductor.codegen import legality
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.blocks import into, outputs, poison
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels import launch, proof, record
from coda_inductor.measure import timing

MAX_STACK = 256  # bytes per thread: spilling a little can win (norm backward, pingpong tiles: 387-403 us on an H200)
# Interleaved, unless calls are long: of 13 Regions in 8 to 15 tiles each (H200, bench/tiles.py), the tile with the
# least mean of both times took at most 1.03 times as long interleaved as the fastest. What else is in a burst only
# shortens its shares.
SLACK = 1.04
# A tile's two times in a burst lay up to 5.5 % apart in each of three tries (H200, bursts of six tiles): each runs
# once after one neighbour and once after the other, who had drawn more power or less. (With the end of
# the rise as a third time of the work beside them, up to 9.6 %, at c519690.)
LEVEL = 0.06
CHECKED = 256  # rows, or columns, from each of the start, the middle and the end


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest configuration, its ms, and a row of what is known about every candidate."""

    config: Config
    ms: float
    rows: list[dict[str, Any]]


def tune(region: Region, inputs: Sequence[Tensor], cache_dir: str | None = None, *, rounds: int = 15) -> Tuned:
    """Compiles, checks and times the candidates at the inputs' M. Raises Unsupported if none is right."""
    kernel = launch.kernel(region.text, cache_dir)
    size = legality.size_class(region, region.m(inputs), kernel.row)
    configs = legality.candidates(region, size, kernel.row)
    rows = measure(kernel, inputs, configs, rounds=rounds)
    right = [row for row in rows if "ms" in row]
    if not right and (spilled := [i for i, row in enumerate(rows) if row.get("stack", 0) > MAX_STACK]):
        least = min(spilled, key=lambda i: int(rows[i]["stack"]))  # all spill: slow, perhaps, but no failure
        rows[least] = measure(kernel, inputs, [configs[least]], rounds=rounds, max_stack=1 << 20)[0]
        right = [row for row in rows if "ms" in row]
    if not right:
        raise Unsupported(f"no configuration of region {region.digest} is right: {rows[0]['why'] if rows else 'none'}")
    best = fastest(kernel, right)
    config = record.remember(
        Path(kernel.directory), region, size, Config(*best["fields"]), best["ms"], rows, target=kernel.row
    )
    kernel.use(size, config)
    return Tuned(config, best["ms"], rows)


def fastest(kernel: launch.Kernel, right: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the fastest configuration that a graph may launch. Those that fail at other sizes of M have a "why"
    from now on. Raises Unsupported with the reason of the fastest if all do."""
    refusals = list[Unsupported]()
    for row in sorted(right, key=lambda row: float(row["ms"])):
        try:
            kernel.prove(Config(*row["fields"]))
        except Unsupported as refusal:
            row["why"] = refusal.what
            refusals.append(refusal)
        else:
            return row
    raise refusals[0]


def tuned(region: Region, inputs: Sequence[Tensor], cache_dir: str | None, *, hints: bool) -> launch.Kernel:
    """The Region's kernel, tuned at the inputs' M unless that is remembered (with `hints`, also from a hint). Raises
    Unsupported as `tune` does."""
    kernel = launch.kernel(region.text, cache_dir)
    size = legality.size_class(region, region.m(inputs), kernel.row)
    if record.remembered(kernel.directory, region, size, hints=hints, target=kernel.row) is None:
        tune(region, inputs, cache_dir)
    elif not kernel.row.tested:
        kernel.build(size)  # what another process found has to be right here
    return kernel


def hinted(region: Region, inputs: Sequence[Tensor], cache_dir: str | None, config: Config) -> launch.Kernel:
    """The Region's kernel in a configuration that nothing here has measured, for this process: nothing is remembered.
    Raises Unsupported if it cannot be built, spills much, or its results are not the interpreter's."""
    kernel = launch.kernel(region.text, cache_dir)
    row = examine(kernel, config, inputs, outputs(region, inputs))
    if "why" in row:
        raise Unsupported(f"region {region.digest} in {config}: {row['why']}")
    kernel.prove(config)
    kernel.use(legality.size_class(region, region.m(inputs), kernel.row), config)
    return kernel


def measure(
    kernel: launch.Kernel,
    inputs: Sequence[Tensor],
    configs: Sequence[Config],
    *,
    rounds: int = 15,
    beside: Sequence[Callable[[], object]] = (),
    max_stack: int = MAX_STACK,
) -> list[dict[str, Any]]:
    """A row for each configuration: "why" if it is out, or "turns_ms" and "busy_ms" (timing.Times) and "ms", their
    mean; of one that has no rival interleaved no "busy_ms". `beside` are timed alike, among them; their ms are every
    row's "beside"."""
    outs = outputs(kernel.region, inputs)
    rows = [examine(kernel, config, inputs, outs, max_stack) for config in configs]
    good = [i for i, row in enumerate(rows) if "why" not in row]

    def call(config: Config) -> Callable[[], object]:
        return lambda: kernel.run_in(config, inputs, outs)

    slack = math.inf if beside else SLACK
    alone = lambda turns: not beside and sum(ms <= slack * min(turns) for ms in turns) == 1  # noqa: E731
    calls = [*(call(configs[i]) for i in good), *beside]
    times = timing.compared(calls, rounds, slack=slack, level=LEVEL, ratios=bool(beside), decided=alone)
    for i, time in zip(good, times, strict=False):
        if math.isfinite(time.busy):
            rows[i] |= {"ms": time.mean, "turns_ms": time.turns, "busy_ms": time.busy}
        elif time.turns <= slack * min(other.turns for other in times):  # the only one: not timed any further
            rows[i] |= {"ms": time.turns, "turns_ms": time.turns}
        else:
            rows[i]["why"] = f"more than {SLACK} times as long as another, interleaved"
    for row in rows:
        row["beside"] = [time.mean for time in times[len(good) :]]
    return rows


def examine(
    kernel: launch.Kernel, config: Config, inputs: Sequence[Tensor], outs: list[Tensor], max_stack: int = MAX_STACK
) -> dict[str, Any]:
    """What is known before timing; "why" if the configuration is out."""
    row: dict[str, Any] = {"config": str(config), "fields": list(config)}
    row["stages"] = legality.stages(kernel.region, config, kernel.row).ab
    poison(kernel.region, outs)
    try:
        kernel.run_in(config, inputs, outs)
    except Unsupported as refusal:
        return row | {"why": str(refusal)}
    row["stack"] = max((c.stack or 0 for (of, _), c in kernel._compiled.items() if of == config), default=0)
    row["error"] = worst_error(kernel.region, inputs, outs)
    allowed = proof.allowed(kernel.region)
    if not row["error"] < allowed:
        row["why"] = f"relative error {row['error']:.1e}, {allowed} is allowed"
    elif row["stack"] > max_stack:
        row["why"] = f"{row['stack']} bytes of spilled registers per thread"
    return row


def worst_error(region: Region, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> float:
    """The largest relative error (Frobenius) of an output against the interpreter, NaN if one is NaN. Compared are some
    rows, and of sums over M some columns: the whole would cost more memory than the kernel saves."""
    over = ["N" for _ in region.stores] + [r.over for r in region.reductions]
    outs = [out.view(-1, region.n).t() if o == "M" else out for out, o in zip(outs, over, strict=True)]  # [N, samples]
    errors = []
    for axis, narrowed in (("N", _some_rows), ("M", _some_columns)):
        if axis in over:
            part, places, given = narrowed(region, inputs)
            found = [out[places] for out, o in zip(outs, over, strict=True) if o == axis]
            found = [x.t().flatten() for x in found] if axis == "M" else found
            into(part, given, wanted := outputs(part, given))
            errors += [_relative(*pair) for pair in zip(found, wanted, strict=True)]
    worst = torch.stack(errors)
    return float("nan") if bool(worst.isnan().any()) else float(worst.max())


def _some_rows(region: Region, inputs: Sequence[Tensor]) -> tuple[Region, Tensor, list[Tensor]]:
    """(the Region without sums over M, some rows, the inputs in these rows)."""
    rows = _sampled(region.m(inputs), inputs[0].device)
    dim = {a: region.m_axis[1] for p in region.products for a, _ in p.pairs}
    dim |= {i: 0 for i, o in enumerate(region.operands, region.matrices) if o.extent != "feature"}
    tokens = {i: o.tokens for i, o in enumerate(region.operands, region.matrices) if o.extent == "sample"}
    read = {i: rows // tokens[i] if i in tokens else rows for i in dim}
    given = [x.index_select(dim[i], read[i]) if i in dim else x for i, x in enumerate(inputs)]
    operands = tuple(replace(o, tokens=min(o.tokens, 1)) for o in region.operands)  # each row has its own
    return (
        replace(region, operands=operands, reductions=tuple(r for r in region.reductions if r.over == "N")),
        rows,
        given,
    )


def _some_columns(region: Region, inputs: Sequence[Tensor]) -> tuple[Region, Tensor, list[Tensor]]:
    """(the sums over M of some columns, these columns, the inputs in them)."""
    columns = _sampled(region.n, inputs[0].device)
    dim = {b: 0 if p.b_layout == "nk" else 1 for p in region.products for _, b in p.pairs}
    dim |= {i: -1 for i, o in enumerate(region.operands, region.matrices) if o.extent != "token"}
    given = [x.index_select(dim[i], columns) if i in dim else x for i, x in enumerate(inputs)]
    totals = tuple(r for r in region.reductions if r.over == "M")
    return replace(region, n=len(columns), stores=(), reductions=totals), columns, given


def _sampled(size: int, device: torch.device) -> Tensor:
    """CHECKED places from each of the start, the middle and the end."""
    starts = (0, max(0, size // 2 - CHECKED // 2), max(0, size - CHECKED))
    return torch.tensor(sorted({i for s in starts for i in range(s, min(size, s + CHECKED))}), device=device)


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = found.double(), wanted.double()
    norms = torch.linalg.vector_norm(found - wanted), torch.linalg.vector_norm(wanted)
    return torch.div(norms[0], norms[1].clamp_min(1e-30))
