"""explain names modules, says equal layers once, and estimates what bytes cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.explain.estimate import CARDS, estimates
from coda_inductor.explain.modules import grouped, pattern, readable, starred, together
from coda_inductor.explain.report import estimated, percent
from coda_inductor.explain.steps import program
from coda_inductor.explain.study import study

SM_90A = Settings(target="sm_90a")
D, FF, TOKENS = 256, 512, 512


class Block(nn.Module):
    """A norm, gate and up, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.down = nn.Linear(FF, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def blocks(count: int) -> tuple[nn.Module, tuple[Tensor]]:
    return nn.Sequential(*(Block() for _ in range(count))).to(torch.bfloat16), (
        torch.empty(TOKENS, D, dtype=torch.bfloat16),
    )


@pytest.fixture(scope="module")
def deep() -> dict[str, Any]:
    return explain(*blocks(7), {}, "train", SM_90A)


@pytest.mark.parametrize(
    ("spelled", "path"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0'].mlp", "layers.0.mlp"),
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L['self'].__dict__['_modules']['layers']._modules['0'].mlp", "layers.0.mlp"),  # as diffusers' models
        ("getattr(getattr(L['self'], 'a-b').layers, '0').mlp", "a-b.layers.0.mlp"),
        ("L['fn'].0", "0"),
        ("L['self']", ""),
    ],
)
def test_paths_are_read_as_people_write_them(spelled: str, path: str) -> None:
    assert readable(spelled) == path


def test_several_modules_are_one_word() -> None:
    assert together(["layers.0.mlp.gate", "layers.0.mlp.up"]) == "layers.0.mlp.{gate,up}"
    assert together(["layers.0.mlp.gate", "layers.0.mlp.gate"]) == "layers.0.mlp.gate"
    assert together(["a", "b.c"]) == "{a,b.c}" and together([]) == ""


def test_numbers_of_layers_are_stars_and_those_of_names_are_not() -> None:
    assert pattern("layers.10.fc1") == "layers.*.fc1" and pattern("net.{0,2}") == "net.{*,*}"
    assert pattern("block3.h2o") == "block3.h2o"
    assert starred(["a.0.b.1", "a.12.b.1"]) == "a.*.b.1" and starred(["a.0"]) == "a.0"


def region(i: int, **other: Any) -> dict[str, Any]:
    facts = {"id": f"r{i}", "digest": "d", "m": "512", "source": "m.py:1", "laws": ["gauge"], "bare": False}
    return {**facts, "module": f"layers.{i}.mlp", "backward": False, "bytes_before": 8, "bytes_after": 2, **other}


def test_equal_layers_are_a_group() -> None:
    (group,) = grouped([region(0), region(1), region(2)])
    assert group == {
        "module": "layers.*.mlp", "backward": False, "regions": ["r0", "r1", "r2"], "count": 3, "bytes_before": 24,
        "bytes_after": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "e"}, {"module": "layers.1.attention"}, {"laws": []}, {"source": "m.py:2"}, {"backward": True},
        {"m": "256"}, {"bare": True}, {"module": ""},
    ],
)  # fmt: skip
def test_what_differs_stays_apart(other: dict[str, Any]) -> None:
    assert [g["regions"] for g in grouped([region(0), region(1, **other), region(2)])] == [["r0", "r2"], ["r1"]]


def test_regions_without_a_module_are_not_one_layer() -> None:
    assert len(grouped([region(0, module=""), region(1, module="")])) == 2


def test_regions_have_the_modules_of_their_products(deep: dict[str, Any]) -> None:
    (graph,) = deep["graphs"]
    named = {(r["module"], r["backward"]) for r in graph["regions"]}
    for i in range(7):
        assert {(f"{i}.{{gate,up}}", False), (f"{i}.{{gate,up}}", True), (f"{i}.down", True)} <= named
    assert all(r["modules"] and r["module"] == together(r["modules"]) for r in graph["regions"])
    counted = {(g["module"], g["backward"]): g["count"] for g in graph["groups"]}
    assert (counted["*.{gate,up}", False], counted["*.{gate,up}", True]) == (5, 6)  # ends of the model differ
    assert sorted(i for g in graph["groups"] for i in g["regions"]) == sorted(r["id"] for r in graph["regions"])
    for side in ("bytes_before", "bytes_after"):
        assert sum(g[side] for g in graph["groups"]) == sum(r[side] for r in graph["regions"])


def test_more_layers_are_hardly_more_lines(deep: dict[str, Any]) -> None:
    few = render(explain(*blocks(3), {}, "train", SM_90A)).splitlines()
    many = render(deep).splitlines()
    assert abs(len(many) - len(few)) <= 2
    assert any(line.startswith("  *.{gate,up}  x5  (r") for line in many)
    assert any(line.startswith("  *.{gate,up}  x6  backward  (r") for line in many)
    every = render(deep, True).splitlines()
    assert sum("  x" in line for line in every) == 0
    assert len(every) - len(many) == 2 * (len(deep["graphs"][0]["regions"]) - len(deep["graphs"][0]["groups"]))


def test_milliseconds_are_bytes_over_the_bandwidth_of_the_card() -> None:
    found = estimates(5_600_000_000, 1_400_000_000, SM_90A.target)
    assert [e["card"] for e in found] == ["H100", "H200"]
    assert found[0]["ms_before"] == pytest.approx(2.0) and found[0]["ms_after"] == pytest.approx(0.5)
    assert estimated({"estimates": found}) == {"H100": "2.0 -> 0.5 ms", "H200": "1.4 -> 0.34 ms"}
    assert all(2e12 < rate < 4.9e12 for rate in CARDS[SM_90A.target].values())  # an H200's memory does 4.8 TB/s
    assert estimates(1, 1, "reference") == []


def test_the_text_says_that_it_is_an_estimate_of_memory_bound_time(deep: dict[str, Any]) -> None:
    (line,) = [line for line in render(deep).splitlines() if "memory-bound time" in line]
    assert " ms on an H100, " in line and " ms on an H200, -" in line and "says nothing of the step" in line


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (4, 1, ", -75 %"),
        (100, 104, ", +4 %"),
        (0, 3, ""),
        (1000, 1, ", -99.9 %"),
        (5, 0, ", -100 %"),
        (2, 19, ", +850 %"),
        (8, 16600, ", 2075 times"),
    ],
)
def test_percent(before: int, after: int, said: str) -> None:
    assert percent(before, after) == said


def test_one_rewriting_gives_what_explain_and_graph_say() -> None:
    model, args = blocks(2)
    found = study(model, args, {}, "train", SM_90A)
    assert found.explained == explain(model, args, {}, "train", SM_90A)
    assert found.programs == program(model, args, {}, "train", SM_90A)["graphs"]
    assert [[s.name for s, _ in sites] for sites in found.sites] == [
        [r["id"] for r in g["regions"]] for g in found.explained["graphs"]
    ]
    assert {rows for sites in found.sites for _, rows in sites} == {TOKENS}
    steps = {s["region"]: (s["module"], s["backward"]) for s in found.programs[0]["after"] if "region" in s}
    assert steps == {r["id"]: (r["module"], r["backward"]) for r in found.explained["graphs"][0]["regions"]}
