"""A Region in a Config as a callable on CUDA tensors: module on disk -> epilogue -> compiled kernel -> library.

The only module, beside device code and sinks.py, that imports quack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quack.cache
import quack.gemm_runtime.host
import torch
from cutlass.cute.runtime import find_runtime_libraries
from cutlass.cutlass_dsl import CuTeDSL
from quack.rounding import RoundingMode
from torch import Tensor

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.device import along_n
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.heads import columns, over_heads
from coda_inductor.core.region import Region
from coda_inductor.kernels import library
from coda_inductor.kernels.cubin import stack_bytes
from coda_inductor.kernels.executable import Executable, Parts
from coda_inductor.kernels.module import load_module

NO_WAITS = ("use_pdl", False)  # of quack's own: device._Overlapping has them


class Compiled(Executable):
    """A kernel that the compiler makes, or finds as it left it."""

    def __init__(
        self, region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A
    ) -> None:
        """Writes the module under `directory`, imports it and compiles it (1-4 s; 20 ms if on disk)."""
        legality.require(region, config, target)
        _require_compiler(target)
        text = source.render(region, target, swapped=swapped)
        name = source.module_name(text)
        objects = library.folder(region, config, directory, swapped=swapped, target=target)
        plan = _plan(region, config, target, load_module(text, name, directory).epilogue, objects)
        fields, options = plan.gemm_cls.EpilogueArguments._fields, plan.scheduler_static
        swizzle = options.max_swizzle_size  # 8; 2 to 32 gained 1.5 % at most (H200, 4 tiles of 9 Regions each)
        if options != type(options)(options.max_active_clusters, None, swizzle, None, None, None):
            raise Unsupported(f"no kernel for {config}: a scheduler with unknown options, {options}")
        made = [*objects.glob("*/*.o")]
        stack = stack_bytes(made[0].read_bytes()) if len(made) == 1 else None
        parts = Parts(plan.compiled_fn, fields, swizzle, stack)
        if len(made) == 1:  # else it is not known which
            library.keep(objects, made[0], parts, find_runtime_libraries(enable_tvm_ffi=True))
        super().__init__(region, config, parts, swapped=swapped)


def _require_compiler(target: Target) -> None:
    """Raises Unsupported unless this process compiles for the target: cutlass reads for which when it is imported."""
    found = CuTeDSL._get_dsl().get_arch_enum()
    if (found.major, found.minor) != target.capability:
        raise Unsupported(f"this process compiles for {found.name}, not for {target.name}")


def _plan(region: Region, config: Config, target: Target, epilogue: Any, objects: Path) -> Any:
    """quack's launch plan: only ranks, dtypes and majors are read from the tensors, so they have no memory."""
    names = source.slots(region)
    kinds = tuple((name, "c" if name == "c" else epilogue.ops[name].fn_port) for name in epilogue.operand_names)
    capability = target.capability
    heads = dict(zip(source.head_slots(region), over_heads(region), strict=True))
    before = tuple((name, kind) for name, kind in kinds if name in epilogue.prepass_operand_names)
    forms = tuple((name, "Const") for name in heads)  # quack's word for what is known when a kernel is compiled
    mint_key = (kinds, capability[0], len(region.products) == 2, False, before, RoundingMode.RN, forms, region.adds)
    values: dict[str, Any] = {name: columns(region, let) for name, let in heads.items()}
    for slot, o in zip(names.operands, region.operands, strict=True):
        wide = "f32" if len(region.products) == 2 and o.extent in ("feature", "sample") else o.dtype
        shape = {"tile": (8, 8), "table": (8, 2 * region.half), "sample": (8, 8, 8)}.get(o.extent, (8,))
        values[slot] = _blank(wide, *shape)
    stores = {slot: _blank(s.dtype, 8, 8) for slot, s in zip(names.stores, region.stores, strict=True)}
    values |= stores | ({source.second(slot): blank for slot, blank in stores.items()} if region.halved else {})
    values |= {slot: _blank("f32", 8, 8) for slot in names.sums}
    values |= {source.whole(slot): _blank("f32", 8) for slot in names.sums}
    if len(region.products) == 2 and not region.half:
        values["lane_offset"] = 0
    values |= dict.fromkeys(source.SPANS, 0) if region.spanned else {}
    values |= dict.fromkeys(source.DOORS, 0)
    left, right = (_blank(dtype, 16, 16) for dtype in region.dtypes)
    values |= dict(zip(source.SECONDS, (left, right, 0), strict=True)) if region.unlike else {}
    product, store = region.products[0], values.pop("D", None)
    across = product.b_layout == "kn"
    if config.turned:
        left, right, across, store = right.t() if across else right, left, product.a_layout == "km", store.t()
    elif product.a_layout == "km":
        left = left.t()
    attributes: list[tuple[str, Any]] = [NO_WAITS]
    attributes += [("resolve_epi_m_major", along_n)] if config.order == "n" else []
    attributes += [("fp8_slow_accum", False)] if region.fast else []
    with _objects_in(objects):
        try:
            return quack.gemm_runtime.host.build_gemm_epi_plan(
                epilogue._mint(*mint_key), capability, left, right, store, values.pop("c", None),
                epi_values=values, tile_M=config.tile_m, tile_N=config.tile_n, cluster_M=config.cluster_m,
                cluster_N=config.cluster_n, pingpong=config.pingpong, b_kn=across,
                post_init_attrs=tuple(attributes), gemm_cls_ref=epilogue._class_ref(mint_key),
            )  # fmt: skip
        except Exception as error:  # the boundary to a compiler: whatever it raises, this kernel does not exist
            raise Unsupported(f"no kernel for {config}: {type(error).__name__}: {error}") from error


def without_gpu() -> None:
    """Lets this process compile where the driver cannot say how many blocks fit; its kernels must not be launched."""
    quack.gemm_runtime.host.get_max_active_clusters = lambda cluster_size: 1


def _blank(dtype: str, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


@contextlib.contextmanager
def _objects_in(directory: Path) -> Iterator[None]:
    """quack keeps compiled kernels in the temporary directory, where others can write: ours go to the store."""
    before = quack.cache.CACHE_DIR
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    quack.cache.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        quack.cache.CACHE_DIR = before
