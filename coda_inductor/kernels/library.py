"""A compiled kernel as a shared library in the store, beside the object that the compiler left: loaded without the
compiler, whose import takes 0.5 s (on an H200's host) and 115 MB.

https://docs.nvidia.com/cutlass/latest/media/docs/pythonDSL/cute_dsl_general/compile_with_tvm_ffi.html describes the
link. Where there is no linker, or what is kept is not what it was, the compiler is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from coda_inductor.codegen import source
from coda_inductor.codegen import target as targets
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels import limit, store
from coda_inductor.kernels.executable import Executable, Parts

log = logging.getLogger("coda_inductor.library")

FUNCTION = "func"  # as quack exports it
KEPT = "launch.json"
LINKERS = ("cc", "gcc", "clang")
LINK_S = 60
OURS = ("kernel.py", "executable.py", "library.py")  # (a module's name holds source.device_digest)


def folder(region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A) -> Path:
    """Where the one compiled form of a Region in a configuration lies, by today's packages: no two targets share it."""
    name = source.module_name(source.render(region, target, swapped=swapped))
    form = hashlib.sha256(f"{target.name} {source.form(region)} {made_by()}".encode()).hexdigest()[:24]
    return directory / "objects" / f"{name}-{config}" / form


def load(
    region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A
) -> Executable | None:
    """The kernel as it was kept. None if it was not, or is not what it was. It is used from now on, also if it is made
    only now."""
    place = folder(region, config, directory, swapped=swapped, target=target)
    limit.using(directory, place.parent.name)
    parts = open_kept(place)
    return Executable(region, config, parts, swapped=swapped) if parts else None


def open_kept(place: Path) -> Parts | None:
    """What `keep` left there. None if it left nothing, or it is not what it was."""
    try:
        found = json.loads((place / KEPT).read_text())
        path = place / found["library"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != found["sha256"]:
            return None
        import tvm_ffi

        function = tvm_ffi.load_module(path)[FUNCTION]
        return Parts(function, tuple(found["fields"]), int(found["swizzle"]), found["stack"])
    except FileNotFoundError:
        return None
    except Exception as error:  # a broken record, another loader: the compiler will find or make the kernel
        log.info("%s is not loaded as it was kept: %s: %s", place, type(error).__name__, error)
        return None


def kept(region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A) -> bool:
    """Was the kernel kept, or compiled and not linked, as far as can be told without loading it?"""
    place = folder(region, config, directory, swapped=swapped, target=target)
    return any(place.glob(KEPT)) or any(place.glob("*/*.o"))


def keep(place: Path, compiled: Path, parts: Parts, runtime: Sequence[str]) -> None:
    """Links the object `compiled` with the `runtime` libraries and writes down its parts. (Also where it was done: what
    lay there could not be loaded.) Without a linker, or if it fails, nothing is kept."""
    linker = next(filter(None, map(shutil.which, LINKERS)), None)
    if linker is None:
        return
    # Every kernel's library has the same exported names: each is to find its own.
    command = [linker, "-shared", "-Wl,-Bsymbolic", str(compiled), *runtime]
    for needed in runtime:
        command += ["-Xlinker", "-rpath", "-Xlinker", str(Path(needed).parent)]
    try:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            linked, path = Path(scratch, "linked.so"), compiled.with_suffix(".so")
            subprocess.run([*command, "-o", str(linked)], check=True, capture_output=True, timeout=LINK_S)
            digest = hashlib.sha256(linked.read_bytes()).hexdigest()
            linked.replace(path)
        found = {"library": str(path.relative_to(place)), "sha256": digest}
        parted = {"fields": parts.fields, "swizzle": parts.swizzle, "stack": parts.stack}
        store.write(place / KEPT, json.dumps({**found, **parted}, indent=1, sort_keys=True) + "\n")
    except (OSError, subprocess.SubprocessError, Unsupported) as error:  # the kernel runs; a warm start takes longer
        log.info("%s is not linked: %s %s", compiled, error, getattr(error, "stderr", ""))


@cache
def made_by() -> str:
    """The digest of what compiles and launches: packages, where their libraries lie, the driver (which decides for one
    of cutlass's two), quack's sources, which a user may have changed, and our own that call it."""
    packages = [*sorted(targets.versions().items()), targets.installed("apache-tvm-ffi"), platform.python_version()]
    cutlass, quack = importlib.util.find_spec("cutlass"), importlib.util.find_spec("quack")
    digest = hashlib.sha256(repr([packages, cutlass and cutlass.origin, driver()]).encode())
    ours = [Path(__file__).with_name(name) for name in OURS]
    theirs = [Path(root) for root in (quack and quack.submodule_search_locations) or ()]
    for path in [*ours, *sorted(path for root in theirs for path in root.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def driver() -> int:
    """The version of CUDA up to which the driver goes, 12 or 13; 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000
