"""Which module of the model a node belongs to, and how many equal layers are said at once.

`layers.0.mlp.down_proj` is the path of a product's module; `layers.*.mlp.down_proj` stands for that of 16 layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

Facts = dict[str, Any]
STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Where torch writes the modules around a node: of the forward, and of the forward's node that a gradient is of."""


@dataclass(frozen=True, slots=True)
class Modules:
    """Of a graph as it was captured: the path of a module by the number that a node shares with its gradients."""

    by_number: dict[int, str]

    @classmethod
    def of(cls, graph: fx.Graph) -> Modules:
        """Of a graph that is not rewritten yet: what rewriting writes has the numbers, but not all of the stacks."""
        found: dict[int, str] = {}
        for node in graph.nodes:
            if path := stacked(node):
                found.setdefault(node.meta.get("seq_nr", -1), path)
        found.pop(-1, None)
        return cls(found)

    def path(self, node: fx.Node) -> str:
        """The path of the innermost module that made the node, or of what it is a gradient of; empty if unknown."""
        return stacked(node) or self.by_number.get(node.meta.get("seq_nr", -1), "")

    def around(self, nodes: Sequence[fx.Node]) -> str:
        """The path of the innermost module that holds all that made these nodes, as far as it is known."""
        return ".".join(shared([path.split(".") for path in dict.fromkeys(map(self.path, nodes)) if path]))


def stacked(node: fx.Node) -> str:
    """The path that the node itself holds."""
    for name in STACKS:
        if stack := node.meta.get(name):
            path, *_ = [*stack.values()][-1]
            return readable(str(path))
    return ""


def readable(path: str) -> str:
    """layers.0.mlp of torch's spellings: L['self'].layers.0.mlp, getattr(L['self'].layers, '0').mlp."""
    while (plain := re.sub(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", path)) != path:
        path = plain
    path = re.sub(r"^[LG]\['[^']*'\]", "", path).replace(".__dict__['_modules']", "._modules")
    path = re.sub(r"(?:\._modules)?\[([^\]]*)\]", lambda found: "." + found[1].strip("'\""), path)
    return path.removeprefix("._orig_mod").strip(".")


def together(paths: Iterable[str]) -> str:
    """Several modules as one word: layers.0.mlp.{gate,up}."""
    parts = [p.split(".") for p in dict.fromkeys(paths) if p]
    if len(parts) < 2:
        return ".".join(parts[0]) if parts else ""
    common = shared([p[:-1] for p in parts])
    rest = ",".join(".".join(p[len(common) :]) for p in parts)
    return ".".join([*common, f"{{{rest}}}"])


def shared(parts: Sequence[Sequence[str]]) -> list[str]:
    """What all begin with."""
    columns = zip(*parts, strict=False)
    return [column[0] for column in itertools.takewhile(lambda column: len({*column}) == 1, columns)]


def pattern(path: str) -> str:
    """layers.*.mlp of layers.0.mlp: the numbers that lists of modules count by."""
    return re.sub(r"(?<![^.{,])\d+(?![^.},])", "*", path)


def starred(paths: Sequence[str]) -> str:
    """One name for paths that are equal but for numbers: those that differ are stars."""
    if len({*paths}) == 1:
        return paths[0]
    parts = zip(*(re.split(r"([.{},])", p) for p in paths), strict=True)
    return "".join(p[0] if len({*p}) == 1 else "*" for p in parts)


def grouped(regions: Sequence[Facts]) -> list[Facts]:
    """The Regions of a graph, equal ones of equal layers together, in the order of each group's first. Equal are those
    of one digest, line and laws, whose modules' paths differ only in numbers. Bytes are sums over the group."""
    found: dict[tuple[object, ...], list[Facts]] = {}
    for r in regions:
        unnamed = "" if r["module"] else r["id"]  # what has no module is no layer's
        key = (r["digest"], r["m"], r["source"], *r["laws"], pattern(r["module"]), r["backward"], r["bare"], unnamed)
        found.setdefault(key, []).append(r)
    return [
        {
            "module": starred([r["module"] for r in equal]),
            "backward": equal[0]["backward"],
            "regions": [r["id"] for r in equal],
            "count": len(equal),
            "bytes_before": sum(r["bytes_before"] for r in equal),
            "bytes_after": sum(r["bytes_after"] for r in equal),
        }
        for equal in found.values()
    ]
