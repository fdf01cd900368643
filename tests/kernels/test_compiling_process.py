"""The process that compiles kernels, and its workers: they fill the store, may end at any time, and are waited for."""

from __future__ import annotations

import os
import signal
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from codegen_cases import norm_backward, swiglu, token_scale
from compiler_process import MISSING, amid, kernels_of
from processes import fresh

from coda_inductor.codegen.mainloops import Wgmma
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels import launch
from coda_inductor.kernels import prebuild as prebuild_module
from coda_inductor.kernels.prebuild import Job, prebuild

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


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

    def none(target: str) -> Any:
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


def test_a_compile_that_aborts_ends_no_process_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of cutlass-dsl 4.8.1 aborts on this tile with a weight [K, N], which legality refuses: allowed, it
    ends its workers. What was compiled beside it is there, and a launch of it is refused."""
    region, shared = norm_backward(3072, 3072), Config(192, 192, 2, 1, False, "n")
    monkeypatch.setattr(Wgmma, "shares", lambda self, config: False)
    (tmp_path / "sitecustomize.py").write_text(
        "from coda_inductor.codegen.mainloops import Wgmma\nWgmma.shares = lambda self, config: False\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(prebuild_module, "ABORTED", set())
    for compiler in prebuild_module._running:
        compiler.end()
    store, aborting, (small,) = str(tmp_path / "kernels"), Job(region, shared), kernels_of(token_scale(256, 64))
    assert prebuild([aborting, small], store, workers=2) == {aborting: prebuild_module.ENDED}
    prebuild_module._running[0].end()
    kernel = launch.Kernel(region, Path(store))
    with pytest.raises(Unsupported, match="its compile ended the compiling process"):
        kernel.compiled(shared)


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
import compiler_process as t
from codegen_cases import norm_backward, token_scale
store, (heavy, small) = sys.argv[1], t.kernels_of(norm_backward(256, 64), token_scale(256, 64))
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
