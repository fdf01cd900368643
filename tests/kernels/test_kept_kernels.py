"""A compiled kernel is kept as a library: it needs no compiler, and is told apart from every other."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import CASES, norm_backward, token_scale
from compiler_process import MISSING, kernels_of
from processes import fresh

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels import cubin, library
from coda_inductor.kernels import store as stored
from coda_inductor.kernels.executable import Parts
from coda_inductor.kernels.prebuild import Job, prebuild

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What is kept of a small kernel and of a heavy one, not to be written to."""
    small, heavy = (tmp_path_factory.mktemp(name) for name in ("small", "heavy"))
    for folder, job in zip((small, heavy), kernels_of(token_scale(256, 64), norm_backward(256, 64)), strict=True):
        assert prebuild([job], str(folder), workers=1) == {}
    return small, heavy


def test_a_kept_kernel_needs_no_compiler(stores: tuple[Path, Path]) -> None:
    """Another process loads it as it was; without a GPU it is not launched, but what it takes is known to it."""
    config = Config(128, 128, 2, 1, True)
    code = """
import sys
from pathlib import Path
from codegen_cases import norm_backward
from coda_inductor.kernels import library
from coda_inductor.codegen.tiles import Config
found = library.load(norm_backward(256, 64), Config(128, 128, 2, 1, True), Path(sys.argv[1]))
assert not sys.modules.keys() & {"quack", "cutlass", "coda_inductor.kernels.kernel"}
print(found.stack, found.config)
try:
    found._run()
except TypeError as error:
    print(error)
"""
    done = fresh(code, str(stores[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    (kept,) = stores[1].rglob(library.KEPT)
    assert done.stdout.startswith(f"{json.loads(kept.read_text())['stack']} {config}\n")
    assert "scheduler_args: Tuple[int32, None, int32, None, None, None]" in done.stdout


@pytest.mark.parametrize("i", [0, 1])
def test_a_block_waits_or_passes_its_door_before_it_reads(stores: tuple[Path, Path], i: int) -> None:
    """In machine code: the wait (ACQBULK), the acquire, the fence for TMA, the release that opens the next door, and
    only then may the next kernel's blocks be placed (PREEXIT) and the first tile be loaded (UTMALDG)."""
    tool = Path(str(importlib.util.find_spec("triton").origin)).parent / "backends/nvidia/bin/nvdisasm"  # type: ignore[union-attr]
    (made,) = stores[i].rglob("*.o")
    image = next(cubin._cuda_images(made.read_bytes()))
    (stores[i] / "image").write_bytes(image)
    said = subprocess.run([tool, "-c", stores[i] / "image"], capture_output=True, text=True, check=True).stdout
    words = ("ACQBULK", "ATOMG", "CCTL.IVALL", "FENCE.VIEW.ASYNC", "STG.E.STRONG.GPU", "PREEXIT", "UTMALDG", "UTMASTG")
    body = next(part for part in said.split(".section") if "UTMALDG" in part)
    order = [word for line in body.splitlines() for word in words if word in line]
    start = order[order.index("ACQBULK") : order.index("UTMALDG")]
    assert start[:3] == ["ACQBULK", "ATOMG", "CCTL.IVALL"] and start.count("ATOMG") == start.count("PREEXIT") == 1
    closes, opens = (j for j, word in enumerate(start) if word == "STG.E.STRONG.GPU")
    assert closes < start.index("FENCE.VIEW.ASYNC", closes) < opens < start.index("PREEXIT")
    assert order.count("ACQBULK") == 2 and order.index("UTMALDG") < len(order) - order[::-1].index("ACQBULK")


def test_what_is_not_as_it_was_kept_is_not_loaded(tmp_path: Path, stores: tuple[Path, Path]) -> None:
    region, config, store = token_scale(256, 64), Config(128, 128, 2, 1, True), tmp_path / "kernels"
    assert library.load(region, config, store) is None
    shutil.copytree(stores[0], store)
    (kept,), (linked,) = store.rglob(library.KEPT), store.rglob("*.so")
    assert library.load(region, config, store) is not None
    assert library.load(region, config, store, swapped=True) is not None  # of one product: the same module
    assert library.load(region, Config(128, 128, 1, 2, True), store) is None
    whole = linked.read_bytes()
    for part in (whole[:-1], b"", whole):
        linked.unlink()  # it is loaded
        linked.write_bytes(part)
        assert (library.load(region, config, store) is None) == (part != whole)
    facts = json.loads(kept.read_text())
    for broken in ("", "[]", "{}", json.dumps(facts | {"library": "none"})):
        kept.write_text(broken)
        assert library.load(region, config, store) is None
    assert prebuild([Job(region, config)], str(store), workers=1) == {}  # linked again
    assert library.load(region, config, store) is not None and json.loads(kept.read_text()) == facts


def test_what_compiles_and_launches_is_in_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "quack.py").write_text("1")
    whole, found = importlib.util.find_spec, set[str]()

    def quack(**where: Any) -> Callable[[str], Any]:
        return lambda name: types.SimpleNamespace(**where) if name in where["only"] else whole(name)

    changes: list[tuple[Any, str, Any]] = [
        (target, "versions", lambda: {"torch": "another"}),
        (target, "installed", lambda package: "another"),
        (library, "driver", lambda: 1),
        (library, "OURS", ("kernel.py",)),
        (importlib.util, "find_spec", quack(only=["cutlass"], origin="elsewhere")),
        (importlib.util, "find_spec", quack(only=["quack"], submodule_search_locations=[str(tmp_path)])),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            found.add(library.made_by.__wrapped__())
    assert len(found | {library.made_by()}) == len(changes) + 1


def variants(region: Region) -> Iterator[Region]:
    """The Region with other dtypes, and its weights the other way round."""
    for dtype in ("bf16", "f16"):
        for layout in ("nk", "kn"):
            yield replace(region, dtype=dtype, products=tuple(replace(p, b_layout=layout) for p in region.products))
    for i, o in enumerate(region.operands):
        other = "f32" if o.dtype != "f32" else region.dtype
        yield replace(region, operands=(*region.operands[:i], replace(o, dtype=other), *region.operands[i + 1 :]))
    for i, s in enumerate(region.stores):
        other = "f32" if s.dtype != "f32" else region.dtype
        yield replace(region, stores=(*region.stores[:i], replace(s, dtype=other), *region.stores[i + 1 :]))
    yield replace(region, n=region.n * 2, products=tuple(replace(p, k=p.k * 2) for p in region.products))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_what_quack_would_tell_apart_lies_apart(
    make: Callable[[int, int], Region], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two Regions share a folder only if quack is asked for the same; then a library is not taken for another."""
    kernel = pytest.importorskip("coda_inductor.kernels.kernel")
    asked = list[str]()

    def told(*given: Any, **named: Any) -> Any:
        def said(x: Any) -> str:
            return f"{x.dtype} {x.stride()}" if isinstance(x, torch.Tensor) else str(x)

        named["epi_values"] = {name: said(value) for name, value in named["epi_values"].items()}
        asked.append(repr([[said(x) for x in given[1:]], sorted((name, str(x)) for name, x in named.items())]))
        raise Unsupported("enough")

    monkeypatch.setattr(kernel.quack.gemm_runtime.host, "build_gemm_epi_plan", told)
    monkeypatch.setattr(kernel, "_require_compiler", lambda target: None)  # nothing is compiled
    found: dict[str, set[str]] = {}
    for region in variants(make(256, 64)):
        for config in (Config(128, 128, 2, 1, True), Config(128, 128, 2, 1, True, "n"), Config(128, 128, 1, 1, True)):
            try:
                legality.require(region, config)
                kernel.Compiled(region, config, tmp_path)
            except Unsupported:
                pass
            else:
                raise AssertionError
            if asked:
                found.setdefault(str(library.folder(region, config, tmp_path)), set()).add(asked.pop())
    assert len(found) > 3 and all(len(requests) == 1 for requests in found.values())


def test_both_layouts_of_a_weight_are_kept(tmp_path: Path, stores: tuple[Path, Path]) -> None:
    """nn.Linear's and Conv1D's beside each other, in one graph of GPT-2; the module is the same."""
    shutil.copytree(stores[0], tmp_path, dirs_exist_ok=True)
    region, config = token_scale(256, 64), Config(128, 128, 2, 1, True)
    (product,) = region.products
    turned = replace(region, products=(replace(product, b_layout="kn"),))
    assert prebuild([Job(region, config), Job(turned, config)], str(tmp_path), workers=2) == {}
    assert len(list(tmp_path.rglob("*.so"))) == 2 and len(list(tmp_path.rglob("*.py"))) == 1
    for of, weight in ((region, "[n2, n1]"), (turned, "[n1, n2]")):
        found = library.load(of, config, tmp_path)
        assert found is not None
        with pytest.raises(TypeError, match=re.escape(f"mB: Tensor({weight}, bfloat16)")):
            found._run()


def test_each_library_calls_its_own(stores: tuple[Path, Path]) -> None:
    """All have the same exported names: also where one is open to all, as after LD_PRELOAD, none binds to another."""
    one, other = (str(library) for store in stores for library in store.rglob("*.so"))
    code = """
import ctypes, sys
import torch, tvm_ffi
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
print(tvm_ffi.load_module(sys.argv[2])["func"])
"""
    command, shown = [sys.executable, "-c", code, one, other], {"LD_DEBUG": "bindings", "LD_BIND_NOW": "1"}
    done = subprocess.run(command, env=os.environ | shown, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"binding file {other} [0] to " in done.stderr
    assert f"binding file {other} [0] to {one} " not in done.stderr


def test_without_a_linker_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is there all the same. A linker that fails leaves nothing behind."""
    compiled = tmp_path / "f" / "k.o"
    stored.write(compiled, "no object")
    parts = Parts(None, ("a",), 8, 0)
    library.keep(tmp_path, compiled, parts, [])
    assert [*tmp_path.rglob("*")] == [tmp_path / "f", compiled]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    library.keep(tmp_path, compiled, parts, [])
    assert [*tmp_path.rglob("*")] == [tmp_path / "f", compiled]
