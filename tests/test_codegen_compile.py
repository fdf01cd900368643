"""Real kernels compiled for sm_90a without a GPU, in a process of their own: cutlass reads the target when imported."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import CASES, norm_backward, swiglu, token_scale
from processes import fresh

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region
from coda_inductor.kernels import cubin, launch, library
from coda_inductor.kernels import prebuild as prebuild_module
from coda_inductor.kernels import store as stored
from coda_inductor.kernels.executable import Parts
from coda_inductor.kernels.prebuild import Job, prebuild

SCRIPT = """
import json, sys
from pathlib import Path
import quack.gemm_sm90
chosen = []
stages = quack.gemm_sm90.GemmSm90._compute_stages.__func__
def watched(cls, *args, **kwargs):
    chosen.append(stages(cls, *args, **kwargs))
    return chosen[-1]
quack.gemm_sm90.GemmSm90._compute_stages = classmethod(watched)
import codegen_cases as cases
from coda_inductor.codegen import legality; from coda_inductor.kernels import library
from coda_inductor.kernels.kernel import Compiled, without_gpu
from coda_inductor.codegen.tiles import Config
without_gpu()
HEAVIEST = (cases.norm_gradients, cases.swiglu_backward)
def kept(region, config, swapped):
    place = library.folder(region, config, Path(sys.argv[1]), swapped=swapped)
    return json.loads((place / library.KEPT).read_text())
for i, make in enumerate(cases.CASES):
    region = make(4096, 4096)
    pair = len(region.products) == 2
    first = legality.candidates(region, 8192)[0]
    tiles = (Config(128, 256, 1, 2, False), Config(128, 192, 2, 1, True, "n"), first, Config(64, 64, 1, 1, False))
    config = tiles[i % 4] if legality.is_legal(region, tiles[i % 4]) and make not in HEAVIEST else first
    kernel = Compiled(region, config, Path(sys.argv[1]), swapped=pair and config.pingpong)
    model = legality.stages(region, config)
    print(json.dumps({"case": make.__name__, "config": str(config), "stack": kernel.stack, "found": chosen[-1],
                      "model": [model.ab, model.store if region.stores else chosen[-1][1], model.load],
                      "fields": kept(region, config, pair and config.pingpong)["fields"]}))
    if make is cases.norm_producer:
        used = config
count = len(chosen)
Compiled(cases.norm_producer(1000, 64), used, Path(sys.argv[1]))
print(json.dumps({"case": "other extents", "compiled": len(chosen) - count}))
"""


MISSING = [name for name in ("cutlass", "quack", "triton") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    environment: dict[str, Any] = dict(pair.split("=") for pair in SM_90A.environment)
    done = fresh(SCRIPT, str(tmp_path_factory.mktemp("kernels")), **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_case_compiles(rows: list[dict[str, object]]) -> None:
    """In one legal tile each, by turns; on a GPU tests/gpu/test_kernels.py runs them in others."""
    assert len({row["case"] for row in rows}) == len(CASES) + 1
    for row in rows[:-1]:
        assert isinstance(row["stack"], int), row
        assert ("lane_offset" in str(row["fields"])) == (row["case"] in ("swiglu", "lane_sums"))
        assert ("a_apart" in str(row["fields"])) == (row["case"] in ("summed", "summed_norm_backward"))


def test_the_stage_model_is_quacks(rows: list[dict[str, object]]) -> None:
    for row in rows[:-1]:
        assert row["found"] == row["model"], row


def test_gradients_spill_nothing_in_the_tile_tried_first(rows: list[dict[str, object]]) -> None:
    """Two tile operands with sums over tokens, or with three stores and two sums over features."""
    stacks = {row["case"]: row["stack"] for row in rows[:-1] if row["config"] == str(SM_90A.heavy[0])}
    assert (stacks["norm_gradients"], stacks["swiglu_backward"]) == (0, 0)


def test_other_extents_share_the_kernel(rows: list[dict[str, object]]) -> None:
    assert rows[-1]["compiled"] == 0


def test_workers_fill_the_store(tmp_path: Path) -> None:
    """Two kernels and one that quack refuses, in processes of their own; built again, they are found."""
    store = str(tmp_path / "kernels")
    config = Config(128, 128, 2, 1, True)
    jobs = [Job(token_scale(256, 64), config), Job(swiglu(256, 64), config, swapped=True)]
    too_big = Job(norm_backward(256, 64), Config(256, 192, 2, 1, False))
    failed = prebuild([*jobs, too_big, jobs[0]], store, workers=2)
    assert list(failed) == [too_big] and "shared memory" in failed[too_big]
    objects = {path: path.stat().st_mtime_ns for path in Path(store).rglob("*.o")}
    assert len(objects) == 2
    assert prebuild(jobs, store, workers=2) == {}
    assert objects == {path: path.stat().st_mtime_ns for path in Path(store).rglob("*.o")}


def test_kernels_are_known_as_they_are_made(tmp_path: Path) -> None:
    """Those first that come first, and what quack refuses at once."""
    store = str(tmp_path / "kernels")
    jobs = kernels_of(token_scale(256, 64), norm_backward(256, 64))
    too_big, order = Job(norm_backward(256, 64), Config(256, 192, 2, 1, False)), list[Job]()

    def heard(job: Job, _: object) -> None:
        order.append(job)

    made = prebuild_module.begin([*jobs, too_big], store)
    assert made.keys() == {*jobs, too_big} and made[too_big].done()
    for job, future in made.items():
        future.add_done_callback(partial(heard, job))
    assert [bool(made[job].result().reason) for job in (*jobs, too_big)] == [False, False, True]
    assert set(order) == {*jobs, too_big} and len(list(Path(store).rglob("*.o"))) == 2


def test_what_keeps_kernels_from_being_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To who begins, if there is no store; to who waits, if there is no process."""
    (tmp_path / "kernels").write_text("a file")
    jobs = kernels_of(token_scale(256, 64))
    with pytest.raises(Unsupported):
        prebuild_module.begin(jobs, str(tmp_path / "kernels"))

    def none() -> Any:
        raise OSError("no process")

    monkeypatch.setattr(prebuild_module, "_compiler", none)
    (future,) = prebuild_module.begin(jobs, str(tmp_path / "other")).values()
    assert isinstance(future.exception(), OSError)


def test_an_interpreter_may_end_while_kernels_are_made(tmp_path: Path) -> None:
    """At once, or after a moment: with its own exit code."""
    code = """
import os, sys, time
import torch
from codegen_cases import norm_backward, swiglu
from coda_inductor.codegen import legality
from coda_inductor.kernels.prebuild import Job, begin
regions = [make(256, k) for make in (norm_backward, swiglu) for k in (64, 128)]
codes = []
for seconds in (0, 0.001, 0.01, 0.5):
    if not (child := os.fork()):
        begin([Job(r, c) for r in regions for c in legality.candidates(r, 8192)], sys.argv[1])
        time.sleep(seconds)
        sys.exit(3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert codes == [3] * 4, codes
"""
    done = fresh(code, str(tmp_path / "kernels"))
    assert done.returncode == 0, done.stderr[-3000:]


def amid(job: Job, store: str, act: Callable[[int, int], object]) -> dict[Job, str]:
    """prebuild([job]), during which `act` is called with the process ids of the compiling process and of its worker."""
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(prebuild, [job], store, workers=1)
        before, workers = set[int](), set[int]()
        while not workers and not failed.done():
            server = prebuild_module._running[0].process.pid if prebuild_module._running else 0
            now = forks(server) if server else set()
            workers, before = now & before, now
            time.sleep(0.01)
        act(server, workers.pop())
        return failed.result()


def forks(process: int) -> set[int]:
    """The children that run the same program: what the compiler imports runs others, for a moment."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        program, *others = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (process, *children))
    except OSError:  # one has ended
        return set()
    return {int(pid) for pid, other in zip(children, others, strict=True) if other == program}


def kernels_of(*regions: Region) -> list[Job]:
    return [Job(region, Config(128, 128, 2, 1, True)) for region in regions]


def test_the_compiling_process_may_end(tmp_path: Path) -> None:
    """Idle, or killed between two requests: it is started again. Killed amid one: said, and started for the next."""
    store, (small, heavy) = str(tmp_path / "kernels"), kernels_of(token_scale(256, 64), norm_backward(256, 64))
    prebuild_module.warm_up()
    first = prebuild_module._running[0]
    first.process.kill()
    first.process.wait()
    assert prebuild([], store) == {} and prebuild([small], store, workers=1) == {}
    second = prebuild_module._running[0]
    assert second is not first and second.alive()
    failed = amid(heavy, store, lambda server, worker: os.kill(server, signal.SIGKILL))
    assert list(failed) == [heavy] and "ended early" in failed[heavy]
    assert prebuild([small], store, workers=1) == {} and prebuild_module._running[0] is not second


def test_a_worker_may_die(tmp_path: Path) -> None:
    """What it was at is compiled by another."""
    store, (heavy,) = str(tmp_path / "kernels"), kernels_of(norm_backward(256, 64))
    assert amid(heavy, store, lambda server, worker: os.kill(worker, signal.SIGKILL)) == {}
    assert len(list(Path(store).rglob("*.o"))) == 1


def test_what_is_printed_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the start of Python nor in bytes that are no text."""
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nprint('hello', flush=True)\nos.write(2, b'\\xff')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for compiler in prebuild_module._running:
        compiler.end()
    store, jobs = str(tmp_path / "kernels"), kernels_of(token_scale(256, 64))
    assert prebuild(jobs, store, workers=1) == {}
    assert prebuild_module._running[0].last_words().startswith("hello")
    prebuild_module._running[0].end()


def test_a_fork_of_the_owner_has_a_process_of_its_own(tmp_path: Path) -> None:
    """Also one that is made while a thread waits for kernels."""
    code = """
import os, sys
import test_codegen_compile as t
store, (heavy, small) = sys.argv[1], t.kernels_of(t.norm_backward(256, 64), t.token_scale(256, 64))
def fork(server, worker):
    if not (child := os.fork()):
        built = t.prebuild([small], store, workers=1) == {}
        t.prebuild_module._running[0].end()
        os._exit(7 if built else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert t.amid(heavy, store, fork) == {}
"""
    done = fresh(code, str(tmp_path / "kernels"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.rglob("*.o"))) == 2


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


def test_the_compiler_is_imported_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What quack leaves on the GPU must not lie in the memory of a CUDA graph that this thread prepares."""

    def imported(name: str) -> Any:
        return types.SimpleNamespace(Compiled=threading.get_ident())

    with monkeypatch.context() as patch:
        patch.setattr(launch, "importlib", types.SimpleNamespace(import_module=imported))
        assert launch.compiler().Compiled != threading.get_ident()
    code = """
import sys
from coda_inductor.ops.lowering import Launcher
from codegen_cases import token_scale
Launcher(token_scale(64, 64).text)
assert not sys.modules.keys() & {"quack", "cutlass"}
"""
    done = fresh(code)
    assert done.returncode == 0, done.stderr[-3000:]
