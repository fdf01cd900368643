"""What an epilogue takes over its rows or columns, where quack 0.6.5 lacks it: partial results as finish.py reads them,
sums that are masked, the largest with NaN.

Imported by generated modules (through device.py), so it imports the compiler; its content is part of their names.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.compile_utils import make_fake_tensor
from quack.epilogue import ops
from quack.epilogue.ops import EpiOp

from coda_inductor.codegen.finish import larger


class _Parts:
    """Leaves partial results, of which finish.py makes one."""

    of: str  # the row of core/reductions.py
    rounded = ""  # to which dtype the result is (Total)
    tokens = 0  # of each sample, if it is taken for each


class _TileByTile(_Parts):
    """Mixed into a sum over N of quack's: its partial results [M, tiles] lie tile by tile, as finish.py reads them."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        return make_fake_tensor(dtype, (fctx.m, cute.sym_int()), leading_dim=0, divisibility=1)


class ColVecReduce(_TileByTile, ops.ColVecReduce):  # type: ignore[misc]
    """A sum over N."""

    of = "sum"


class _Columns(_Parts):
    """Mixed into a sum over M of quack's: its partial results are [tiles, columns], of two products those of both."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), leading_dim=1, divisibility=1)


class RowVecReduce(_Columns, ops.RowVecReduce):  # type: ignore[misc]
    """A sum over M."""

    of = "sum"


class SampleReduce(RowVecReduce):
    """A sum over the rows of each sample of `tokens`."""

    def __init__(self, name: str, tokens: int, **options: Any) -> None:
        super().__init__(name, **options)
        self.tokens = tokens

    def config_key(self) -> Any:
        return (*super().config_key(), self.tokens)


class OnlineLSEReduce(_TileByTile, ops.OnlineLSEReduce):  # type: ignore[misc]
    """A logsumexp over N."""

    of = "logsumexp"


def _by_larger(method: Any) -> Any:
    """A traced method of quack's in which NaN is larger than any number, as in torch.amax; in quack's it is lost. (The
    compiler reads its source, and the names there in its globals.)"""
    plain = method.__wrapped__
    names = {**plain.__globals__, "_vec_reduce_combine": lambda a, b, combine: larger(a, b)}
    return cute.jit(FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__))


class _Max:
    """Mixed into a sum of quack's: takes the largest instead. `masked`: places past the edge are left out as -inf.
    `rounded`: to which dtype finish.py rounds it, which makes it the largest of the values as they are rounded."""

    of = "max"

    def __init__(self, name: str, rounded: str = "", masked: bool = False) -> None:
        super().__init__(name, combine="max")  # type: ignore[call-arg]
        self.rounded, self.masked = rounded, masked

    def config_key(self) -> Any:
        return (*super().config_key(), self.rounded, self.masked)  # type: ignore[misc]

    def _mask_oob_active(self) -> bool:
        return self.masked

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag):  # type: ignore[no-untyped-def]
        largest = state
        if cutlass.const_expr(self.masked):
            largest, coords, limit = state
            self._mask_oob(frag, coords, limit, gemm.cta_tile_shape_mnk[:2])  # type: ignore[attr-defined]
        for i in cutlass.range(cute.size(largest), unroll_full=True):
            largest[i] = larger(largest[i], frag[i])


class ColVecMax(_Max, _TileByTile, ops.ColVecReduce):  # type: ignore[misc]
    """The largest over N."""

    _merge = _by_larger(ops.ColVecReduce._merge)


class RowVecMax(_Max, _Columns, ops.RowVecReduce):  # type: ignore[misc]
    """The largest over M."""

    end_loop_stage = _by_larger(ops.RowVecReduce.end_loop_stage)
    end_loop_finish = _by_larger(ops.RowVecReduce.end_loop_finish)


class HeadSum(ops.GroupedColStatsBase):  # type: ignore[misc]
    """A sum over each `width` columns, the accumulators of a head, which the epilogue reads. It is taken of the whole
    tile before anything of it is stored. quack is told the width when it compiles; here it is part of the module's
    text, which names the kernel."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name)
        self.width = width

    def config_key(self) -> Any:
        return (self.width,)

    def stat_value(self, total: Any, group_cols: Any) -> Any:
        return total


class Whole(EpiOp):  # type: ignore[misc]
    """The vector that a finished sum goes to, f32: none of the kernel's, but of the one after it."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        return make_fake_tensor(dtype, (cute.sym_int(),), leading_dim=0, divisibility=1)

    def param_fields(self) -> list[tuple[str, Any, None]]:
        return [(self.name, object, None)]  # which the kernel gets as None


class _Masked:
    """Mixed into a sum of quack's: leaves out what lies past the end of the summed axis, whatever it is."""

    def _mask_oob_active(self) -> bool:
        return True

    @cute.jit
    def _mask_oob(self, frag, coords, limit, tile_shape_mn):  # type: ignore[no-untyped-def]
        """frag: this subtile's values; coords: their (m, n) in the tile; limit: the tile's columns before N, or its
        rows before M."""
        axis = self._reduce_dim()  # type: ignore[attr-defined]
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            frag[i] = cutlass.select_(coords[i][axis] < limit, frag[i], Float32(0.0))


class MaskedColVecReduce(_Masked, ColVecReduce):
    """A sum over N without the columns past N."""


class MaskedRowVecReduce(_Masked, RowVecReduce):
    """A sum over M without the rows past M."""
