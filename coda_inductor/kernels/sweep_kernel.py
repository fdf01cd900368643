"""A Sweep as a compiled kernel: module on disk -> functions -> kernel -> library. Imports the compiler.

Its widths are in the kernel, M is not.
"""

from __future__ import annotations

import os
from pathlib import Path

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import find_runtime_libraries, make_fake_stream
from quack.compile_utils import make_fake_tensor

from coda_inductor.codegen import legality, sweep_source
from coda_inductor.codegen.sweep_device import TYPES, SweepKernel
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.sweep import Sweep
from coda_inductor.kernels import library
from coda_inductor.kernels.cubin import stack_bytes
from coda_inductor.kernels.executable import Parts
from coda_inductor.kernels.module import load_module


def build_sweep(sweep: Sweep, directory: Path) -> Parts:
    """Compiles it into the store (1-3 s), or finds it as it was kept. Raises Unsupported if it cannot be compiled."""
    legality.require_sweep(sweep)
    place = library.sweep_folder(sweep, directory)
    if (kept := library.open_kept(place)) is not None:
        return kept
    module = load_module(sweep_source.render(sweep), library.sweep_name(sweep), directory)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, half_done = place / "sweep.o", place / f".sweep.o.{os.getpid()}"
    try:
        compiled = cute.compile(
            SweepKernel(sweep, module.PARTS), *_blanks(sweep), Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
        )  # fmt: skip
        compiled.export_to_c(object_file_path=str(half_done), function_name=library.FUNCTION)
        half_done.replace(path)
    except OSError:
        raise
    except Exception as error:  # the boundary to a compiler: whatever it raises, this kernel does not exist
        raise Unsupported(f"no kernel for sweep {sweep.digest}: {type(error).__name__}: {error}") from error
    parts = Parts(compiled, (), 0, stack_bytes(path.read_bytes()))
    library.keep(place, path, parts, find_runtime_libraries(enable_tvm_ffi=True))
    return parts


def _blanks(sweep: Sweep) -> tuple[list[object], list[object], object]:
    """Inputs, outputs and scratch without memory: only types, widths and alignments are read."""

    def blank(extent: str, dtype: str, width: int, rows: object) -> object:
        kind = TYPES[dtype]
        if not width:
            return make_fake_tensor(kind, (rows,), divisibility=1)
        shape = (width,) if extent == "feature" else (rows, width)
        return cute.runtime.make_fake_tensor(kind, shape, stride=(width, 1)[-len(shape) :], assumed_align=16)

    m, reads = cute.sym_int(), {r.input: r for part in sweep.parts for r in part.reads}
    inputs = []
    for i, (dtype, width) in enumerate(sweep.inputs):
        if inner := reads[i].inner:
            shape = (cute.sym_int(), cute.sym_int(), inner)
            stride = (cute.sym_int64(divisibility=inner), inner, 1)
            inputs.append(cute.runtime.make_fake_tensor(TYPES[dtype], shape, stride=stride, assumed_align=16))
        else:
            rows = m if reads[i].extent in ("tile", "token") else cute.sym_int()
            inputs.append(blank("tile", dtype, width, rows))
    outs = [blank(o.extent, o.dtype, o.width, m) for o in sweep.outputs]
    return inputs, outs, make_fake_tensor(TYPES["f32"], (cute.sym_int(),), divisibility=1)
