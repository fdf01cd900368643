"""The store: private, and what is broken in it is absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from codegen_cases import plain, token_scale

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels import record, store


def test_the_store_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store.open_store(str(tmp_path / "a" / "kernels"))
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert store.open_store(str(made)) == made
    made.chmod(0o770)
    with pytest.raises(Unsupported, match="others may write"):
        store.open_store(str(made))
    made.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(Unsupported, match="belongs to user"):
        store.open_store(str(made))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.open_store(None) == tmp_path / "xdg" / "coda_inductor"


def test_records_stay_and_corrupted_ones_are_absent(tmp_path: Path) -> None:
    region, config = token_scale(256, 64), Config(128, 128, 2, 1, True)
    assert record.remembered(tmp_path, region, 1024) is None
    record.remember(tmp_path, region, 1024, config, 0.5, [])
    record.remember(tmp_path, region, 1024, Config(64, 64, 1, 1, False), 0.1, [])
    assert record.remembered(tmp_path, region, 1024) == config
    assert record.remembered(tmp_path, region, 2048) is None
    assert record.remembered(tmp_path, plain(256, 64), 1024) is None
    (path,) = (tmp_path / "tuning").glob("*.json")
    wrong_type = path.read_text().replace("128", '"x"')
    for text in ("", "[]", "{", '{"config": {"tile_m": 1}}', '{"config": null}', wrong_type):
        path.write_text(text)
        assert record.remembered(tmp_path, region, 1024) is None
    record.remember(tmp_path, region, 1024, config, 0.5, [])
