"""Kernels that are compiled before they are asked for: they give way, and are begun once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from codegen_cases import plain

from coda_inductor.codegen.tiles import Config
from coda_inductor.kernels import library, prebuild
from coda_inductor.kernels.ahead import Ahead


def test_what_is_compiled_idly_gives_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many kernels as there are cores are under way; what is begun by then goes before the rest of them."""
    asked, go, done = list[list[int]](), threading.Semaphore(0), threading.Semaphore(0)

    def ask(jobs: list[prebuild.Job], directory: Path, workers: int | None, known: Callable[..., None]) -> None:
        if jobs[0].region.n == 768:
            time.sleep(0.3)  # who does not wait for it is first
        with here:
            asked.append([job.region.n for job in jobs])
            done.release()
            assert go.acquire(timeout=60)
        for i in range(len(jobs)):
            known(i, prebuild.Outcome("", 0.0))

    def jobs(*widths: int) -> list[prebuild.Job]:
        return [prebuild.Job(plain(n, 64), Config(128, 128, 1, 1, True)) for n in widths]

    here = threading.Lock()  # one request at a time
    monkeypatch.setattr(prebuild, "_ask", ask)
    monkeypatch.setattr(prebuild, "_workers", lambda: 2)
    monkeypatch.setattr(library, "folder", lambda region, *rest, **how: tmp_path / str(region.n))
    over = threading.Event()
    idle = prebuild.begin(jobs(128, 256, 384, 512, 640), str(tmp_path), over=over)
    assert done.acquire(timeout=60)
    pressing = prebuild.begin(jobs(768, 896, 1024), str(tmp_path))
    for _ in range(4):
        go.release()
    for future in (*idle.values(), *pressing.values()):
        assert future.result(timeout=60).reason == ""
    assert asked == [[128, 256], [768, 896, 1024], [384, 512], [640]] and not prebuild._pressing
    over.set()
    (future,) = prebuild.begin(jobs(128), str(tmp_path), over=over).values()
    assert future.result(timeout=60).reason == "not asked for any more" and len(asked) == 4
    assert prebuild.begin([], str(tmp_path)) == {} and not prebuild._pressing
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    with pytest.raises(RuntimeError, match="no thread"):
        prebuild.begin(jobs(128), str(tmp_path))
    assert not prebuild._pressing


def test_idle_work_is_begun_again_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if it is done, and not if it was asked for before; what stays idle is given up at the end."""
    begun, given = list[tuple[list[int], bool]](), list[threading.Event]()

    def begin(
        jobs: list[prebuild.Job], cache_dir: str | None, over: threading.Event | None
    ) -> dict[prebuild.Job, Future[prebuild.Outcome]]:
        begun.append(([job.region.n for job in jobs], over is not None))
        given.extend([over] if over else [])
        return {job: Future() for job in jobs}

    monkeypatch.setattr(prebuild, "begin", begin)
    ahead = Ahead(None)
    first, second, third = (prebuild.Job(plain(n, 64), Config(128, 128, 1, 1, True)) for n in (128, 256, 384))
    ahead.begin([first, second, second, third], idle=True)
    ahead.made[first].set_result(prebuild.Outcome("", 0.0))
    ahead.begin([first, second])
    ahead.begin([first, second])
    ahead.begin([second, third], idle=True)
    assert begun == [([128, 256, 384], True), ([256], False), ([], False), ([], True)]
    ahead.end()
    ahead.begin([third], idle=True)
    assert [over.is_set() for over in given] == [True, True, False]
