"""`coda-inductor cache warmup MODULE:FUNCTION`: compiles a model and runs it once, so that later processes start warm.

On a GPU that tunes and fills both caches, ours and torch's. On the reference target there are no kernels and nothing is
timed: torch's own caches are filled, with our rewriting. What torch can give away of its caches is kept in the store,
for `cache export`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from coda_inductor.commands.backward import backward
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings
from coda_inductor.explain.report import plural
from coda_inductor.inductor import joint_pass
from coda_inductor.inductor.joint_pass import REPORTS, machine, require_options
from coda_inductor.kernels.entries import ARTIFACTS
from coda_inductor.kernels.store import open_store, write

Facts = dict[str, Any]


def require(settings: Settings) -> None:
    """Raises Unsupported, with the reason, where nothing would be compiled our way."""
    require_options(settings)
    machine(settings, ())


def warmup(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: str, settings: Settings
) -> Facts:
    """Compiles model(*args, **kwargs), for "train" with its backward. Raises Unsupported for a model that lies where no
    kernels are for."""
    require(settings)
    held = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    devices = {t.device.type for t in (*held, *tree_leaves((args, dict(kwargs)))) if isinstance(t, Tensor)}
    if settings.target != "reference" and joint_pass.DEVICE not in devices:
        said = f"the model and its inputs are on {' and '.join(sorted(devices)) or 'no device'}"
        raise Unsupported(said, hint=f"let the function put them on {joint_pass.DEVICE}")
    store, start_s = open_store(settings.cache_dir), time.perf_counter()
    before = counts(store)
    REPORTS.clear()
    torch._dynamo.reset()
    train = mode == "train"
    if isinstance(model, torch.nn.Module):
        model.train(train)
    with torch.set_grad_enabled(train):
        out = torch.compile(model, backend="coda")(*args, **kwargs)
        if train and not backward(out):
            raise Unsupported("no output of the model has a gradient", hint="--mode infer, or parameters that want one")
    if joint_pass.DEVICE in devices and torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, kept = time.perf_counter() - start_s, keep_artifacts(store)
    facts: Facts = {"schema": 1, "action": "warmup", "mode": mode, "path": str(store), "target": settings.target}
    facts |= {"seconds": seconds, "regions": sum(len(report.sites) for report in REPORTS)}
    facts |= {name: count - before[name] for name, count in counts(store).items()}
    return {**facts, "torch_artifacts": kept, "cache_hits": _hits()}


def counts(store: Path) -> dict[str, int]:
    """How many kernels and records there are."""
    return {"kernels": len([*store.glob("objects/*/*")]), "records": len([*store.glob("tuning/*.json")])}


def keep_artifacts(store: Path) -> int:
    """Keeps torch's artifacts of this process, for `cache export`; how many. 0 where its caches are off, or this torch
    has no such function."""
    save = getattr(torch.compiler, "save_cache_artifacts", None)
    found = save() if save is not None else None
    if found is None:
        return 0
    content, info = found
    write(store / ARTIFACTS / f"{hashlib.sha256(content).hexdigest()[:16]}.bin", content)
    return sum(map(len, info.artifacts.values()))


def _hits() -> int:
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def render(facts: Facts) -> str:
    """What the compile took and left."""
    if facts["cache_hits"] and not facts["regions"]:
        return f"warm already: {facts['seconds']:.1f} s, {plural(facts['cache_hits'], 'graph')} from torch's cache"
    made = f"{plural(facts['kernels'], 'kernel')} and {plural(facts['records'], 'record')} are new in {facts['path']}"
    lines = [f"compiled in {facts['seconds']:.1f} s, {plural(facts['regions'], 'Region')}; {made}"]
    if facts["target"] == "reference":
        lines.append("target reference: no kernels and no timings, only torch's own caches are warm")
    return "\n".join(lines)
