"""cache: what it lists, and that it removes what it is asked to remove and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from asking import Ask
from asking import ask as ask
from asking import folder as folder
from codegen_cases import token_scale

from coda_inductor.codegen.target import SM_90A
from coda_inductor.commands import cache
from coda_inductor.kernels import entries, limit, proof, store
from coda_inductor.tuning import outcome


@pytest.fixture
def full(folder: Path) -> Path:
    """A store with two kernels, a tuning and a contest record, what a broken write left, and a file of another's."""
    made = store.open_store(str(folder))
    for name in ("aaaa1111", "bbbb2222"):
        store.write(made / "epilogues" / f"coda_epilogue_{name}.py", "# text")
        store.write(made / "objects" / f"coda_epilogue_{name}-128x256co2x1" / "f" / "k.o", "code")
    fields = {
        "config": SM_90A.large[0]._asdict(),
        "ms": 0.25,
        "bucket": 8192,
        "device": "H",
        "versions": {"torch": "2"},
    }
    store.write_record(made, "cccc3333-8192-0123", fields)
    times = dict(zip(outcome.TIMED, (0.5, 0.625, 0.75, 0.6), strict=True))
    store.write_record(made, "contest-dddd4444", {"regions": ["cccc3333"], **times}, outcome.timed)
    store.write(made / "tuning" / ".cccc3333-64-01.json.x1", "{")
    (made / "notes.txt").write_text("mine")
    return made


def test_cache_ls_of_a_contest_that_the_turns_decided(ask: Ask, full: Path) -> None:
    assert cache.BUSY == outcome.BUSY
    times = {"regions": ["cccc3333"], "ms": 0.5, "baseline_ms": 0.505}
    store.write_record(full, "contest-dddd5555", times, outcome.timed)
    (row,) = (line for line in ask("cache", "ls")[1].splitlines() if "0.505" in line)
    assert "cccc3333: fused 0.500 ms, Inductor 0.505 ms" in row and "busy" not in row
    store.write_record(full, "contest-dddd6666", {**times, "busy_ms": 0.6, "against": ["ffff"]})
    assert "cccc3333: fused 0.500 ms, without the law 0.505 ms; in a busy GPU 0.600 ms" in ask("cache", "ls")[1]
    said = {"ms": 0.25, "baseline_ms": 0.275, "regions": ["cccc3333"], "hinted": True, "wins": True}
    store.write_record(full, "contest-dddd8888", said, outcome.timed)
    assert "cccc3333: fused 0.250 ms, Inductor 0.275 ms, as a hint said" in ask("cache", "ls")[1]


def test_cache_ls_of_a_contest_that_was_timed_in_one_way(ask: Ask, full: Path) -> None:
    """Long calls are, and what a slow host launches."""
    times = dict(zip(outcome.TIMED, (8.5, 8.5, 9.5, 9.5), strict=True))
    store.write_record(full, "contest-dddd7777", {"regions": ["cccc3333"], **times}, outcome.timed)
    (row,) = (line for line in ask("cache", "ls")[1].splitlines() if "8.500" in line)
    assert "cccc3333: fused 8.500 ms, Inductor 9.500 ms  " in row and "busy" not in row


def test_cache_ls(ask: Ask, full: Path) -> None:
    status, facts, _ = ask("cache", "ls", "--json")
    kinds = [(e["kind"], e["digest"]) for e in facts["entries"]]
    names = [("kernel", "aaaa1111"), ("kernel", "bbbb2222"), ("leftover", ".cccc3333-64-01.json.x1")]
    assert status == 0 and kinds == [*names, ("tuning", "cccc3333"), ("contest", "dddd4444")]
    assert facts["entries"][0]["bytes"] == len("# text") + len("code")
    said = ask("cache", "ls")[1]
    assert "up to 8192 rows: 128x256co2x1 0.250 ms" in said and "  torch 2\n" in said
    assert "cccc3333: fused 0.500 ms, Inductor 0.750 ms; in a busy GPU 0.625 ms, 0.600 ms" in said
    assert "2 kernels, 1 tuning record, 1 measurement, 1 leftover file, " in said and str(full) in said


def test_cache_ls_of_an_elementwise_pass(ask: Ask, full: Path) -> None:
    """Whose kernel Triton keeps. It is no kernel of a Region."""
    store.write(full / "epilogues" / "coda_elementwise_eeee5555.py", "# text")
    said = ask("cache", "ls")[1]
    assert "compiled and kept by Triton" in said and "2 kernels, 1 elementwise pass, 1 tuning record" in said
    assert all(row["kernel"] != "eeee5555" for row in ask("kernels", "--json")[1]["kernels"])


def test_a_proof_is_listed_and_goes_with_its_region(ask: Ask, full: Path) -> None:
    region = token_scale(64, 64)
    facts = {"text": region.text, "config": "128x128co1x1", "card": "a card", "versions": {"torch": "2"}}
    proof.remember(full, facts, [proof.Error(1, 1e-3, 1e-3)] * 3)
    store.write(full / "proofs" / f"{'0' * 32}.json", "broken")
    said = ask("cache", "ls")[1]
    assert "128x128co1x1: right on this card" in said and "a card" in said and "1 proof, " in said
    assert "2 leftover files" in said
    assert "1 proof, " in ask("cache", "rm", region.digest)[1]
    assert [path.name for path in (full / "proofs").iterdir()] == [f"{'0' * 32}.json"]
    ask("cache", "rm", "--all")
    assert not [*(full / "proofs").iterdir()]


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def test_cache_rm_by_digest(ask: Ask, full: Path) -> None:
    before = files(full)
    status, said, _ = ask("cache", "rm", "aaaa", "cccc3333")
    gone = {"epilogues/coda_epilogue_aaaa1111.py", "objects/coda_epilogue_aaaa1111-128x256co2x1/f/k.o"}
    assert status == 0 and before - files(full) == gone | {
        "tuning/cccc3333-8192-0123.json",
        "tuning/contest-dddd4444.json",
    }
    assert "1 kernel, 1 tuning record, 1 measurement" in said and "removed from" in said


def test_cache_rm_all_leaves_what_is_not_ours(ask: Ask, full: Path) -> None:
    assert ask("cache", "rm", "--all")[0] == 0
    assert files(full) == {"notes.txt"}
    assert "nothing in" in ask("cache", "ls")[1]


def test_what_others_keep_in_folders_of_such_names_is_neither_listed_nor_removed(ask: Ask, full: Path) -> None:
    theirs = {f"{kind}/{name}" for kind in (*entries.NAMES, "torch") for name in ("hub/m.bin", "a.py", "a.json", "x")}
    for name in theirs:
        store.write(full / name, "theirs")
    left = full / "running" / ".gone-abcdefgh"
    store.write(left / "big", "x")
    os.utime(left, (0, 0))
    said = ask("cache", "ls")[1]
    assert "hub" not in said and "2 kernels, 1 tuning record, 1 measurement, 1 leftover file, " in said
    assert ask("cache", "rm", "--all")[0] == 0
    assert files(full) == {"notes.txt", "running/.making_room", *theirs}


def test_trim_where_it_cannot(ask: Ask, full: Path) -> None:
    (full / "running").write_text("")
    status, _, error = ask("cache", "trim")
    assert status == 2 and f"no room can be made in {full}" in error and error.count("\n") == 1


def test_trim_of_several(ask: Ask, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GB", 1), ("FRESH_S", -1.0)):
        monkeypatch.setattr(limit, name, value)
    assert "6 entries, " in ask("cache", "trim")[1].splitlines()[-1]


@pytest.mark.parametrize("linked", ["epilogues", "objects", "tuning"])
def test_links_out_of_the_store_are_not_followed(ask: Ask, full: Path, tmp_path: Path, linked: str) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "deep").mkdir(parents=True)
    (theirs / "deep" / "contest-k.json").write_text("{}")
    (full / "objects" / "coda_epilogue_aaaa1111-link").symlink_to(theirs, target_is_directory=True)
    (full / "objects" / "coda_epilogue_aaaa1111-128x256co2x1" / "inner").symlink_to(theirs)
    (full / "tuning" / "eeee5555-64-0.json").symlink_to(theirs / "deep" / "contest-k.json")
    os.rename(full / linked, tmp_path / "moved")
    (full / linked).symlink_to(tmp_path / "moved", target_is_directory=True)
    kept = files(tmp_path / "moved")
    assert ask("cache", "rm", "--all")[0] == 0
    assert files(theirs) == {"deep/contest-k.json"} and files(tmp_path / "moved") == kept


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rm"], "rm takes digests or --all, one of them"),
        (["rm", "aaaa1111", "--all"], "rm takes digests or --all, one of them"),
        (["rm", "aaaa1111", "ffff"], "is called 'ffff'"),
        (["rm", "aa"], "'aa' is too short"),
    ],
)
def test_a_wrong_removal_removes_nothing(ask: Ask, full: Path, arguments: list[str], said: str) -> None:
    before = files(full)
    status, out, error = ask("cache", *arguments)
    assert (status, out) == (2, "") and said in error and error.count("\n") == 1
    assert files(full) == before


def test_a_store_that_is_not_private_is_refused(ask: Ask, full: Path) -> None:
    full.chmod(0o777)
    status, _, error = ask("cache", "rm", "--all")
    assert status == 2 and "others may write" in error and "notes.txt" in files(full)


def test_no_store_yet(ask: Ask, folder: Path) -> None:
    assert ask("cache", "ls")[:2] == (0, f"nothing in {folder}\n")
    assert ask("cache", "rm", "--all")[0] == 0
    assert cache.existing(str(folder)) is None and not folder.exists()
