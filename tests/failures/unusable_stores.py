"""Stores that cannot be used, in one way each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def make_foreign(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)


def make_open(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_read_only(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.mkdir()
    path.chmod(0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root


def make_impossible(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.parent.joinpath("file").write_text("")
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(path.parent / "file" / "kernels"))


def make_a_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.write_text("")
