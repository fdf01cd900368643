"""One model run by eager in float64, by Inductor and by coda, from the same weights, inputs and random state."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.utils import counters

from coda_inductor.commands.backward import backward
from coda_inductor.commands.differences.reached import PLAIN, Subject
from coda_inductor.commands.differences.wide import Draws, Recorder, Wide
from coda_inductor.commands.walk import SAID, leaves
from coda_inductor.core import errors
from coda_inductor.core.errors import CodaWarning
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report

Mode = Literal["infer", "train"]
Against = Literal["float64", "float32", "inductor"]
SEED = 0
LADDER: dict[str, tuple[tuple[str, torch.dtype | None], ...]] = {
    "float64": (("float64", torch.float64), ("float32", torch.float32), ("eager", None)),
    "float32": (("float32", torch.float32), ("eager", None)),
}
"""References in the order in which they are tried; "eager" computes in the model's own dtypes."""
OUTPUT, GRADIENT, OVERWRITTEN = "output", "gradient", "overwritten"


@dataclass(slots=True)
class Found:
    """A tensor after a run: a copy on the CPU, how it lay, and what it is to the user."""

    kind: str
    value: Tensor
    strides: tuple[int, ...] = ()


@dataclass(slots=True)
class Run:
    """What a run left: tensors by name, other outputs as text, the names that share memory, the loss in words."""

    found: dict[str, Found] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    sharing: set[frozenset[str]] = field(default_factory=set)
    loss: str = ""
    reports: list[Report] = field(default_factory=list)
    graphs: int = 0
    """Of which torch.compile made one."""
    warnings: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """What could not be compared, in words."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A run by eager; `name` is of LADDER, `why` says why no better one was possible."""

    name: str
    why: str
    run: Run


def reference(subject: Subject, mode: Mode, against: str) -> Reference:
    """The first of LADDER[against] that memory and the model's operations allow. Raises what the model itself does."""
    why = list[str]()
    drawn: list[tuple[str, Any]] | None = None
    for name, dtype in LADDER[against]:
        if dtype is None:
            return Reference(name, "; ".join(why), observed(subject, mode, subject.model))
        try:
            try:
                run = observed(subject, mode, subject.model, dtype, Wide(dtype, drawn))
            except Draws:
                recorder = Recorder()
                observed(subject, mode, subject.model, None, recorder)
                drawn = recorder.drawn
                run = observed(subject, mode, subject.model, dtype, Wide(dtype, drawn))
            return Reference(name, "; ".join(why), run)
        except Exception as error:  # an operation that has no such kernel, or no memory
            first = str(error).strip().partition("\n")[0]
            why.append(f"no {name}: {type(error).__name__}: {first}")
            errors.forget_frames(error)
    raise AssertionError("the last reference returns or raises")


def compiled(subject: Subject, mode: Mode, backend: str, settings: Settings | None = None) -> Run:
    """A run of torch.compile(model, backend=backend); `settings` are of coda, given as its options. Nothing comes from
    torch's caches, and random numbers are eager's."""
    options: dict[str, Any] = {}
    if settings is not None:
        options = {"target": settings.target, "disable": settings.disable}
    torch._dynamo.reset()
    errors.said.clear()
    kept = list(REPORTS)
    REPORTS.clear()
    before = counters["stats"]["unique_graphs"]
    with uncached(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = observed(subject, mode, torch.compile(subject.model, backend=backend, options=options or None))
    run.reports, run.graphs = list(REPORTS), counters["stats"]["unique_graphs"] - before
    REPORTS.clear()
    REPORTS.extend(kept)
    run.warnings = list(dict.fromkeys(str(w.message) for w in said if issubclass(w.category, CodaWarning)))
    torch._dynamo.reset()
    return run


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Within, each graph is compiled anew, and compiled code draws what eager draws."""
    with (
        inductor_config.patch(force_disable_caches=True, fallback_random=True),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def eagerly(wide: bool) -> Iterator[None]:
    """Within, the model's own calls of torch.compile are eager; `wide`: new tensors are float64, and float32 products
    are not rounded to fewer bits."""
    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with torch.compiler.set_stance("force_eager"):
        if wide:
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_default_dtype(default)
            torch.set_float32_matmul_precision(precision)


def observed(
    subject: Subject,
    mode: Mode,
    call: Callable[..., Any],
    dtype: torch.dtype | None = None,
    within: Any = None,
) -> Run:
    """One run from the state before all runs; `dtype` and `within`, a dispatch mode, of a reference."""
    subject.put_back(dtype)
    lost = subject.changed_for_good()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    subject.train(mode == "train")
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    with contextlib.ExitStack() as stack:
        if call is subject.model:
            stack.enter_context(eagerly(dtype is not None))
            if dtype is not None:
                torch.set_default_dtype(dtype)
        stack.enter_context(torch.set_grad_enabled(mode == "train"))
        if within is not None:
            stack.enter_context(within)
        made = call(*subject.args, **subject.kwargs)
        run = _outputs(subject, made)
        run.unseen += [f"{name}, whose state cannot be put back between runs" for name in lost]
        if mode == "train":
            unknown = unreached(subject, made)
            run.unseen += [
                f"the gradient of a weight {list(t.shape)} that no module or argument holds" for t in unknown
            ]
            run.loss = backward(made)
            for t in unknown:
                t.grad = None
    del made
    if mode == "train":
        for name, t in subject.first.items():
            if t.is_leaf and t.grad is not None:
                run.found[f"gradient of {name}"] = _found(GRADIENT, t.grad)
                t.grad = None
    for name, t in subject.changed(dtype).items():
        run.found[f"{name}, overwritten"] = Found(OVERWRITTEN, t)
    return run


def _outputs(subject: Subject, made: Any) -> Run:
    run, at = Run(), dict[int, set[str]]()
    for name, leaf in leaves("output", made):
        if not isinstance(leaf, Tensor):
            run.others[name] = repr(leaf) if isinstance(leaf, SAID) else type(leaf).__name__
            if not isinstance(leaf, SAID):
                run.unseen.append(f"{name}, of {type(leaf).__name__}")
            continue
        run.found[name] = _found(OUTPUT, leaf)
        if type(leaf) in PLAIN and leaf.layout == torch.strided and leaf.numel():
            at.setdefault(leaf.untyped_storage().data_ptr(), set()).add(name)
    for name, t in subject.reached():
        if type(t) in PLAIN and t.layout == torch.strided and t.numel() and t.untyped_storage().data_ptr() in at:
            at[t.untyped_storage().data_ptr()].add(name)
    run.sharing = {frozenset(names) for names in at.values() if len(names) > 1}
    return run


def _found(kind: str, t: Tensor) -> Found:
    """A copy. Of sparse tensors and of other classes, as what they stand for."""
    t = t.detach()
    if t.layout != torch.strided:
        t = t.to_dense()
    if hasattr(t, "full_tensor"):
        t = t.full_tensor()
    elif type(t) not in PLAIN and hasattr(t, "dequantize"):
        t = t.dequantize()
    strides = tuple(step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1)
    return Found(kind, t.to("cpu", copy=True), strides if t.numel() else ())


def unreached(subject: Subject, made: Any) -> list[Tensor]:
    """The leaves that the outputs are differentiable by, and that were not found by name, in the order of the graph."""
    known, found = {id(t) for t in subject.first.values()}, dict[int, Tensor]()
    left = [x.grad_fn for _, x in leaves("", made) if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set[Any](left)
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
            found[id(variable)] = variable
        fresh = [step for step, _ in node.next_functions if step is not None and step not in seen]
        seen.update(fresh)
        left += fresh
    return list(found.values())
