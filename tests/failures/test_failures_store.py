"""A store that is broken, full, or not private: nothing is lost but what would have been kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import HERE, close, half, left_to_inductor, pretend, raised, run, streams
from unusable_stores import make_a_file, make_foreign, make_impossible, make_open, make_read_only

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Region
from coda_inductor.kernels import store

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


@pytest.mark.parametrize("broken", ["", "[]", '{"ms": "fast"}', '{"ms": 1.0, "regions": []}', "\0"])
def test_corrupted_records_are_taken_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half(BF16), streams(BF16)
    assert run(model, *x).regions == [3]
    records = sorted((tmp_path / "kernels" / "tuning").iterdir())
    good = {path: path.read_text() for path in records}
    assert len(records) >= 4
    for path in records:
        path.write_text(broken)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran == [] and ran.regions == [3]
    assert {path: path.read_text() for path in sorted((tmp_path / "kernels" / "tuning").iterdir())} == good


def test_what_was_decided_stays(tmp_path: Path) -> None:
    first = store.write_record(tmp_path, "k", {"ms": 1.0})
    assert store.write_record(tmp_path, "k", {"ms": 2.0}) == first == store.read_record(tmp_path, "k")


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_while_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The measurement is used, and not kept."""
    pretend(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "link", full)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert ran.regions == [3] and len(ran) == 1
    assert "a measurement is not kept" in ran[0] and "No space left on device (make room, or set CODA" in ran[0]
    assert not list((tmp_path / "kernels" / "tuning").iterdir())


def test_full_disk_while_building(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel needs its module on disk, so the Regions are left."""

    def build(region: Region, config: Config, directory: Path, **_: Any) -> Any:
        store.write(directory / "epilogues" / "x.py", "x = 1")

    pretend(monkeypatch, tmp_path, build)
    monkeypatch.setattr(os, "replace", full)
    left_to_inductor("No space left on device (make room")
    raised(monkeypatch, HERE, "No space left on device")

    def direct(region: Region, config: Config, directory: Path, **_: Any) -> Any:
        full()  # what a library does in our folder

    pretend(monkeypatch, tmp_path, direct)
    monkeypatch.delenv("CODA_INDUCTOR_STRICT")
    left_to_inductor("No space left on device")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_foreign, "not to you (set CODA_INDUCTOR_CACHE_DIR"),
        (make_open, "others may write to the kernel cache"),
        (make_read_only, "cannot be written"),
        (make_impossible, "cannot be made: File exists (set CODA"),
        (make_a_file, "cannot be made: File exists (set CODA"),
    ],
)
def test_directory_that_is_not_private_or_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any, said: str
) -> None:
    pretend(monkeypatch, tmp_path)
    make(monkeypatch, tmp_path / "kernels")
    left_to_inductor(said)
    raised(monkeypatch, said, "kernels")
