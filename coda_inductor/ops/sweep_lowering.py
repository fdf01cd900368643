"""coda.sweep lowered, as launching.py does coda.region: one launch, whose outputs Inductor allocates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from coda_inductor.core.region import DTYPES
from coda_inductor.core.sweep import Sweep, parse_sweep, shape
from coda_inductor.kernels.launch import Launch
from coda_inductor.kernels.sweep_launch import sweep_launch
from coda_inductor.ops.custom import SWEEP
from coda_inductor.ops.lowering import Launcher, given, launched


class SweepLauncher(Launcher):
    """The same of a Sweep."""

    def made(self) -> Launch:
        """The kernel. Raises Unsupported if there is none."""
        return sweep_launch(self.text, self.settings.cache_dir, strict=self.settings.strict)

    def record(self) -> Sweep:
        """What the text says."""
        return parse_sweep(self.text)


class SweepKernel(ir.FallbackKernel):
    """One launch of a Sweep, whose outputs are as a RegionKernel's."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        self.codegen_comment(wrapper)
        text = self.constant_args[0]
        name = f"coda_sweep_{parse_sweep(text).digest}"
        wrapper.add_import_once("from coda_inductor.ops.sweep_lowering import SweepLauncher as coda_sweep_launcher")
        wrapper.add_import_once(f"{name} = coda_sweep_launcher({text!r})")
        wrapper.writeline(f"{self.get_name()} = {name}({given(self, wrapper)})")


def _lower_sweep(inputs: Sequence[Any], text: str, target: str) -> Any:
    if target == "reference":
        return fallback_handler(SWEEP, add_to_fallback_set=False)(inputs, text, target)
    sweep = parse_sweep(text)
    tensors = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in inputs]
    m, device = sweep.tokens(tensors[0].get_size()), tensors[0].get_device()
    assert device is not None
    sizes = [shape(o, m) for o in sweep.outputs]
    layouts = [
        ir.FixedLayout(device, DTYPES[o.dtype], [*size], [size[-1], 1][-len(size) :])
        for o, size in zip(sweep.outputs, sizes, strict=True)
    ]
    return launched(SweepKernel, SWEEP, tensors, (text, target), layouts)


@cache
def register() -> None:
    """Tells Inductor, once."""
    register_lowering(SWEEP, type_promotion_kind=None)(_lower_sweep)
