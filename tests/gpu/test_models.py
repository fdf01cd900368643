"""Whole models on the GPU: the kernels that ran are the Regions of the report, and the error is no worse than
eager's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from codegen_cases import blank_outputs, random_inputs, relative_error

from coda_inductor.core.interpret import interpret
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import launch
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.tuner import Tuner
from coda_inductor.tuning.verdicts import UNTUNED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
    pytest.mark.usefixtures("uncached"),
]

DEVICE = "cuda"
VOCAB = 1000
WORSE = 1.5  # times eager's error: another order of sums, and other places to round
TOLERANCE = 4e-3  # relative Frobenius: one rounding to bf16 is 2e-3, and an output may be rounded twice


def llama(**changes: Any) -> torch.nn.Module:
    """A small Llama of transformers, randomly initialised, in float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": VOCAB, "attn_implementation": "sdpa",
    } | changes  # fmt: skip
    torch.manual_seed(0)
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**config)).eval()
    return model


def ids(batch: int, length: int, device: str | None = None) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), device=device or DEVICE)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_llama_runs_its_regions_at_eagers_accuracy_with_one_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Every Region launches; M from 2 to 16384 tokens needs one compile."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")  # so that every Region is kept and checked
    torch._dynamo.reset()
    model = llama().to(DEVICE, torch.bfloat16)
    exact = copy.deepcopy(model).double()  # of the buffers, too, which are in bf16 by now
    compiled = torch.compile(model, backend="coda", options={"cache_dir": str(tmp_path / "kernels")})
    reports = len(REPORTS)
    launch.FALLBACKS.clear()
    with torch.no_grad():
        for batch in (64, 2, 1024, 37, 513, 3):
            x = ids(batch, 16)
            torch._dynamo.mark_dynamic(x, 0)
            launch.LAUNCHES.clear()
            ours = compiled(x).logits
            assert len(REPORTS[-1].sites) == 12
            assert digests(REPORTS[-1]) == launch.LAUNCHES
            wanted = exact(x).logits
            assert error(ours, wanted) <= WORSE * error(model(x).logits, wanted)
    assert len(REPORTS) == reports + 1
    assert not launch.FALLBACKS


def digests(report: Report) -> Counter[str]:
    """How often each Region stands in the graph."""
    return Counter(site.region.digest for site in report.sites)


# ---- default settings: what loses its contest is left to Inductor


@dataclass
class Ran:
    """One compile, and a run at each number of tokens: launches by digest, and the errors of ours and of eager."""

    size: tuple[int, int]
    cache_dir: str
    verdicts: list[Limits] = field(default_factory=list)
    launched: dict[int, Counter[str]] = field(default_factory=dict)
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    graphs: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


# The length of a sequence, and the batches; more than one are one dynamic dimension, whose hint is the first.
WAYS: dict[str, tuple[int, tuple[int, ...]]] = {
    "static": (256, (8,)),
    "dynamic": (1, (1024, 2, 3, 8, 17, 31, 32, 100, 4096, 16384)),
}


@pytest.fixture(scope="module", params=WAYS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    length, batches = WAYS[request.param]
    ran = Ran((batches[0], length), str(tmp_path_factory.mktemp("store") / "kernels"))

    class Watched(Tuner):
        def __call__(self, plan: Plan, builts: list[Built]) -> Limits:
            ran.verdicts.append(super().__call__(plan, builts))
            return ran.verdicts[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.no_grad(),
    ):
        patch.setattr(joint_pass, "Tuner", Watched)
        everything(ran, length, batches)
    yield ran


def everything(ran: Ran, length: int, batches: tuple[int, ...]) -> None:
    """Compiles, and runs at all sizes. Later tests may reset Dynamo."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    REPORTS.clear()
    launch.FALLBACKS.clear()
    model = llama().to(DEVICE, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="coda", options={"cache_dir": ran.cache_dir, "strict": True})
    for i, batch in enumerate((batches[0], *batches)):
        x = ids(batch, length)
        if len(batches) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        launch.LAUNCHES.clear()
        ours = compiled(x).logits
        if i:  # the first call measures, too
            wanted = exact(x).logits
            ran.launched[x.numel()] = Counter(launch.LAUNCHES)
            ran.errors[x.numel()] = error(ours, wanted), error(model(x).logits, wanted)
    ran.reports = list(REPORTS)
    ran.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ran.fallbacks = dict(launch.FALLBACKS)


def test_one_graph_serves_all_sizes(ran: Ran) -> None:
    assert ran.graphs == len(ran.reports) == 1 and ran.fallbacks == {}


def test_error_is_eagers(ran: Ran) -> None:
    """Against the same weights in float64."""
    assert {m: pair for m, pair in ran.errors.items() if not pair[0] <= WORSE * pair[1]} == {}


def test_what_runs_is_what_explain_derives_without_the_losers(ran: Ran) -> None:
    """explain, on the CPU, is told of each verdict in turn and arrives at the same Regions."""
    (report,) = ran.reports
    given = iter(ran.verdicts)
    told = derived(ran, lambda plan, builts: next(given))
    assert digests(report) == told and next(given, None) is None
    assert ran.launched == dict.fromkeys(ran.launched, told)
    assert len(derived(ran)) and (told == derived(ran) or any(v.banned or v.undeferred for v in ran.verdicts))
    lost = {why for verdict in ran.verdicts for why in verdict.banned.values()}
    said = ("measured slower: ", "measured hardly faster: ", "measured slower in a busy GPU: ")
    assert lost == {r.reason for r in report.refused if r.reason.startswith(said)}
    assert all(why.startswith(said) and " us by Inductor" in why for why in lost)


def derived(ran: Ran, decide: Any = UNTUNED) -> Counter[str]:
    """What explain says of the same model and sizes."""
    model = llama().bfloat16()
    rewrite = partial(rewrite_for, decide=decide)
    facts = explain(model, (ids(*ran.size, "cpu"),), {}, "infer", Settings(target="sm_90a"), rewrite)
    (graph,) = facts["graphs"]
    return Counter(region["digest"] for region in graph["regions"])


def test_each_kernel_is_right_on_other_tensors(ran: Ran) -> None:
    """In the configuration that was tuned, or that of its size's bucket; nothing of the outputs is left unwritten."""
    wrong: dict[tuple[str, int], list[float]] = {}
    for region in {site.region for site in ran.reports[0].sites}:
        for m in (1, 37, 4097):
            inputs, outs = random_inputs(region, m, DEVICE, seed=m), blank_outputs(region, m, DEVICE)
            launch.kernel(region.text, ran.cache_dir, strict=True)(inputs, outs)
            errors = [relative_error(out, want) for out, want in zip(outs, interpret(region, inputs), strict=True)]
            if not all(e <= TOLERANCE for e in errors):
                wrong[region.digest, m] = errors
    assert wrong == {}
