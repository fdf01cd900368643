"""Programs that write, alias and draw: what one is, and everything of it in which a compiled one must be eager's.

A program is a function or a module with a row: `@program(TABLE, "a:TD w:DD' | m:D", infer=2, train=5)`. The row names
its tensors with a letter of SIZES for each dimension; those behind the bar are state, which needs no gradient, and
those with ' are no leaves in training, so that they may be written. `infer` and `train` are the least Regions of its
graphs without and with gradients; it does not run where they are None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from evaluate import _interpreted as interpreted
from evaluate import flat, strict_reference
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from coda_inductor.core.errors import CodaWarning
from coda_inductor.inductor.joint_pass import REPORTS

SIZES = {"T": 12, "D": 8, "E": 16, "H": 4, "B": 2, "M": 24, "S": 11}
"""Tokens, features, inner features, half of the features, batch, twice and one less than the tokens."""
EXACT = 1e-10


@dataclass(frozen=True, slots=True)
class Program:
    """One row of a table; `why` says for what reason a value cannot be kept, and so fewer Regions are there."""

    make: Callable[..., Any]
    spec: str
    infer: int | None = None
    train: int | None = None
    why: str = ""
    given: Callable[..., Sequence[Any]] = field(default=lambda *tensors: tensors)
    """What the program is called with, of the tensors in the row: views of them, say."""
    inductor: bool = True
    """False: Inductor at torch 2.13 is itself wrong, in training if that is a mode. Its partitioner makes values of the
    forward again from inputs that the forward has overwritten, and it drops a clone of what is overwritten later."""
    ways: tuple[str, ...] = ()
    """Also: "dynamic", "autocast", "inductor" (compiled by it to the end)."""

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def letters(self) -> list[str]:
        """Of each tensor in the row, its dimensions."""
        return [text.split(":")[1].rstrip("'") for text in self.spec.replace("|", " ").split()]

    def inputs(self, dtype: torch.dtype, train: bool, sizes: dict[str, int], device: str) -> list[Tensor]:
        """The row's tensors; those with gradients are the leaves."""
        trained = len(self.spec.partition("|")[0].split())
        made = []
        for i, letters in enumerate(self.letters):
            x = torch.randn([sizes[letter] for letter in letters], dtype=torch.float64).to(device, dtype)
            made.append(x.requires_grad_(train and i < trained))
        return made

    def called_with(self, leaves: list[Tensor]) -> list[Any]:
        """One call's arguments."""
        marked = [text.endswith("'") for text in self.spec.replace("|", " ").split()]
        return list(
            self.given(*(x.clone() if x.requires_grad and m else x for x, m in zip(leaves, marked, strict=True)))
        )


def program(table: dict[str, Program], spec: str, **row: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function, or the class of a module, into a table."""

    def keep(made: Callable[..., Any]) -> Callable[..., Any]:
        assert made.__name__ not in table
        table[made.__name__] = Program(made, spec, **row)
        return made

    return keep


@dataclass(slots=True)
class Seen:
    """What a caller sees of a program: named values, and which of them share memory or are one tensor."""

    values: dict[str, Tensor | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    same: dict[str, list[list[str]]] = field(default_factory=dict)

    def note(self, when: str, tensors: dict[str, Tensor | None]) -> None:
        """Copies values; groups them by storage and by identity."""
        self.values |= {f"{when} {name}": None if x is None else x.detach().clone() for name, x in tensors.items()}
        self.facts[f"{when} storage"] = parted(
            {n: x.untyped_storage().data_ptr() for n, x in tensors.items() if x is not None}
        )
        self.same[when] = parted({n: id(x) for n, x in tensors.items() if x is not None})
        self.facts[f"{when} gradients"] = {n: x.requires_grad for n, x in tensors.items() if x is not None}


def parted(keys: dict[str, int]) -> list[list[str]]:
    """The names that have a key in common."""
    groups: dict[int, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def named(prefix: str, tensors: Sequence[Any]) -> dict[str, Tensor | None]:
    return {f"{prefix}{i}": x for i, x in enumerate(tensors) if isinstance(x, Tensor)}


def seen(
    p: Program,
    compile: Callable[[Any], Any],
    train: bool,
    *,
    dtype: torch.dtype = torch.float64,
    sizes: dict[str, int] = SIZES,
    device: str = "cpu",
    steps: int = 2,
    dynamic: bool = False,
) -> Seen:
    """Calls the program some times, with a backward after each in training; then writes to each of its outputs. If
    `dynamic`, tokens are a symbol."""
    torch.manual_seed(0)
    model: Any = p.make().to(device, dtype) if isinstance(p.make, type) else p.make
    state = dict(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else {}
    leaves, run, out = p.inputs(dtype, train, sizes, device), compile(model), Seen()
    for step in range(steps):
        torch.manual_seed(step + 3)
        args = p.called_with(leaves)
        for arg, letters in zip(args, p.letters, strict=False) if dynamic else ():
            for d in (d for d, letter in enumerate(letters) if letter == "T"):
                torch._dynamo.mark_dynamic(arg, d)
        with torch.set_grad_enabled(train):
            results = flat(run(*args))
            if train:
                loss([*results, *(x for x in flat(args) if not x.is_leaf)]).backward()
        visible = named("output", results) | named("input", flat(args)) | state
        out.note(f"step {step}", visible)
        out.values |= {
            f"step {step} gradient {n}": x.grad
            for n, x in (named("", leaves) | state).items()
            if x is not None and x.is_leaf
        }
        out.values = {name: None if x is None else x.detach().clone() for name, x in out.values.items()}
    for i, x in enumerate(results):  # of the last call
        if x.is_floating_point() and all(s or n < 2 for n, s in zip(x.shape, x.stride(), strict=True)):
            x.detach().mul_(0.5).add_(i + 1)
            out.note(f"output {i} written", visible)
    return out


def loss(tensors: Sequence[Tensor]) -> Tensor:
    """A sum in which each element of what has a gradient has a weight of its own."""
    parts = [x for x in tensors if x.requires_grad]
    return torch.stack(
        [
            (x * torch.linspace(-1, 1, x.numel(), device=x.device).to(x.dtype).view(x.shape)).sum().double()
            for x in parts
        ]
    ).sum()


def difference(found: Seen, wanted: Seen, exact: float = EXACT) -> str:
    """What of the first is not the second's; empty if all is."""
    for name, fact in wanted.facts.items():
        if found.facts[name] != fact:
            return f"{name}: {found.facts[name]}, eager's {fact}"
    for when, groups in wanted.same.items():  # two views of one tensor may become one tensor: so Inductor does
        if lost := [g for g in groups if not any(set(g) <= set(mine) for mine in found.same[when])]:
            return f"{when}: {lost} are one tensor in eager"
    if found.values.keys() != wanted.values.keys():
        return f"{sorted(found.values.keys() ^ wanted.values.keys())}"
    worst = ("", 0.0)
    for name, theirs in wanted.values.items():
        mine = found.values[name]
        if (mine is None) != (theirs is None):
            return f"{name}: {'missing' if mine is None else 'not in eager'}"
        if mine is not None and theirs is not None:
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return f"{name}: {mine.dtype}{list(mine.shape)}, eager's {theirs.dtype}{list(theirs.shape)}"
            worst = max(worst, (name, relative(mine, theirs)), key=lambda w: w[1])
    return f"{worst[0]}: off by {worst[1]:.1e}" if not worst[1] < exact else ""


def relative(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value; NaNs must stand in the same places."""
    if not mine.numel() or torch.equal(mine, theirs):
        return 0.0
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return float("inf")
    mine, theirs = mine.double().nan_to_num(), theirs.double().nan_to_num()
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3))


def off(values: dict[str, Tensor | None], exact: dict[str, Tensor | None]) -> dict[str, float]:
    """The relative error of each value."""
    pairs = ((name, values[name], x) for name, x in exact.items() if x is None or x.is_floating_point())
    return {n: float((a - x).norm() / x.norm().clamp_min(1e-6)) for n, a, x in pairs if a is not None and x is not None}


@dataclass(slots=True)
class Compiled:
    """What a compiled program has shown, how many Regions its graphs got, and what was said by us."""

    seen: Seen
    regions: int
    said: list[str]


def compiled(
    p: Program,
    train: bool,
    *,
    inductor: bool = False,
    how: dict[str, Any] | None = None,
    around: Callable[..., Any] = lambda compile, model: compile(model),
    **options: Any,
) -> Compiled:
    """Under backend="coda" and STRICT, on the reference target. Unless by `inductor`, all is as in a compile but that
    the partitioned graphs are interpreted. `how`: what `seen` is told; `around`: what is done about the call."""
    options = {"target": "reference", "strict": True} | options
    with strict_reference(run=inductor), warnings.catch_warnings(record=True) as caught, fallback_random():
        warnings.simplefilter("always")
        REPORTS.clear()
        by = partial(torch.compile, backend="coda", options=options)
        found = seen(p, partial(around, by), train, **how or {})
    said = [str(w.message) for w in caught if issubclass(w.category, CodaWarning)]
    return Compiled(found, sum(len(report.sites) for report in REPORTS), said)


def stock(p: Program, train: bool, **how: Any) -> Seen:
    """By Inductor's own pipeline, interpreted at its end."""

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=interpreted)  # type: ignore[arg-type]

    with strict_reference(), fallback_random():
        return seen(p, partial(torch.compile, backend=backend), train, **how)


@contextmanager
def fallback_random() -> Iterator[None]:
    """Eager's random numbers."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


def check(p: Program, train: bool, **more: Any) -> None:
    """The compiled program is eager's, silently, with the Regions of its row."""
    wanted = seen(p, lambda model: model, train, **more.get("how") or {})
    found = compiled(p, train, **more)
    said = difference(found.seen, wanted) or " ".join(found.said)
    assert not said, said
    least = p.train if train else p.infer
    assert least is not None and found.regions >= least, f"{found.regions} Regions"


def rows(table: dict[str, Program], of: Callable[[Program, bool], bool] = lambda p, train: True) -> list[Any]:
    """The parameters of a test: each program in each mode in which it runs, if it is `of` the kind."""
    modes = [(name, train) for name, p in table.items() for train in (False, True)]
    kept = [(n, t) for n, t in modes if (table[n].train if t else table[n].infer) is not None and of(table[n], t)]
    return [pytest.param(n, t, id=f"{n}-{'train' if t else 'infer'}") for n, t in kept]


def inductor_is_wrong(p: Program, train: bool) -> bool:
    return not p.inductor and train == (p.train is not None)


def inductor_is_right(p: Program, train: bool) -> bool:
    return not inductor_is_wrong(p, train)


def of_way(way: str) -> Callable[[Program, bool], bool]:
    """Those whose row says that they run in it too."""
    return lambda p, train: way in p.ways and inductor_is_right(p, train)
