"""Graphs that live on while the machine or the settings change: each keeps those that it was compiled with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import close, half, pretend, streams
from failing_kernels import build_fails
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from unusable_stores import make_open

from coda_inductor.core.errors import CodaWarning, Unsupported
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.ops import lowering

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


# ---- at launch: graphs from a warm cache meet a machine that has changed


def spec() -> tuple[Region, list[Tensor]]:
    from codegen_cases import random_inputs, token_scale

    region = token_scale(64, 32)
    return region, random_inputs(region, 300, "cpu")


@pytest.mark.parametrize("strict", [False, True])
def test_launch_without_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool) -> None:
    from coda_inductor.core.interpret import interpret

    pretend(monkeypatch, tmp_path)
    make_open(monkeypatch, tmp_path / "kernels")
    region, inputs = spec()
    out = torch.empty(300, 64, dtype=BF16)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(strict)))
    launch_ = lowering.Launcher(region.text)
    if strict:
        with pytest.raises(Unsupported, match="others may write"):
            launch_(inputs, [out])
        return
    with pytest.warns(CodaWarning, match="a region runs as separate operations: others may write"):
        launch_(inputs, [out])
    launch_(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_launch_without_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool) -> None:
    from coda_inductor.core.interpret import interpret

    pretend(monkeypatch, tmp_path, build_fails)
    region, inputs = spec()
    out = torch.empty(300, 64, dtype=BF16)
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", str(int(strict)))
    launch_ = lowering.Launcher(region.text)
    if strict:
        with pytest.raises(Unsupported, match=r"nvvm says no(.|\n)*without CODA_INDUCTOR_STRICT"):
            launch_(inputs, [out])
        return
    with pytest.warns(CodaWarning, match=r"separate operations: no kernel for region .* nvvm says no") as caught:
        launch_(inputs, [out])
        launch_(inputs, [out])
    assert len(caught) == 1 and torch.equal(out, interpret(region, inputs)[0])


# ---- settings while graphs live


def test_a_kernel_comes_from_the_directory_of_its_own_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is compiled or set before its first launch."""
    opened: list[str | None] = []
    monkeypatch.setattr(lowering, "kernel", lambda text, cache_dir, **how: opened.append(cache_dir) or print)  # type: ignore[func-returns-value]
    launches = []
    for name in "ab":
        ours = JointPass(Settings(cache_dir=name))
        with torch._inductor.config.patch(joint_custom_pre_pass=ours):  # as compile_fx does
            launches.append(lowering.Launcher(spec()[0].text))
    monkeypatch.setenv("CODA_INDUCTOR_CACHE_DIR", str(tmp_path))
    for launch_ in (*launches, *launches):
        assert launch_.kernel
    assert opened == ["a", "b"]


class Settled(CustomGraphPass):
    """A pass of the user's that sees, for each graph, the settings under which it is compiled."""

    def __init__(self) -> None:
        self.seen: list[Settings] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(lowering.current())

    def uuid(self) -> str:
        return "settled"


def test_backward_uses_the_settings_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles a backward late: what the environment says by then does not matter."""
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    torch._dynamo.reset()
    model, x, settled = half(), streams(), Settled()
    options: dict[str, Any] = {"inductor.post_grad_custom_post_pass": settled, "numerics": "strict"}
    found = torch.compile(model, backend="coda", options=options)(*x)
    monkeypatch.setenv("CODA_INDUCTOR_TARGTE", "nonsense")
    found.sum().backward()
    assert settled.seen == [Settings(target="reference", numerics="strict")] * 2
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(*x).sum().backward()
    assert len(grads) == 5
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        close(grad, parameter.grad)
