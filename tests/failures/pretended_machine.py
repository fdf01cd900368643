"""A machine with a GPU that is pretended, where nothing is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import pretend


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
