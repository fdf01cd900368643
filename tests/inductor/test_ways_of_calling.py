"""How torch.compile is called: modes, batches, parts of a model, and beside a pass of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import REFERENCE, half, pretend, run, streams
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import coda_inductor.backend  # noqa: F401  (torch.compile imports it, and it reads the environment a first time)
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import REPORTS, JointPass
from coda_inductor.inductor.post_pass import PostPass

pytestmark = pytest.mark.usefixtures("uncached")


# ---- how torch.compile is called


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("reduce-overhead", {"mode": "reduce-overhead"}),
    ("max-autotune", {"mode": "max-autotune"}),
    ("max-autotune-no-cudagraphs", {"mode": "max-autotune-no-cudagraphs"}),
    ("dynamic", {"dynamic": True}),
    ("fullgraph", {"fullgraph": True}),
    ("memory planning", {"options": {"inductor.memory_planning": True}}),
    ("no pattern matcher", {"options": {"inductor.pattern_matcher": False}}),
    ("freezing", {"options": {"inductor.freezing": True}}),
]


@pytest.mark.parametrize("compile_with", [c for _, c in CALLS], ids=[name for name, _ in CALLS])
def test_way_of_calling(monkeypatch: pytest.MonkeyPatch, compile_with: dict[str, Any]) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model, x = half().eval(), streams()
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, **compile_with)
    assert ran == [] and ran.regions == [3]
    torch.testing.assert_close(ran.output, wanted)


@pytest.mark.parametrize("compile_with", [c for _, c in CALLS], ids=[name for name, _ in CALLS])
def test_way_of_calling_with_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compile_with: dict[str, Any]
) -> None:
    pretend(monkeypatch, tmp_path)
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, x = half(torch.bfloat16).eval(), streams(torch.bfloat16)
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, **compile_with)
    assert ran == [] and ran.regions == [3]
    torch.testing.assert_close(ran.output, wanted, atol=0.1, rtol=0.1)


def test_the_cpp_wrapper_is_left_to_inductor() -> None:
    """It does not even escape a string argument (torch 2.13)."""
    model, x = half(), streams()
    ran = run(model, *x, options={**REFERENCE, "inductor.cpp_wrapper": True})
    assert len(ran) == 1 and "C++ wrapper" in ran[0] and ran.reports == []
    torch.testing.assert_close(ran.output, model(*x).detach())


def test_several_batches_need_one_dynamic_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    model = half()
    first = run(model, *streams(tokens=300), options=REFERENCE, dynamic=True)
    assert first.regions == [3]
    compiled = torch.compile(model, backend="coda", options=REFERENCE, dynamic=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch.no_grad():
        for tokens in (300, 7, 1000, 64):
            torch.testing.assert_close(compiled(*streams(tokens=tokens)), model(*streams(tokens=tokens)))
    assert counters["stats"]["unique_graphs"] == 1


class Stack(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(half() for _ in range(blocks))

    def forward(self, a: Tensor, r: Tensor) -> Tensor:
        for block in self.blocks:
            r = block(a, r)
        return r


def test_module_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    torch._dynamo.reset()
    model, x = half(), streams()
    wanted = model(*x).detach()
    model.compile(backend="coda")
    REPORTS.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(*x), wanted)
    assert [len(r.sites) for r in REPORTS] == [3]


def per_block(stack: Stack) -> Callable[..., Tensor]:
    for block in stack.blocks:
        block.compile(backend="coda", options=REFERENCE)
    return stack


def partly(stack: Stack) -> Callable[..., Tensor]:
    stack.blocks[1].forward = torch.compiler.disable(stack.blocks[1].forward)
    return torch.compile(stack, backend="coda", options=REFERENCE)


def nested(stack: Stack) -> Callable[..., Tensor]:
    """A compiled block inside of a compiled model: Dynamo makes one graph of both."""
    stack.blocks[1].compile(backend="coda", options=REFERENCE)
    return torch.compile(stack, backend="coda", options=REFERENCE)


def regions_of_dynamo(stack: Stack) -> Callable[..., Tensor]:
    region = torch.compiler.nested_compile_region(lambda block, a, r: block(a, r))

    def forward(a: Tensor, r: Tensor) -> Tensor:
        for block in stack.blocks:
            r = region(block, a, r)
        return r

    return torch.compile(forward, backend="coda", options=REFERENCE)


@pytest.mark.parametrize("make", [per_block, partly, nested, regions_of_dynamo])
def test_nested_and_partial_compile(make: Callable[[Stack], Callable[..., Tensor]]) -> None:
    torch._dynamo.reset()
    stack, x = Stack(), streams()
    wanted = stack(*x).detach()
    REPORTS.clear()
    with torch.no_grad():
        torch.testing.assert_close(make(stack)(*x), wanted)
    found = [len(r.sites) for r in REPORTS]
    assert found and all(n > 3 if make is nested else n == 3 for n in found)


# ---- the user's own pass


class Theirs(CustomGraphPass):
    """Counts the products that it sees, and takes every bias-free sin out."""

    def __init__(self, name: str = "theirs") -> None:
        self.name, self.seen = name, list[int]()

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(sum(n.target is torch.ops.aten.mm.default for n in graph.nodes))

    def uuid(self) -> str:
        return self.name


@pytest.mark.parametrize("how", ["option", "config", "list"])
@pytest.mark.parametrize(("place", "seen"), [("joint_custom_pre_pass", 4), ("joint_custom_post_pass", 0)])
def test_passes_of_the_users_run_first_and_last(place: str, seen: int, how: str) -> None:
    """Before ours the products are there, behind it they are in Regions."""
    theirs = Theirs()
    chained: Any = [theirs, theirs] if how == "list" else theirs
    if how == "option":
        ran = run(half(), *streams(), options={**REFERENCE, f"inductor.{place}": chained})
    else:
        with torch._inductor.config.patch({place: chained}):
            ran = run(half(), *streams(), options=REFERENCE)
    assert ran == [] and ran.regions == [3]
    assert theirs.seen == [seen] * (2 if how == "list" else 1)


def test_uuid_is_that_of_both() -> None:
    def uuid(chained: Any, **settings: Any) -> Any:
        return JointPass(Settings(**settings), chained).uuid()

    one, other = uuid(Theirs()), uuid(Theirs("other"))
    assert one and other and one != other and uuid(None) not in (one, other)
    assert uuid(lambda graph: None) is None  # what Inductor does with a pass that it cannot identify
    assert uuid(Theirs("")) is None
    assert uuid([Theirs(), Theirs("other")]) not in (None, one)

    def behind(chained: Any, first: Any = None) -> Any:
        return PostPass(JointPass(Settings(), first), chained).uuid()

    assert behind(None) and behind(Theirs()) not in (None, behind(None), behind(Theirs("other")))
    assert behind(lambda graph: None) is None and behind(None, lambda graph: None) is None


def test_an_error_of_theirs_is_theirs() -> None:
    class Fails(Theirs):
        def __call__(self, graph: fx.Graph) -> None:
            raise ValueError("theirs")

    with pytest.raises(BackendCompilerFailed, match="ValueError: theirs"):
        run(half(), *streams(), options={**REFERENCE, "inductor.joint_custom_pre_pass": Fails()})
