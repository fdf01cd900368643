"""Two products of unlike K in one accumulator: what quack 0.6.5 lacks for it. One TMA descriptor has one distance from
row to row, so that the second matrices have descriptors of their own.

Imported by generated modules, so it imports the compiler. Its content is part of every generated module's name.
"""

from __future__ import annotations

import inspect
from typing import Any

import cutlass.cute as cute
from quack import copy_utils, layout_utils
from quack.compile_utils import div_for_dtype, make_fake_tensor
from quack.epilogue.ops import EpiOp


class SecondMatrix(EpiOp):  # type: ignore[misc]
    """The second left matrix [M, K], or the second right one of the same layout as the first, which `side` names: all
    that the kernel gets is a TMA descriptor, for boxes as the first one's."""

    def __init__(self, name: str, side: str) -> None:
        super().__init__(name)
        self.side = side

    def config_key(self) -> Any:
        return (self.side,)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), div_for_dtype(dtype), leading_dim=1)

    def param_fields(self) -> list[tuple[str, Any, None]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        matrix, left = getattr(args, self.name), self.side == "a"
        if gemm.b_transposed and not left:
            matrix = layout_utils.select(matrix, [1, 0])
        staged = gemm.a_smem_layout_staged if left else gemm.b_smem_layout_staged
        tile_m, tile_n, tile_k = gemm.cta_tile_shape_mnk
        box = (tile_m if left else tile_n), tile_k
        alike = gemm.cluster_shape_mnk[1 if left else 0]
        one = cute.slice_(staged, (None, None, 0))
        atom, _ = gemm._make_tma_atoms_and_tensors(layout_utils.expand(matrix, 2, 1), one, box, alike)
        return {self.name: atom}


class Unlike:
    """Mixed into a GEMM class: two tensors follow each other along K as A, and two as B, each with a descriptor of its
    own. Of the first, quack's own, it is said that all of K is theirs; steps behind `first_steps` are copied from the
    second ones, to the same place and in the same coordinates but for K. So K of the first is whole steps. Behind the
    end of the second, TMA writes zeros."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):  # type: ignore[no-untyped-def]
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d
        )
        more = cute.size(epilogue_args.a_second, mode=[1])
        return _longer(mA, more), _longer(mB, more), mD, mC, epilogue_args

    def epi_get_smem_tensors(self, params, storage):  # type: ignore[no-untyped-def]
        self._second = params.a_second, params.b_second  # the first that a kernel asks of its epilogue
        self._first_steps = params.first_steps
        return super().epi_get_smem_tensors(params, storage)  # type: ignore[misc]

    def load_tma(self, pipeline, producer_state, copy_fns, k_tile_cnt, k_tile_start=0):  # type: ignore[no-untyped-def]
        steps, load = self._first_steps, super().load_tma  # type: ignore[misc]
        producer_state = load(pipeline, producer_state, copy_fns, steps, 0)
        copies = [_through(*pair, steps) for pair in zip(copy_fns, self._second, strict=False)]
        return load(pipeline, producer_state, copies, k_tile_cnt - steps, steps)


def _longer(matrix: Any, more: Any) -> Any:
    """[rows, K, 1] as if it were [rows, K + more, 1]."""
    (rows, k, l), strides = matrix.shape, matrix.stride  # noqa: E741
    return cute.make_tensor(matrix.iterator, cute.make_layout((rows, k + more, l), stride=strides))


def _through(copy: Any, atom: Any, steps: Any) -> Any:
    """A copy of quack's (copy_utils.tma_get_block_copy_fn) through another descriptor, which begins after `steps`: the
    coordinates that it copies from, and where to, are in no other place than its closure."""
    given = inspect.getclosurevars(inspect.unwrap(copy)).nonlocals
    other = copy_utils.tma_get_block_copy_fn(atom, given["src"], given["dst"], given["tma_multicast"])

    def copy_other(k_tile: Any, *args: Any, **kwargs: Any) -> None:
        other(k_tile - steps, *args, **kwargs)

    return copy_other
