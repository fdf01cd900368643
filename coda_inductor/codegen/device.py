"""What quack 0.6.5 lacks: launches that overlap, sums that are finished, a feature vector for two lanes, two products
in one tile or in one accumulator, halves of heads. (What an epilogue takes over rows and columns: sinks.py.)

Imported by generated modules, so it imports the compiler. Its content is part of every generated module's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from quack.compile_utils import div_for_dtype, fake_batched, make_fake_tensor
from quack.epilogue import ops
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import RowVecLoad, Scalar, TileStore
from quack.tile_scheduler import TileSchedulerOptions
from quack.varlen_utils import VarlenArguments

from coda_inductor.codegen import source
from coda_inductor.codegen.finish import Total, finish
from coda_inductor.codegen.sinks import Whole
from coda_inductor.codegen.unlike import SecondMatrix, Unlike

TILE_K = 64  # legality.TILE_K
OPEN = 1 << 30  # a door's word; more than a grid has blocks


class LaneVector(RowVecLoad):  # type: ignore[misc]
    """A feature vector [N] f32 beside two products: entry n serves both lanes of pair n, by a stride of 0."""

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        vector = getattr(args, self.name)
        lanes = cute.make_layout(((2, cute.size(vector)),), stride=((0, 1),))
        return {self.name: cute.make_tensor(vector.iterator, lanes)}


class HalfVector(RowVecLoad):  # type: ignore[misc]
    """A feature vector [2n] f32 beside the halves of heads: it is read in their order."""

    def __init__(self, name: str, half: int) -> None:
        super().__init__(name)
        self.half = half

    def config_key(self) -> Any:
        return (self.half,)

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        vector = getattr(args, self.name)
        heads = cute.size(vector) // (2 * self.half)
        halves = cute.make_layout(((2, self.half, heads),), stride=((self.half, 1, 2 * self.half),))
        return {self.name: cute.make_tensor(vector.iterator, halves)}


class SampleVector(RowVecLoad):  # type: ignore[misc]
    """A vector over features for each sample, given for each row as [samples, tokens, N] with a stride of 0. A tile
    reads that of its first row: its rows are of one sample. With two `lanes`, f32, entry n serves both of pair n."""

    def __init__(self, name: str, lanes: int) -> None:
        super().__init__(name)
        self.lanes = lanes

    def config_key(self) -> Any:
        return (self.lanes,)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        shape = (cute.sym_int(), cute.sym_int(), fctx.n)
        return make_fake_tensor(dtype, shape, leading_dim=2, divisibility=4)

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        vectors = getattr(args, self.name)
        (samples, tokens, n), (apart, _, _) = vectors.shape, vectors.stride
        pitch = cute.assume(apart, divby=128 // vectors.element_type.width)  # rows of 16 bytes, as the launch sees to
        columns, step = (n, 1) if self.lanes == 1 else ((2, n), (0, 1))
        layout = cute.make_layout(((tokens, samples), columns), stride=((0, pitch), step))
        return {self.name: cute.make_tensor(vectors.iterator, layout)}

    def _get_gmem_vec(self, param: Any, ctx: Any) -> Any:
        # A cluster may have a tile of which no row is left: it reads, for nothing, what the last row does.
        row, rows = ctx.tile_coord_mnkl[0] * ctx.tile_M, cute.size(param, mode=[0])
        return param[cutlass.select_(row < rows, row, rows - 1), None]


class _Lanes:
    """Mixed into a GEMM class: adjacent accumulators 2n and 2n + 1 are column n of a first and of a second product.

    With `half`, B is a weight [2n, K] whose rows are heads of 2 * `half`, read as [(2, half, heads), K]: the products
    are the halves of its heads. Else B, given as one weight [n, K], is read as [(2, n), K], the second lane
    `lane_offset` elements away: one TMA descriptor spans both allocations.
    """

    half: int

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):  # type: ignore[no-untyped-def]
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d
        )
        (n, k, l), (stride_n, stride_k, stride_l) = mB.shape, mB.stride  # noqa: E741
        if self.half:
            columns: Any = (2, self.half, n // (2 * self.half))
            across, pitch = (cute.assume(size * stride_n, divby=8) for size in (self.half, 2 * self.half))
            strides: Any = (across, stride_n, pitch)
        else:
            columns = (2, n)
            aligned = 128 // mB.element_type.width  # 16 bytes, as TMA encodes strides
            strides = (cute.assume(epilogue_args.lane_offset, divby=aligned), stride_n)
        lanes = cute.make_layout((columns, k, l), stride=(strides, stride_k, stride_l))
        return mA, cute.make_tensor(mB.iterator, lanes), mD, mC, epilogue_args


class LaneStore(TileStore):  # type: ignore[misc]
    """An output [M, N] of a value for each pair of accumulators, of any N, in rows that begin at multiples of 16 bytes.
    (quack asks for an N of as many bytes.)"""

    def __init__(self, name: str) -> None:
        super().__init__(name, gated=True)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, _ = key
        return fake_batched(dtype, fctx.m, cute.sym_int(), fctx.l if fctx.batched else None, 1, div_for_dtype(dtype))


class HalfStore(TileStore):  # type: ignore[misc]
    """The first or second halves (`lane`) of the heads of an output [M, 2n], a value for each pair of accumulators."""

    def __init__(self, name: str, lane: int, half: int) -> None:
        super().__init__(name, gated=True)
        self.lane, self.half = lane, half

    def config_key(self) -> Any:
        return (*super().config_key(), self.lane, self.half)

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        whole = getattr(args, self.name)
        (m, width, l), (pitch, one, apart) = whole.shape, whole.stride  # noqa: E741
        heads = (self.half, width // (2 * self.half))
        nested = cute.make_layout((m, heads, l), stride=(pitch, (one, 2 * self.half), apart))
        halves = cute.make_tensor(whole.iterator + self.lane * self.half, nested)
        return super().to_params(gemm, SimpleNamespace(**{self.name: halves}))  # type: ignore[no-any-return]


class _Launch:
    """A kernel whose blocks are placed while the one before it on the stream still runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def launch(self, **options: Any) -> None:
        self.kernel.launch(**{**options, "use_pdl": True})


class _Overlapping:
    """Mixed into every GEMM class of a target whose row says so, in place of quack's own waits: a block waits for the
    kernel before it on the stream before its first load, or, given a door to enter by, passes that, and waits after the
    loads of each tile. Then blocks of the next kernel may be placed where there is room.

    A door asks that the kernel before is one of these (or what finishes its sums), and that of a line, which is one
    without an entrance and those behind it with one, none writes where another reads or writes: all may run at once.
    What comes before the line is visible to the first, since it waits, and through the doors to all others (doors.py).
    When blocks of a kernel are placed, all of the one before have opened the door, so that none waits for long. And as
    blocks wait in the end, what comes behind the line waits for all of it.
    """

    def kernel(self, *args: Any) -> _Launch:
        return _Launch(super().kernel(*args))  # type: ignore[misc]

    def epi_get_smem_tensors(self, params, storage):  # type: ignore[no-untyped-def]
        # The first that a kernel asks of its epilogue: all threads of all blocks, before they read anything.
        _enter(params.entrance, params.way_out)
        return super().epi_get_smem_tensors(params, storage)  # type: ignore[misc]

    def load_tma(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        state = super().load_tma(*args, **kwargs)  # type: ignore[misc]
        cute.arch.griddepcontrol_wait()  # after each tile's loads: all but the first find it done
        return state


@cute.jit
def _enter(entrance, way_out):  # type: ignore[no-untyped-def]
    """Waits for the kernel before, or passes the door at `entrance`, then opens that at `way_out`."""
    thread, _, _ = cute.arch.thread_idx()
    if entrance == 0:
        cute.arch.griddepcontrol_wait()
    if entrance != 0 or way_out != 0:
        if thread == 0 and entrance != 0:
            _pass(entrance)
        cute.arch.sync_threads()
        cute.arch.fence_proxy("async")  # what comes next is read, and was written, by TMA as well
        x, y, z = cute.arch.block_idx()
        if thread == 0 and way_out != 0 and x + y + z == 0:
            cute.arch.store(_word(way_out), Int32(OPEN), sem="release", scope="gpu")
        cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def _pass(entrance):  # type: ignore[no-untyped-def]
    """Once for each block. The door is open while its word is not 0: OPEN less the blocks that have passed."""
    x, y, z = cute.arch.grid_dim()
    last = Int32(OPEN + 1) - x * y * z
    word = _word(entrance)
    while cute.arch.load(word, Int32, sem="relaxed", scope="gpu") == 0:
        pass
    before = cute.arch.atomic_add(word, Int32(-1), sem="acq_rel", scope="gpu")
    if before == last:
        cute.arch.store(word, Int32(0), sem="relaxed", scope="gpu")


def _word(address: Any) -> Any:
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


class _Finished:
    """Mixed into a GEMM class whose epilogue takes `totals`: they are finished after its kernel, which `multiply`
    launches: the class's own call, whichever machine it is for."""

    totals: tuple[Total, ...]
    multiply: Any

    @cute.jit  # type: ignore[untyped-decorator]
    def __call__(  # type: ignore[no-untyped-def]
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: Optional[cute.Tensor],  # noqa: UP045  (the compiler reads these)
        mC: Optional[cute.Tensor],  # noqa: UP045
        epilogue_args: tuple,  # type: ignore[type-arg]
        scheduler_args: TileSchedulerOptions,
        varlen_args: Optional[VarlenArguments],  # noqa: UP045
        stream: CUstream,
        mSFA: Optional[cute.Tensor] = None,  # noqa: UP045
        mSFB: Optional[cute.Tensor] = None,  # noqa: UP045
    ):
        self.multiply(mA, mB, mD, mC, epilogue_args, scheduler_args, varlen_args, stream, mSFA, mSFB)
        finish(self.totals, epilogue_args, stream)


class Epilogue(EpiMod):  # type: ignore[misc]
    """An epilogue whose GEMM classes, each minted once, have `mixins` with `fields` mixed in: its own, what finishes
    its sums, and what is `around` every kernel of the target."""

    mixins: tuple[type, ...] = ()
    suffix = "of_one"
    lanes = 1
    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        fn: Any,
        *,
        around: tuple[type, ...],
        reduces: dict[str, Any],
        extra_ops: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        totals = tuple(
            Total(name, source.whole(name), isinstance(op, ops.RowVecReduce), op.of, self.lanes, op.rounded, op.tokens)
            for name, op in reduces.items()
        )
        self.mixins = (*self.mixins, *around)
        if totals:
            self.mixins, self.fields = (_Finished, *self.mixins), {**self.fields, "totals": totals}
        wholes = tuple(Whole(total.whole) for total in totals)
        doors = (Scalar(name, Int64) for name in source.DOORS)
        super().__init__(fn, reduces=reduces, extra_ops=(*extra_ops, *wholes, *doors), **options)

    def _mint(self, *mint_key: Any) -> type:
        minted = super()._mint(*mint_key)
        mixed: dict[type, type] = self.__dict__.setdefault("_mixed", {})
        if minted not in mixed and self.mixins:
            fields = {"__module__": __name__, "multiply": minted.__call__, **self.fields}
            mixed[minted] = type(f"{minted.__name__}_{self.suffix}", (*self.mixins, minted), fields)
        return mixed.get(minted, minted)  # type: ignore[no-any-return]


class TwoProductsMod(Epilogue):
    """An epilogue over pairs (first product, second product), which reads B in two lanes: of two weights or, with
    `half`, of one."""

    mixins = (_Lanes,)
    lanes = 2

    def __init__(self, fn: Any, *, half: int = 0, **options: Any) -> None:
        self.suffix, self.fields = f"lanes{half or ''}", {"half": half}
        super().__init__(fn, mode="acc_pair", extra_ops=() if half else (Scalar("lane_offset", Int64),), **options)


class NeighboursMod(Epilogue):
    """An epilogue over pairs of neighbouring columns of one product, which it stores as they lie. Heads are 2 * `half`
    wide, as its tables are: a kernel is compiled for that width."""

    lanes = 2

    def __init__(self, fn: Any, *, half: int, **options: Any) -> None:
        self.suffix = f"neighbours{half}"
        super().__init__(fn, mode="acc_pair", **options)


class _Summed:
    """Mixed into a GEMM class: A and B, each given as the lower of two tensors, are read with K as (64, K / 64, 2),
    the second tensor `a_apart` or `b_apart` elements away: one TMA descriptor spans both, and the mainloop runs through
    2 K. Strides are positive, so one whose first tensor lies higher (`a_turned`, `b_turned` are 1, not 0) is read from
    its second half on: the products are added in their order, wherever their tensors lie."""

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):  # type: ignore[no-untyped-def]
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(  # type: ignore[misc]
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d
        )
        return _twice(mA, epilogue_args.a_apart), _twice(mB, epilogue_args.b_apart), mD, mC, epilogue_args

    def epi_get_smem_tensors(self, params, storage):  # type: ignore[no-untyped-def]
        self._turned = params.a_turned, params.b_turned  # the first that a kernel asks of its epilogue
        return super().epi_get_smem_tensors(params, storage)  # type: ignore[misc]

    def load_tma(self, pipeline, producer_state, copy_fns, k_tile_cnt, k_tile_start=0):  # type: ignore[no-untyped-def]
        copies = [_later(copy, turned, k_tile_cnt) for copy, turned in zip(copy_fns, self._turned, strict=False)]
        return super().load_tma(pipeline, producer_state, copies, k_tile_cnt, k_tile_start)  # type: ignore[misc]


def _later(copy: Any, turned: Any, k_tiles: Any) -> Any:
    """A copy of k tiles that begins with the second half of them if `turned`."""
    later = turned * (k_tiles // 2)

    def copy_later(k_tile: Any, *args: Any, **kwargs: Any) -> None:
        k_tile = k_tile + later
        copy(cutlass.select_(k_tile < k_tiles, k_tile, k_tile - k_tiles), *args, **kwargs)

    return copy_later


def _twice(matrix: Any, apart: Any) -> Any:
    """[rows, K, 1] as [rows, (64, K / 64, 2), 1], `apart` elements (a multiple of 8, as TMA encodes strides) apart."""
    (rows, k, l), (stride, stride_k, stride_l) = matrix.shape, matrix.stride  # noqa: E741
    strides = (stride, (stride_k, TILE_K * stride_k, cute.assume(apart, divby=8)), stride_l)
    return cute.make_tensor(matrix.iterator, cute.make_layout((rows, (TILE_K, k // TILE_K, 2), l), stride=strides))


class SummedProductsMod(Epilogue):
    """An epilogue over the sum of two products, which reads two tensors as A and two as B."""

    mixins, suffix = (_Summed,), "summed"

    def __init__(self, fn: Any, **options: Any) -> None:
        apart = (Scalar("a_apart", Int64), Scalar("b_apart", Int64), *(Scalar(f"{x}_turned", Int32) for x in "ab"))
        super().__init__(fn, extra_ops=apart, **options)


class UnlikeProductsMod(Epilogue):
    """An epilogue over the sum of two products of unlike K, which reads two tensors as A and two as B."""

    mixins, suffix = (Unlike,), "unlike"

    def __init__(self, fn: Any, **options: Any) -> None:
        seconds = SecondMatrix("a_second", "a"), SecondMatrix("b_second", "b"), Scalar("first_steps", Int32)
        super().__init__(fn, extra_ops=seconds, **options)


def along_n(epilogue_args: Any) -> bool:
    """Stands in for `resolve_epi_m_major`: walk the epilogue's subtiles along N first."""
    return False


class Decorators(NamedTuple):
    """What generated modules make an epilogue with: of one product as quack's `gemm_epilogue`, of two, of a sum of two
    of the same K and of unlike K, and of neighbouring columns. Each takes outputs, ops and reduces by name; `half`, of
    two products and neighbours."""

    one_product: Any
    two_products: Any
    summed_products: Any
    unlike_products: Any
    neighbours: Any


def decorators(*around: type, **options: Any) -> Decorators:
    """Those of a target: `around` is mixed into the GEMM class of every kernel, `options` are EpiMod's."""

    def decorator(kind: type[Epilogue]) -> Any:
        return lambda **given: lambda fn: kind(fn, around=around, **options, **given)

    return Decorators(*map(decorator, (Epilogue, TwoProductsMod, SummedProductsMod, UnlikeProductsMod, NeighboursMod)))


one_product, two_products, summed_products, unlike_products, neighbours = decorators(_Overlapping)
"""Of the target whose kernels overlap; others have a module of their own."""
