"""cache export, import and warmup: what an archive holds, and that one that does not verify is not used at all."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask
from asking import ask as ask
from asking import folder as folder
from codegen_cases import token_scale
from torch._inductor.utils import fresh_cache

from coda_inductor.codegen.tiles import Config
from coda_inductor.commands.caches import archive
from coda_inductor.commands.words import TRUST
from coda_inductor.kernels import library, record, store

KERNEL = "objects/coda_epilogue_aaaa1111-128x256co2x1/f0f0"
REGION, TILE = token_scale(64, 64), Config(128, 128, 2, 1, True)


@pytest.fixture
def packed(ask: Ask, folder: Path, tmp_path: Path) -> Path:
    """An archive of a store with a kernel, its module and a record. The store is gone."""
    made = store.open_store(str(folder))
    store.write(made / "epilogues" / "coda_epilogue_aaaa1111.py", "# text")
    for name in ("launch.json", "quack/k.o", "quack/k.so"):
        store.write(made / KERNEL / name, f"{name} " * 100)
    record.remember(made, REGION, 1024, TILE, 0.5, [])
    store.write(made / "tuning" / ".broken.json.x1", "{")
    (made / "notes.txt").write_text("mine")
    (made / "objects" / "away").symlink_to(tmp_path)
    (made / KERNEL / "out.o").symlink_to(tmp_path / "tool_model.py")
    status, said, _ = ask("cache", "export", "a.zip")
    assert status == 0 and said.startswith("1 kernel and 1 record, and 0 files of torch's artifacts, ")
    folder.rename(tmp_path / "old")
    return tmp_path / "a.zip"


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} if folder.exists() else set()


def changed(path: Path, change: Callable[[dict[str, bytes]], Mapping[Any, bytes]]) -> None:
    """The archive with other content."""
    with zipfile.ZipFile(path) as old:
        content = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in change(content).items():
            new.writestr(name, data)


def manifest(content: dict[str, bytes], **fields: Any) -> dict[str, bytes]:
    """With other fields of the manifest, and what it says of files as they are now."""
    found = json.loads(content[archive.MANIFEST])
    found["files"] = {n: archive_row(data) for n, data in content.items() if n != archive.MANIFEST}
    return {**content, archive.MANIFEST: json.dumps({**found, **fields}).encode()}


def archive_row(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def test_an_archive_brings_what_was_exported(ask: Ask, packed: Path, folder: Path) -> None:
    status, said, error = ask("cache", "import", str(packed), "--yes")
    assert (status, error) == (0, f"{TRUST}\n") and said == "1 kernel and 1 record are new; torch took 0 artifacts\n"
    name = f"tuning/{record.key(REGION, 1024)}.json"
    kernel = {f"{KERNEL}/{n}" for n in ("launch.json", "quack/k.o", "quack/k.so")}
    assert files(folder) == {"epilogues/coda_epilogue_aaaa1111.py", name, *kernel}
    assert record.remembered(folder, REGION, 1024) == TILE
    assert (folder / KERNEL / "launch.json").read_text() == "launch.json " * 100
    facts = ask("cache", "import", str(packed), "--yes", "--json")[1]
    assert (facts["kernels"], facts["tuning"], facts["left_out"]) == (0, 0, 0)


def test_what_the_store_has_stays(ask: Ask, packed: Path, folder: Path) -> None:
    made = store.open_store(str(folder))
    record.remember(made, REGION, 1024, Config(64, 64, 1, 1, False), 0.1, [])
    store.write(made / KERNEL / "launch.json", "mine")
    assert ask("cache", "import", str(packed), "--yes")[0] == 0
    assert record.remembered(folder, REGION, 1024) == Config(64, 64, 1, 1, False)
    assert {p for p in files(folder) if p.startswith(KERNEL)} == {f"{KERNEL}/launch.json"}


@pytest.mark.parametrize(("answer", "imported"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)])
def test_a_terminal_is_asked(
    ask: Ask, packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, imported: bool
) -> None:
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer, raising=False)
    status, _, error = ask("cache", "import", str(packed))
    assert (status == 0) == imported == bool(files(folder)) and error.startswith(f"{TRUST}\n")


def test_without_a_terminal_nothing_is_imported_unasked(ask: Ask, packed: Path, folder: Path) -> None:
    status, _, error = ask("cache", "import", str(packed))
    assert status == 2 and error.splitlines()[0] == TRUST and "--yes says that you trust" in error
    assert not folder.exists()


def test_help_says_what_importing_is(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    with pytest.raises(SystemExit):
        ask("cache", "--help")
    assert TRUST in " ".join(capsys.readouterr().out.split())


def another(**fields: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda content: manifest(content, **fields)


def with_file(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda content: manifest({**content, name: b"x"})


def link(content: dict[str, bytes]) -> dict[str | zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo("epilogues/coda_epilogue_l.py")
    info.external_attr = 0o120777 << 16
    made = manifest({**content, info.filename: b"/etc/passwd"})
    return {info if name == info.filename else name: data for name, data in made.items()}


BAD: dict[str, Callable[[dict[str, bytes]], Any]] = {
    "another device": another(device="NVIDIA H200"),
    "another versions": another(versions={"torch": "2.0"}),
    "another sources": another(sources="0"),
    "another python": another(python="3.8.0"),
    "another schema": another(schema=2),
    "is no archive": lambda content: {"notes.txt": b""},
    "is no archive of": lambda content: {**content, archive.MANIFEST: b"[]"},
    "is not what the archive's manifest says": lambda content: {**content, f"{KERNEL}/quack/k.so": b"y" * 1100},
    "does not hold what": lambda content: {k: v for k, v in content.items() if not k.endswith(".so")},
    "does not hold what its manifest": lambda content: {**content, "epilogues/coda_epilogue_b.py": b"x"},
    "'../evil.py', which is no place": with_file("../evil.py"),
    "'/tmp/evil.py', which": with_file("/tmp/evil.py"),
    "'epilogues/../../evil.py'": with_file("epilogues/../../evil.py"),
    "'objects/../x/f/k.o'": with_file("objects/../x/f/k.o"),
    "'epilogues/.hidden.py'": with_file("epilogues/.hidden.py"),
    "'notes.txt'": with_file("notes.txt"),
    "'running/1-x'": with_file("running/1-x"),
    "'epilogues/coda_epilogue_l.py', which": link,
}


@pytest.mark.parametrize("said", BAD)
def test_what_does_not_verify_is_not_used_at_all(ask: Ask, packed: Path, folder: Path, said: str) -> None:
    changed(packed, BAD[said])
    status, _, error = ask("cache", "import", str(packed), "--yes")
    assert status == 2 and said in error and files(folder) == set()
    assert not (folder.parent / "evil.py").exists() and not Path("/tmp/evil.py").exists()


def test_a_file_that_is_larger_than_it_says_is_not_unpacked(ask: Ask, packed: Path, folder: Path) -> None:
    def change(content: dict[str, bytes]) -> dict[str, bytes]:
        return {**content, f"{KERNEL}/quack/k.so": content[f"{KERNEL}/quack/k.so"] + bytes(10**6)}

    changed(packed, change)
    assert "is not what the archive's manifest says" in ask("cache", "import", str(packed), "--yes")[2]
    assert files(folder) == set()


def test_more_than_the_limit_is_refused(ask: Ask, packed: Path, folder: Path) -> None:
    def change(content: dict[str, bytes]) -> dict[str, bytes]:
        found = json.loads(content[archive.MANIFEST])
        found["files"][f"{KERNEL}/quack/k.so"]["bytes"] = 11 * 10**9
        return {**content, archive.MANIFEST: json.dumps(found).encode()}

    changed(packed, change)
    assert "more than the limit of 10 GB" in ask("cache", "import", str(packed), "--yes")[2] and files(folder) == set()


@pytest.mark.parametrize("limit_gb", ["10", "0"])
@pytest.mark.parametrize("count", [float("inf"), float("nan"), 10**30, 2**40, -1, "many"])
def test_a_number_that_is_none_is_refused_in_a_line(
    ask: Ask, packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, count: object, limit_gb: str
) -> None:
    def change(content: dict[str, bytes]) -> dict[str, bytes]:
        found = json.loads(content[archive.MANIFEST])
        found["files"][f"{KERNEL}/quack/k.so"]["bytes"] = count
        return {**content, archive.MANIFEST: json.dumps(found).encode()}

    changed(packed, change)
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_LIMIT", limit_gb)
    status, _, error = ask("cache", "import", str(packed), "--yes")
    assert status == 2 and error.startswith(f"{TRUST}\n") and error.count("\n") == 2 and files(folder) == set()


def test_what_a_manifest_says_does_nothing_to_a_terminal(ask: Ask, packed: Path) -> None:
    changed(packed, another(device="\x1b[31mred\n\ud800" + "x" * 10**6))
    error = ask("cache", "import", str(packed), "--yes")[2]
    assert "another device: '\\x1b[31mred\\n\\ud800xxx" in error and len(error) < 1000 and error.count("\n") == 2


def test_artifacts_that_torch_cannot_read_are_left_out(ask: Ask, packed: Path, folder: Path) -> None:
    """Whatever is wrong with them. The rest is imported."""
    names = [f"artifacts/{i:016x}.bin" for i in range(2)]
    changed(packed, lambda content: manifest({**content, names[0]: b"junk", names[1]: b""}))
    status, said, _ = ask("cache", "import", str(packed), "--yes")
    assert status == 0 and "1 kernel and 1 record are new; torch took 0 artifacts" in said
    assert "of torch's artifacts left out: torch cannot read" in said and names[0] not in files(folder)
    assert record.remembered(folder, REGION, 1024) == TILE


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive at all"])
def test_what_is_no_archive(ask: Ask, folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.zip").write_bytes(content)
    status, _, error = ask("cache", "import", "b.zip", "--yes")
    assert status == 2 and "cannot be imported" in error and not folder.exists()
    assert "cannot be imported" in ask("cache", "import", "absent.zip", "--yes")[2]


def test_a_broken_archive(ask: Ask, packed: Path, folder: Path) -> None:
    """Any byte of it."""
    whole = packed.read_bytes()
    for place in (40, len(whole) // 2, len(whole) - 30):
        packed.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        status = ask("cache", "import", str(packed), "--yes")[0]
        assert (status, files(folder)) == (2, set()), place


def test_kernels_of_another_compiler_are_left_out(
    ask: Ask, packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would not be found here; what was measured is of use."""
    monkeypatch.setattr(library, "made_by", lambda: "another")
    status, said, _ = ask("cache", "import", str(packed), "--yes")
    assert status == 0 and "0 kernels and 1 record are new" in said and "3 files of kernels left out" in said
    assert not (folder / KERNEL).exists() and record.remembered(folder, REGION, 1024) == TILE


def test_nothing_to_export(ask: Ask, folder: Path) -> None:
    assert "the cache is empty" in ask("cache", "export", "a.zip")[2] and not folder.exists()
    assert "cache export takes one FILE" in ask("cache", "export")[2]
    assert "cache warmup takes MODULE:FUNCTION" in ask("cache", "warmup", "a:b", "c:d")[2]


def test_trim_keeps_within_the_limit(ask: Ask, packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("cache", "import", str(packed), "--yes")
    assert ask("cache", "trim")[:2] == (0, f"nothing removed from {folder}\n")
    monkeypatch.setattr("coda_inductor.kernels.limit.GB", 1000)
    monkeypatch.setattr("coda_inductor.kernels.limit.FRESH_S", -1.0)
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_LIMIT", "1")
    said = ask("cache", "trim")[1]
    assert "coda_epilogue_aaaa1111-128x256co2x1" in said and "removed from" in said and not (folder / KERNEL).exists()
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_LIMIT", "0")
    assert "there is no limit" in ask("cache", "trim")[2]


def test_warmup_refuses_a_machine_without_kernels_before_it_builds_a_model(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "tool_model.py").write_text("def build():\n    raise AssertionError('built')\n")
    status, _, error = ask("cache", "warmup", "tool_model:build")
    assert status == 2 and "no NVIDIA GPU" in error


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_what_was_warmed_up_travels(
    ask: Ask, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On the reference target torch's caches are all that there is: with an archive a machine that has never compiled
    the model finds it there."""
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    with fresh_cache():
        status, facts, _ = ask("cache", "warmup", "tool_model:build", "--mode", mode, "--json")
        assert status == 0 and facts["regions"] > 0 and facts["torch_artifacts"] > 0 and facts["cache_hits"] == 0
        assert ask("cache", "export", "w.zip")[0] == 0
    folder.rename(tmp_path / "old")
    torch._dynamo.utils.counters.clear()
    with fresh_cache():
        facts = ask("cache", "import", "w.zip", "--yes", "--json")[1]
        assert facts["torch_artifacts"] > 0
        facts = ask("cache", "warmup", "tool_model:build", "--mode", mode, "--json")[1]
        assert facts["cache_hits"] > 0 and facts["regions"] == 0
    torch._dynamo.utils.counters.clear()
