"""kernels: those of a model, and those in the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import Ask, needs_compiler
from asking import ask as ask
from asking import folder as folder

from coda_inductor import cli
from coda_inductor.codegen.target import SM_90A, TARGETS, Target
from coda_inductor.commands import kernels as kernels_of
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import record, store


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


@pytest.mark.parametrize("row", [row for row in TARGETS.values() if not row.tested], ids=lambda row: row.name)
def test_kernels_for_another_target(ask: Ask, folder: Path, row: Target) -> None:
    """Its device code, its tiles, and that none was run; the command needs no card of it."""
    _, facts, _ = ask("kernels", "tool_model:build", "--target", row.name, "--json")
    (region,) = facts["regions"]
    assert facts["target"] == row.name and f"from coda_inductor.codegen.{row.device} import" in region["text"]
    assert {t["tile"] for t in region["tiles"]} <= {str(c) for c in row.tiles} and not folder.exists()
    said = ask("kernels", "tool_model:build", "--target", row.name)[1]
    assert said.startswith(f"for {row.name} (compiled, not yet run on such a card)\n")
    assert "not yet run" not in ask("kernels", "tool_model:build")[1]


@needs_compiler
def test_kernels_of_two_targets_are_kept_apart(ask: Ask, folder: Path) -> None:
    for name in ("sm_90a", "sm_120a"):
        _, facts, _ = ask("kernels", "tool_model:build", "--target", name, "--compile", "--json")
        assert facts["regions"][0]["tiles"][0]["why"] == "" and facts["regions"][0]["tiles"][0]["seconds"] > 0
    kept = {k["target"]: k for k in ask("kernels", "--json")[1]["kernels"]}
    assert kept.keys() == {"sm_90a", "sm_120a"} and kept["sm_90a"]["text"] != kept["sm_120a"]["text"]
    assert {e["device"] for e in ask("cache", "ls", "--json")[1]["entries"]} == kept.keys()
    (alone,) = ask("kernels", "--target", "sm_120a", "--json")[1]["kernels"]
    assert alone == kept["sm_120a"] and "1 kernel in the store" in ask("kernels", "--target", "sm_90a")[1]


def test_the_measured_tile_is_named(ask: Ask, folder: Path) -> None:
    _, facts, _ = ask("kernels", "tool_model:build", "--json")
    made, _ = kernels_of.sites(*cli.subject("tool_model:build"), "infer", Settings(target="sm_90a"))
    record.remember(
        store.open_store(str(folder)), made[0][1].region, facts["regions"][0]["bucket"], SM_90A.large[2], 0.5, []
    )
    (region,) = ask("kernels", "tool_model:build", "--json")[1]["regions"]
    assert [t["tile"] for t in region["tiles"] if t["chosen"]] == [str(SM_90A.large[2])]
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
