"""The verbs that look at the machine, the kernels, the laws and the store: what they find, say and remove."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from coda_inductor import cli
from coda_inductor.codegen import target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.commands import cache, doctor, rules
from coda_inductor.commands import kernels as kernels_of
from coda_inductor.core import versions
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import DTYPES
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import record, store
from coda_inductor.rewrite.laws import BILINEARITY, LAWS, Law
from coda_inductor.tuning import outcome

MODEL = """
import torch

def build():
    layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)]
    model = torch.nn.Sequential(*layers, torch.nn.GELU()).to(torch.bfloat16)
    return model, (torch.zeros(512, 64, dtype=torch.bfloat16),)
"""
LARGE = SM_90A.large


def can_compile() -> bool:
    try:
        target.available(SM_90A.capability)
    except Unsupported:
        return False
    return True


needs_compiler = pytest.mark.skipif(not can_compile(), reason="quack or CuTeDSL is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the store, not made yet, in a working folder with a module `tool_model`."""
    (tmp_path / "tool_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tool_model", raising=False)
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


Ask = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command: exit status, facts if --json else text, what went to stderr."""

    def run(*arguments: str) -> tuple[int, Any, str]:
        status = cli.main(arguments)
        said = capsys.readouterr()
        return status, json.loads(said.out) if "--json" in arguments and said.out else said.out, said.err

    return run


# doctor


def no_sample(run: bool) -> dict[str, Any]:
    """Stands for a compile that went well."""
    facts = {"target": "sm_90a", "tile": "128x128pp1x2", "seconds": 1.0, "why": "", "registers": 168, "stack": 0}
    return {**facts, "linked": True, "ran": run, "error": 1e-3 if run else None, "allowed": 4e-3}


@needs_compiler
def test_doctor_compiles_a_kernel_without_a_gpu(ask: Ask, folder: Path) -> None:
    status, facts, _ = ask("doctor", "--json")
    made = facts["sample"]
    assert status == 0 and made["why"] == "" and made["stack"] == 0 and 0 < made["registers"] <= 255
    assert made["linked"] and made["ran"] == (target.capability() == SM_90A.capability)
    assert facts["versions"]["torch"] == torch.__version__ and not folder.exists()


def test_the_sample_means_what_it_says() -> None:
    inputs = [torch.randn(5, 256), torch.randn(264, 256), torch.randn(5, 264)]
    h, q = interpret(doctor.SAMPLE, inputs)
    torch.testing.assert_close(h, (inputs[0] @ inputs[1].t() + inputs[2]).bfloat16())
    assert q.shape == (5,) and h.dtype == DTYPES["bf16"]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an sm_90 GPU and everything on it."""
    monkeypatch.setattr(target, "capability", lambda device=None: SM_90A.capability)
    monkeypatch.setattr(target, "available", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "sample", no_sample)


def test_a_healthy_machine(healthy: None, ask: Ask) -> None:
    status, said, _ = ask("doctor")
    assert status == 0 and "can be generated and run" in said and "relative error 1.0e-03" in said
    assert said.endswith("no problems found\n")


def test_a_kernel_that_is_not_linked_is_said(healthy: None, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "sample", lambda run: no_sample(run) | {"linked": False})
    status, said, _ = ask("doctor")
    assert status == 0 and "not linked (cc, gcc, clang?), so that every process imports the compiler; ran" in said


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"why": "no kernel: ptxas"}, "the sample kernel failed: no kernel: ptxas"),
        ({"error": 0.3}, "the sample kernel is wrong: relative error 3.0e-01, 0.004 is allowed"),
        ({"error": float("nan")}, "the sample kernel is wrong: relative error nan"),
    ],
)
def test_a_bad_kernel_is_a_problem(
    healthy: None, ask: Ask, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(doctor, "sample", lambda run: no_sample(run) | broken)
    status, said, _ = ask("doctor")
    assert status == 1 and f"PROBLEM: {told}" in said


def test_a_missing_library_is_a_problem_where_kernels_could_run(
    healthy: None, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(capability: Any) -> None:
        raise Unsupported("quack-kernels is not installed", hint='pip install "quack-kernels"')

    monkeypatch.setattr(target, "available", missing)
    status, facts, _ = ask("doctor", "--json")
    assert (status, facts["sample"]) == (1, None)
    assert facts["problems"] == ['quack-kernels is not installed (pip install "quack-kernels")']
    monkeypatch.setattr(target, "capability", lambda device=None: None)
    assert ask("doctor")[0] == 0  # no GPU: nothing that is needed is broken


def test_a_torch_that_was_not_tested_is_said(healthy: None, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("doctor", "--json")[1]["torch"]["works"] and versions.TESTED in ask("doctor")[1]
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    status, said, _ = ask("doctor")
    assert status == 1 and f"PROBLEM: torch 2.16.0 was not tested; {versions.TESTED}\n" in said
    assert f"every graph is left to Inductor: torch 2.16.0 was not tested; {versions.TESTED}\n" in said
    monkeypatch.setattr(target, "capability", lambda device=None: None)
    status, said, _ = ask("doctor")
    assert status == 0 and "every graph is left to Inductor: torch 2.16.0" in said


def test_a_store_that_others_may_write_is_a_problem(healthy: None, ask: Ask, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    status, said, _ = ask("doctor")
    assert status == 1 and f"PROBLEM: others may write to the kernel cache {folder} (mode 0777)" in said


def test_a_store_that_cannot_be_made_is_a_problem(
    healthy: None, ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path / "file" / "deep" / "store"))
    status, said, _ = ask("doctor")
    assert status == 1 and f"PROBLEM: the kernel cache {tmp_path}/file/deep/store cannot be made: Not a dir" in said
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path / "none" / "yet"))
    assert ask("doctor")[0] == 0 and not (tmp_path / "none").exists()  # and none is made


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where libraries are installed that may change graphs: here are none, whatever this machine has."""
    site = tmp_path / "site"
    for name in doctor.OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    source = SourceFileLoader, [".py"]
    monkeypatch.setattr(doctor, "find_spec", lambda name: FileFinder(str(site), source).find_spec(name))
    return site


def test_what_else_changes_graphs(healthy: None, ask: Ask, others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setenv("CODA_INDUCTOR_NUMERICS", "strict")
    with inductor_config.patch(cpp_wrapper=True, joint_custom_pre_pass=no_sample):
        _, facts, _ = ask("doctor", "--json")
    assert [(o["name"], o["imported"]) for o in facts["others"]] == [("liger_kernel", True)]
    assert [s["name"] for s in facts["inductor"]] == ["cpp_wrapper", "joint_custom_pre_pass"]
    (numerics,) = [s for s in facts["settings"] if s["name"] == "numerics"]
    assert (numerics["value"], numerics["from"]) == ("strict", "CODA_INDUCTOR_NUMERICS")
    assert doctor.inductor() == []


@pytest.mark.parametrize(("module", "package"), [("liger_kernel", "liger-kernel"), ("unsloth", "unsloth")])
def test_an_installed_patcher_is_named_and_not_imported(
    healthy: None, ask: Ask, others: Path, module: str, package: str
) -> None:
    """Importing one is what patches, in some of them."""
    assert module not in ask("doctor")[1]
    facts = others / f"{module}-1.2.3.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2.3\n")
    (facts / "top_level.txt").write_text(f"{module}\n")
    (others / module).mkdir()
    (others / module / "__init__.py").write_text("raise AssertionError('imported')")
    sys.path.insert(0, str(others))  # the fixture puts it back
    status, said, _ = ask("doctor")
    (line,) = [line for line in said.splitlines() if line.startswith(f"  {module}")]
    assert status == 0 and line.split()[:2] == [module, "1.2.3"] and "calls that cannot be read" in line
    (found,) = [other for other in ask("doctor", "--json")[1]["others"] if other["name"] == module]
    assert (found["version"], found["imported"]) == ("1.2.3", False)


# kernels


def test_kernels_of_a_model(ask: Ask, folder: Path) -> None:
    status, facts, _ = ask("kernels", "tool_model:build", "--json")
    (region,) = facts["regions"]
    assert status == 0 and region["count"] == 2 and (region["m"], region["n"], region["k"]) == ("512", 128, 64)
    assert "def epilogue(acc" in region["text"] and region["path"] is None and not folder.exists()
    assert all(t["stages"] >= 3 and t["registers"] is None for t in region["tiles"])
    said = ask("kernels", "tool_model:build", "--region", region["digest"][:6], "--source")[1]
    assert said.startswith(f"r0  {region['digest']}  [512, 128] K=64  x 2") and "| def epilogue(acc" in said


def test_each_form_of_a_kernel_is_listed(ask: Ask, folder: Path) -> None:
    """Two layouts of a weight are two kernels of one tile. A link is not followed."""
    folder.mkdir(mode=0o700)
    tile = folder / "objects" / "coda_epilogue_aaaa1111-128x256co2x1"
    for form in ("f", "g"):
        store.write(tile / form / "packages" / "k.o", "code")
    (folder / "objects" / "coda_epilogue_aaaa1111-link").symlink_to(tile, target_is_directory=True)
    (kernel,) = ask("kernels", "--json")[1]["kernels"]
    assert kernel["tiles"] == [{"tile": "128x256co2x1", "registers": None, "stack": None}] * 2


@needs_compiler
def test_compiled_kernels_go_to_the_store(ask: Ask, folder: Path) -> None:
    _, facts, _ = ask("kernels", "tool_model:build", "--compile", "--json")
    (region,) = facts["regions"]
    first, *others = region["tiles"]
    assert first["why"] == "" and first["seconds"] > 0 and first["stack"] == 0 and first["registers"] > 0
    assert all(t["seconds"] is None for t in others) and Path(region["path"]).parent == folder / "epilogues"
    (kept,) = ask("kernels", "--json")[1]["kernels"]
    assert kept["kernel"] == region["kernel"] and kept["text"] == region["text"]
    assert kept["tiles"] == [{"tile": first["tile"], "registers": first["registers"], "stack": 0}]
    (entry,) = ask("cache", "ls", "--json")[1]["entries"]
    assert (entry["digest"], entry["tiles"]) == (region["kernel"], [first["tile"]])
    assert "1 kernel in the store" in ask("kernels")[1]


def test_the_measured_tile_is_named(ask: Ask, folder: Path) -> None:
    _, facts, _ = ask("kernels", "tool_model:build", "--json")
    made, _ = kernels_of.sites(*cli.subject("tool_model:build"), "infer", Settings(target="sm_90a"))
    record.remember(store.open_store(str(folder)), made[0][1].region, facts["regions"][0]["bucket"], LARGE[2], 0.5, [])
    (region,) = ask("kernels", "tool_model:build", "--json")[1]["regions"]
    assert [t["tile"] for t in region["tiles"] if t["chosen"]] == [str(LARGE[2])]
    assert [r["ms"] for r in region["records"]] == [0.5]
    said = ask("kernels", "tool_model:build")[1]
    assert "chosen by measurement" in said and "measured: 0.500 ms up to 512 rows" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tool_model:build", "--region", "r9"], "no Region is called 'r9'"),
        (["--compile"], "--region, --compile and --all are about a model"),
        (["tool_model:nothing"], "has no function 'nothing'"),
    ],
)
def test_a_wrong_request_for_kernels_is_one_line(ask: Ask, arguments: list[str], said: str) -> None:
    status, out, error = ask("kernels", *arguments)
    assert (status, out) == (2, "") and said in error and error.count("\n") == 1


# rules


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_law_is_listed_and_proved(law: Law) -> None:
    facts = rules.law_facts(law, Settings(), prove=True)
    assert facts["proof"]["verdict"] == "proved" and facts["used"]
    assert facts["before"] and facts["after"] and facts["default"] == {"strict": False, "default": True}


def test_a_false_law_and_a_loose_one_are_noticed() -> None:
    false = dataclasses.replace(BILINEARITY, after=lambda x, r, v, g, w: (x @ w) * r + v * g @ w * r)
    assert rules.proof(false)["verdict"].startswith("false for ")
    loose = dataclasses.replace(BILINEARITY, refuses=(BILINEARITY.shapes,))
    assert rules.proof(loose)["verdict"].startswith("true also for the refused ")


def test_rules_as_text(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", "shift,pair,tables")
    status, said, _ = ask("rules", "--prove")
    assert status == 0 and said.count("proved in ") == len(LAWS)
    assert "    (x * r + v * g) @ w\n  = (x @ w) * r + v * (g @ w)\n" in said
    off = [line for line in said.splitlines() if "switched off" in line]
    assert [line.split()[0] for line in off] == ["shift", "pair", "tables"]


VERBS = [["doctor"], ["rules"], ["kernels"], ["cache", "ls"], ["explain", "tests.coverage_models:nanogpt"]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_name_that_does_not_exist_is_said(ask: Ask, monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_ONLY", "table")
    status, _, said = ask(*verb)
    assert status and "unknown law, region kind or pass 'table' (did you mean 'tables'?)" in said


# cache


@pytest.fixture
def full(folder: Path) -> Path:
    """A store with two kernels, a tuning and a contest record, what a broken write left, and a file of another's."""
    made = store.open_store(str(folder))
    for name in ("aaaa1111", "bbbb2222"):
        store.write(made / "epilogues" / f"coda_epilogue_{name}.py", "# text")
        store.write(made / "objects" / f"coda_epilogue_{name}-128x256co2x1" / "f" / "k.o", "code")
    fields = {"config": LARGE[0]._asdict(), "ms": 0.25, "bucket": 8192, "device": "H", "versions": {"torch": "2"}}
    store.write_record(made, "cccc3333-8192-0123", fields)
    times = dict(zip(outcome.TIMED, (0.5, 0.625, 0.75, 0.6), strict=True))
    store.write_record(made, "contest-dddd4444", {"regions": ["cccc3333"], **times}, outcome.timed)
    store.write(made / "tuning" / ".cccc.json.x1", "{")
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


def test_cache_ls_of_a_contest_that_was_timed_in_one_way(ask: Ask, full: Path) -> None:
    """Long calls are, and what a slow host launches."""
    times = dict(zip(outcome.TIMED, (8.5, 8.5, 9.5, 9.5), strict=True))
    store.write_record(full, "contest-dddd7777", {"regions": ["cccc3333"], **times}, outcome.timed)
    (row,) = (line for line in ask("cache", "ls")[1].splitlines() if "8.500" in line)
    assert "cccc3333: fused 8.500 ms, Inductor 9.500 ms  " in row and "busy" not in row


def test_cache_ls(ask: Ask, full: Path) -> None:
    status, facts, _ = ask("cache", "ls", "--json")
    kinds = [(e["kind"], e["digest"]) for e in facts["entries"]]
    names = [("kernel", "aaaa1111"), ("kernel", "bbbb2222"), ("leftover", ".cccc.json.x1")]
    assert status == 0 and kinds == [*names, ("tuning", "cccc3333"), ("contest", "dddd4444")]
    assert facts["entries"][0]["bytes"] == len("# text") + len("code")
    said = ask("cache", "ls")[1]
    assert "up to 8192 rows: 128x256co2x1 0.250 ms" in said and "  torch 2\n" in said
    assert "cccc3333: fused 0.500 ms, Inductor 0.750 ms; in a busy GPU 0.625 ms, 0.600 ms" in said
    assert "2 kernels, 1 tuning record, 1 contest record, 1 leftover file, " in said and str(full) in said


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
    assert "1 kernel, 1 tuning record, 1 contest record" in said and "removed from" in said


def test_cache_rm_all_leaves_what_is_not_ours(ask: Ask, full: Path) -> None:
    assert ask("cache", "rm", "--all")[0] == 0
    assert files(full) == {"notes.txt"}
    assert "nothing in" in ask("cache", "ls")[1]


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
