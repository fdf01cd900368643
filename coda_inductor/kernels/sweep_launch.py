"""A Sweep on CUDA tensors: its kernel, loaded or compiled at the first launch, or the interpreter with one warning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from coda_inductor.codegen import legality
from coda_inductor.codegen.sweep_plan import blocks, partial_results
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES
from coda_inductor.core.sweep import Sweep, parse_sweep, shape
from coda_inductor.kernels import library
from coda_inductor.kernels.executable import Parts, Run
from coda_inductor.kernels.launch import (
    BUILDING,
    FALL_BACK,
    LAUNCHES,
    aligned,
    compiler,
    fall_back,
    together,
    uncollected,
)
from coda_inductor.kernels.store import HINT, open_store

REACH = 1 << 31  # elements of a tensor: the kernel's offsets are 32-bit numbers


class SweepLaunch:
    """Runs one Sweep at any M."""

    def __init__(self, sweep: Sweep, directory: Path, *, strict: bool = False) -> None:
        """`strict`: what does not run as one kernel is raised, as Unsupported, not computed on torch with a warning."""
        self.sweep, self.directory, self.strict = sweep, directory, strict
        self._stored = max(o.width for o in sweep.outputs)
        self._for_rows, self._for_blocks = partial_results(sweep)
        self._parts: Parts | None = None
        self._refusal: Unsupported | None = None

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """`inputs` as the Sweep's, `outs` as its outputs, contiguous; None if unread."""
        together(((self, inputs, outs),))

    def build(self) -> Parts:
        """The kernel. Raises Unsupported if there is none."""
        if self._refusal is not None:
            raise self._refusal
        if self._parts is None:
            with BUILDING, uncollected():
                if self._parts is not None:
                    return self._parts
                try:
                    kept = library.open_kept(library.sweep_folder(self.sweep, self.directory))
                    self._parts = kept or compiler().build_sweep(self.sweep, self.directory)
                except OSError as error:  # the store: full, read-only, gone
                    raise Unsupported(f"no kernel for sweep {self.sweep.digest}: {error}", hint=HINT) from error
                except Unsupported as refusal:
                    self._refusal = refusal
                    raise
        return self._parts

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run | None:
        """What launches the kernel, on the current device. None: nothing is to be launched, `outs` hold the results."""
        m = self.sweep.tokens(inputs[0].shape)
        if not m:
            for out in outs:
                if out is not None:
                    out.zero_()
            return None
        try:
            function = self.build().function
            if max(m * (width or 1) for _, width in self.sweep.inputs) >= REACH or self._stored * m >= REACH:
                raise Unsupported(f"a sweep over {m} tokens, whose tensors are larger than its kernel can count")
        except Unsupported as error:
            if self.strict:
                raise Unsupported(f"{error.what}", hint=error.hint or FALL_BACK) from error
            fall_back(self.sweep, inputs, outs, str(error))
            return None
        if any(t.dim() > 1 and (t.data_ptr() & 15 or not t.is_contiguous()) for t in inputs):
            inputs = [aligned(t.contiguous()) if t.dim() > 1 else t for t in inputs]
        device = inputs[0].device
        count = blocks(self.sweep, m, multiprocessors(device))
        partial = torch.empty(self._for_rows * m + self._for_blocks * count + 1, dtype=torch.float32, device=device)
        made = [
            torch.empty(shape(o, m), dtype=DTYPES[o.dtype], device=device) if out is None else out
            for out, o in zip(outs, self.sweep.outputs, strict=True)
        ]
        LAUNCHES[self.sweep.digest] += 1
        read = list(inputs)
        return lambda entrance, way_out: function(read, made, partial, count)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


LAUNCHERS: dict[tuple[str, str | None, bool], SweepLaunch] = {}


def sweep_launch(text: str, cache_dir: str | None = None, *, strict: bool = False) -> SweepLaunch:
    """That of a Sweep's text, one per process and cache directory. Raises Unsupported if no kernel can exist."""
    key = (text, cache_dir, strict)
    if key not in LAUNCHERS:
        sweep = parse_sweep(text)
        legality.require_sweep(sweep)
        LAUNCHERS[key] = SweepLaunch(sweep, open_store(cache_dir), strict=strict)
    return LAUNCHERS[key]
