"""doctor: what it finds on a machine, and what it calls a problem."""

from __future__ import annotations

import sys
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from asking import Ask, needs_compiler
from asking import ask as ask
from asking import folder as folder
from torch._inductor import config as inductor_config

from coda_inductor.codegen import target
from coda_inductor.codegen.target import SM_90A, SM_100A
from coda_inductor.commands import doctor
from coda_inductor.core import versions
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.settings import KINDS, Settings


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


def test_the_settings_are_the_users() -> None:
    names = [s["name"] for s in doctor.in_force(Settings())]
    assert names == list(KINDS)
    last = doctor.in_force(Settings(deterministic=True))[-1]
    assert last == {"name": "deterministic", "value": True, "from": "torch.use_deterministic_algorithms"}


def test_it_is_one_without_a_gpu_too(ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(target, "capability", lambda device=None: None)
    monkeypatch.setattr(doctor, "sample", no_sample)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path / "file" / "store"))
    status, said, _ = ask("doctor")
    assert status == 1 and said.count("PROBLEM: the kernel cache") == said.count("PROBLEM") == 1


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


def test_a_card_that_no_kernel_has_run_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is a problem there; what is asked for is said."""
    monkeypatch.setattr(target, "capability", lambda device=None: SM_100A.capability)
    monkeypatch.setattr(target, "installed", lambda package: "4.8.1" if "cutlass" in package else "0.6.5")
    monkeypatch.setattr(target, "MODULES", ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "sample", no_sample)
    status, said, _ = ask("doctor")
    assert (
        status == 0 and "no: kernels for sm_100 are compiled, not yet run on such a card (CODA_INDUCTOR_TARGET" in said
    )
    assert "check     `coda-inductor doctor --check` compares all kinds of kernels" in said
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", SM_100A.name)
    said = ask("doctor")[1]
    assert "for sm_100a, compiled, not yet run on such a card: each is compared with the interpreter before" in said
    assert ask("doctor", "--json")[1]["untested"] == SM_100A.name
