"""Whatever a contest decides, the program stays right: random losers, in every order, on several architectures."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from evaluate import Graph, captured, error
from torch import fx, nn
from transformer_blocks import KINDS, Block, D

from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint import rewrite
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.verdicts import Decisions


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "norm", "gated"), KINDS)
def test_any_verdict_leaves_a_right_program(kind: str, norm: str, gated: bool) -> None:
    """Each round bans or undefers a third of what the plan holds, until a round decides nothing more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind, norm, gated) for _ in range(3))).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.3)
    (graph,) = captured(model, torch.randn(2, 3, D, dtype=torch.float64))
    (wanted,) = outputs(graph)
    for seed in range(8):
        chance = random.Random(seed)
        again = Graph(fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph.graph)).graph, graph.inputs)

        def decide(plan: Plan, builts: list[Built], chance: random.Random = chance) -> Limits:
            losers = [acc.bit for b in builts for acc in b.draft.space.accs if chance.random() < 0.3]
            fired = {f.product for f in plan.firings}
            kept = sum(1 << bit for bit in losers if bit in fired)
            return Limits({bit: "lost" for bit in losers if bit not in fired}, kept)

        report = rewrite(again.graph, Settings(), decisions=Decisions(decide=decide))
        assert error(outputs(again)[0], wanted) < 1e-10, (seed, [s.outputs for s in report.sites])


def outputs(graph: Graph) -> list[Any]:
    """The graph's results on its inputs."""
    module = fx.GraphModule(torch.nn.Module(), graph.graph)
    return list(fx.Interpreter(module).run(*graph.inputs))
