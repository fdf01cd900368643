"""Hand-written parts of the kernels that multiply by tcgen05: how quack's classes for them are told of our epilogues.

Kernels run one after the other. `_Overlapping` must not be mixed in: it holds back the warp that loads A and B, but
here tiles [M, N] are loaded by a warp of their own, which would read them before the kernel before has written.

Imported by generated modules, so it imports the compiler. Its content is part of those modules' names.
"""

from __future__ import annotations

from typing import Any

from quack.epilogue.math import F2

from coda_inductor.codegen.device import HalfStore as HalfStore
from coda_inductor.codegen.device import HalfVector as HalfVector
from coda_inductor.codegen.device import LaneStore as LaneStore
from coda_inductor.codegen.device import LaneVector as LaneVector
from coda_inductor.codegen.device import SampleVector as SampleVector
from coda_inductor.codegen.device import decorators

PADDING = 1024  # bytes at most, before the first tile in shared memory, which is aligned to as many


class _Padded:
    """Mixed into every GEMM class: keeps room for the alignment of shared memory, which quack 0.6.5 leaves out of its
    sum here. The last stage of stores may then take it, and the launch fails."""

    @classmethod
    def _compute_stages(cls, *args: Any) -> Any:
        *before, capacity, occupancy, warps = args
        return super()._compute_stages(*before, capacity - PADDING, occupancy, warps)  # type: ignore[misc]


class _Lanewise:
    """Mixed into every GEMM class: quack asks an epilogue of one product for two values at once here (F2), which our
    functions, written for one, are asked for one after the other."""

    @property
    def _epi_mod_fn(self) -> Any:
        fn = super()._epi_mod_fn  # type: ignore[misc]

        def of_one_or_two(acc: Any, **operands: Any) -> dict[str, Any]:
            if not isinstance(acc, F2):
                return fn(acc, **operands)  # type: ignore[no-any-return]
            first, second = (fn(acc[i], **{name: _lane(x, i) for name, x in operands.items()}) for i in (0, 1))
            return {name: _both(first[name], second[name]) for name in first}

        return of_one_or_two


def _lane(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, F2) else value


def _both(first: Any, second: Any) -> Any:
    """Two values as one of two, and of two factors as two of two."""
    return tuple(zip(first, second, strict=True)) if isinstance(first, tuple) else (first, second)


# quack's own vectorizer of loops over pairs is off: it has crashed the compiler (quack.epilogue.rotary, _sincos_turns).
one_product, two_products, summed_products, unlike_products, neighbours = decorators(
    _Lanewise, _Padded, vectorize=False
)
