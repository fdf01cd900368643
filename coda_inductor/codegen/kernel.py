"""A Region in a Config as a callable on CUDA tensors: module on disk -> epilogue -> compiled kernel -> launch.

The only module, beside device.py, that knows quack. One compiled kernel serves every M: nothing is keyed on the token
count, and a launch fills in pointers and calls the compiled host function (under 1 us plus the driver; quack's own
entry point takes 9 to 14 us and rebuilds its plan for each new M, 28 us).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import quack.cache
import quack.gemm_runtime.host
import torch
from quack.rounding import RoundingMode
from torch import Tensor

from coda_inductor.codegen import legality, source, store
from coda_inductor.codegen.cubin import stack_bytes
from coda_inductor.codegen.device import along_n
from coda_inductor.codegen.legality import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import DTYPES, Region

SM90 = (9, 0)
FINISH: dict[str, Any] = {"sum": torch.sum, "logsumexp": torch.logsumexp}
"""What makes one result of each tile's. (torch.logsumexp is several kernels over [M, tiles of N], which are 16 MB for
8192 tokens, 128256 words and tiles of 256.)"""


class Compiled:
    """One kernel. `stack` is its local memory in bytes per thread (spilled registers), None if unknown."""

    def __init__(self, region: Region, config: Config, directory: Path, *, swapped: bool = False) -> None:
        """Writes the module under `directory`, imports it and compiles it (1-4 s, or 2 ms when on disk)."""
        legality.require(region, config)
        self.region, self.config = region, config
        text = source.render(region, swapped=swapped)
        name = source.module_name(text)
        objects = directory / "objects" / f"{name}-{config}"
        plan = _plan(region, config, _load(text, name, directory).epilogue, objects)
        objects_found = sorted(objects.glob("*/*.o"), key=lambda p: p.stat().st_mtime)
        self.stack = stack_bytes(objects_found[-1].read_bytes()) if objects_found else None
        self._run, self._scheduler = plan.compiled_fn, plan.scheduler_static
        self._arguments = plan.gemm_cls.EpilogueArguments
        self._bind(region, self._arguments._fields, swapped)

    def _bind(self, region: Region, fields: tuple[str, ...], swapped: bool) -> None:
        """Positions: which input or output goes to which field of the epilogue's arguments."""
        names = source.slots(region)
        place = {field: i for i, field in enumerate(fields)}
        first = region.matrices
        self._blank: list[Any] = [None] * len(fields)
        self._inputs = [(place[s], first + i) for i, s in enumerate(names.operands) if s != "c"]
        self._widened = [
            (place[s], first + i)
            for i, (s, o) in enumerate(zip(names.operands, region.operands, strict=True))
            if len(region.products) == 2 and o.extent == "feature" and o.dtype != "f32"
        ]
        self._stores = [(place[s], i) for i, s in enumerate(names.stores) if s != "D"]
        totals = zip(names.sums, region.reductions, strict=True)
        self._sums: dict[tuple[bool, str], list[tuple[int, int]]] = {}  # by whether they are over M, and their kind
        for i, (s, r) in enumerate(totals, len(names.stores)):
            self._sums.setdefault((r.over == "M", r.of), []).append((place[s], i))
        self._c = first + names.operands.index("c") if "c" in names.operands else None
        self._d = 0 if "D" in names.stores else None
        products = region.products[::-1] if swapped else region.products
        self._a, self._b, self._second = products[0].a, products[0].b, products[-1].b
        self._offset = place["lane_offset"] if len(products) == 2 else None

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """`inputs` as the Region orders them, on one device, in 16-byte aligned rows; `outs`: stores, then sums,
        contiguous. A None store is written to scratch, a None sum is left unfinished; sums that are rows of one tensor
        are finished together. M is inputs[a].shape[0] >= 1."""
        a, b = inputs[self._a], inputs[self._b]
        fields = self._blank.copy()
        for field, i in self._inputs:
            fields[field] = inputs[i]
        for field, i in self._widened:
            fields[field] = inputs[i].float()
        for field, i in self._stores:
            fields[field] = self._store(i, outs[i], a)
        finish = []
        for (over_m, of), sums in self._sums.items():
            shape = (len(sums), *self._partials(a.shape[0], over_m))
            partials = torch.empty(shape, dtype=torch.float32, device=a.device)
            for (field, _), partial in zip(sums, partials.unbind(), strict=True):
                fields[field] = partial
            finish.append((FINISH[of], partials, 1 if over_m else 2, [outs[i] for _, i in sums]))
        if self._offset is not None:
            # From the first weight to the second, in elements; both are 16-bit.
            fields[self._offset] = (inputs[self._second].data_ptr() - b.data_ptr()) // 2
        d = None if self._d is None else self._store(self._d, outs[self._d], a)
        c = None if self._c is None else inputs[self._c]
        self._run(a, b, d, c, self._arguments._make(fields), self._scheduler, None, None, None)
        for add_up, partials, dim, totals in finish:
            if len(totals) > 1 and (rows := _one_tensor(totals)) is not None:
                add_up(partials, dim, out=rows)
                continue
            for partial, out in zip(partials, totals, strict=True):
                if out is not None:
                    add_up(partial, dim - 1, out=out)

    def _partials(self, m: int, over_m: bool) -> tuple[int, int]:
        """A sum leaves the kernel as one partial result per tile: [tiles of M, N], or [M, tiles of N]."""
        if over_m:
            return -(-m // self.config.tile_m), self.region.n
        return m, -(-self.region.n * len(self.region.products) // self.config.tile_n)

    def _store(self, i: int, out: Tensor | None, like: Tensor) -> Tensor:
        if out is not None:
            return out
        store_dtype = DTYPES[self.region.stores[i].dtype]
        return torch.empty((like.shape[0], self.region.n), dtype=store_dtype, device=like.device)


def _one_tensor(rows: Sequence[Tensor | None]) -> Tensor | None:
    """The tensor whose rows these (two or more) are, None if they are not those of one."""
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or len({row.untyped_storage().data_ptr() for row in found}) > 1:
        return None
    pitch, *others = {b.storage_offset() - a.storage_offset() for a, b in pairwise(found)}
    if others or pitch < len(found[0]):
        return None
    return found[0].as_strided((len(rows), len(found[0])), (pitch, 1))


class _Loader(SourceFileLoader):
    """Leaves no bytecode in the store, which holds nothing that `cache ls` does not know."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes nothing."""


def _load(text: str, name: str, directory: Path) -> ModuleType:
    """The generated module, written to disk (CuTeDSL and quack read its source), imported under its content's name."""
    if name in sys.modules:
        return sys.modules[name]
    path = directory / "epilogues" / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        store.write(path, text)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: quack finds the function through its module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _plan(region: Region, config: Config, epilogue: Any, objects: Path) -> Any:
    """quack's launch plan: only ranks, dtypes and majors are read from the tensors, so they have no memory."""
    names = source.slots(region)
    kinds = tuple((name, "c" if name == "c" else epilogue.ops[name].fn_port) for name in epilogue.operand_names)
    mint_key = (kinds, SM90[0], len(region.products) == 2, False, (), RoundingMode.RN, (), False)
    values: dict[str, Any] = {}
    for slot, o in zip(names.operands, region.operands, strict=True):
        wide = "f32" if len(region.products) == 2 and o.extent == "feature" else o.dtype
        values[slot] = _blank(wide, *((8, 8) if o.extent == "tile" else (8,)))
    values |= {slot: _blank(s.dtype, 8, 8) for slot, s in zip(names.stores, region.stores, strict=True)}
    values |= {slot: _blank("f32", 8, 8) for slot in names.sums}
    if len(region.products) == 2:
        values["lane_offset"] = 0
    matrix = _blank(region.dtype, 8, 8)
    with _objects_in(objects):
        try:
            return quack.gemm_runtime.host.build_gemm_epi_plan(
                epilogue._mint(*mint_key), SM90, matrix, matrix, values.pop("D", None), values.pop("c", None),
                epi_values=values, tile_M=config.tile_m, tile_N=config.tile_n, cluster_M=config.cluster_m,
                cluster_N=config.cluster_n, pingpong=config.pingpong, b_kn=region.products[0].b_layout == "kn",
                post_init_attrs=(("resolve_epi_m_major", along_n),) if config.order == "n" else (),
                gemm_cls_ref=epilogue._class_ref(mint_key),
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
