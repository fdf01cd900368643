"""Attention in which each token sees a window of others: as torch's flash attention has it, without a mask.

ModernBERT's tokens see 64 on each side, Gemma 3's 1023 before. torch's composite attention has no argument for that:
cuDNN reads a mask of tokens x tokens, and computes what the mask hides.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coda_inductor.attention.calls import OPERANDS, Call
from coda_inductor.ops.attention import WINDOWED, WINDOWED_BACKWARD, pairs
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.layout import in_steps
from coda_inductor.write.strides import restrided
from coda_inductor.write.writing import Writing

SEEN, TOKENS = 3 / 8, 1024
"""The largest share of all pairs, and the fewest tokens, with which flash attention's window is faster than cuDNN's
mask. On an H100, forward and backward, 4 x 2048 tokens and 32 heads of 128: 1.64 ms for 3.29 if 3/8 are seen."""
WIDEST, STEP = 256, 8
"""Numbers in a head: the most that flash attention takes, and in which steps."""
DTYPES = (torch.bfloat16, torch.float16)
ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
MASKED = "cudnn_attention"


@dataclass(frozen=True, slots=True)
class Window:
    """Which keys a token sees: so many before its own place, and so many behind it; None: all."""

    left: int | None = None
    right: int | None = None

    @property
    def hides(self) -> str:
        """For people."""
        if self in (NOTHING, LATER):
            return "nothing" if self == NOTHING else "the later tokens"
        sides = ((self.left, "before"), (self.right, "behind"))
        shown = [f"{'all' if n is None else n} {side}" for n, side in sides if n != 0]
        return "all other tokens" + (" but " + " and ".join(shown) if shown else "")

    def share(self, tokens: int) -> float:
        """Of all pairs of tokens, those that see each other."""
        return pairs(tokens, self.left, self.right) / tokens**2


NOTHING, LATER = Window(), Window(right=0)


@dataclass(frozen=True, slots=True)
class Step:
    """A forward of attention, and the backwards that read its results."""

    forward: Call
    backwards: tuple[Call, ...]


def steps(calls: Sequence[Call]) -> list[Step] | None:
    """The calls, each backward with its forward; None if something else reads what only a backward can."""
    found, left = list[Step](), {call.node for call in calls if call.is_backward}
    for forward in (call for call in calls if not call.is_backward):
        backwards = tuple(call for call in calls if call.is_backward and made_by(call) == forward.node)
        theirs = {call.node for call in backwards}
        if not all(read_by(result) <= theirs for result in forward.node.users if index(result) != 0):
            return None
        left -= theirs
        found.append(Step(forward, backwards))
    return None if left else found


def read_by(node: fx.Node) -> set[fx.Node]:
    """What reads the node, or the same under another name."""
    same = g.reached([node], lambda n: (user for user in n.users if user.target in ALIASES))
    return {user for n in same for user in n.users if user not in same}


def made_by(backward: Call) -> fx.Node | None:
    """What made both the result and the sums of exponentials that a backward reads."""
    made = set[Any]()
    for name in ("out", "logsumexp"):
        result = g.root(backward.given[name], lambda n: n.target in ALIASES)
        made.add(result.args[0] if result.target is operator.getitem else None)
    return made.pop() if len(made) == 1 else None


def by_window(calls: Sequence[Call], window: Window) -> bool:
    """Does flash attention give the same for all these, and sooner?"""
    return flash_is_there() and all(gains(call, window) for call in calls)


def flash_is_there() -> bool:
    """Is it in this torch, and allowed for the whole process? (What `sdpa_kernel` allows within a compiled function is
    not seen here.) A torch without CUDA explains what one with it would do."""
    there = torch.version.cuda is None or torch.backends.cuda.is_flash_attention_available()
    return bool(there and torch.backends.cuda.flash_sdp_enabled())


def gains(call: Call, window: Window) -> bool:
    """Is the kernel that torch chose slower, for this window?"""
    query, *others = (call.given[name].meta["val"] for name in OPERANDS)
    width, tokens = query.shape[-1], query.shape[-2]
    if MASKED not in str(call.node.target) or window in (NOTHING, LATER):
        return False
    if not isinstance(width, int) or width % STEP or width > WIDEST or any(x.shape[-1] != width for x in others):
        return False
    if any(x.dtype not in DTYPES for x in (query, *others)):
        return False
    if not all(in_steps(x) for x in (query, *others, *(n.meta["val"] for n in filter(None, [call.gradient])))):
        return False
    return tokens >= TOKENS and window.share(tokens) <= SEEN


def write(graph: fx.Graph, step: Step, window: Window) -> None:
    """The step by flash attention, in place of what it was."""
    results = instead(graph, step.forward, WINDOWED, (), window)
    for call in step.backwards:
        instead(graph, call, WINDOWED_BACKWARD, results, window)
        erase(call.node)
    erase(step.forward.node)


def instead(
    graph: fx.Graph, call: Call, operation: object, forwards: Sequence[fx.Node], window: Window
) -> list[fx.Node]:
    """The operation, and its results in place of the call's, as these lie; a backward reads the forward's."""
    writing = Writing(graph, call.node)
    given = [*filter(None, [call.gradient]), *(call.given[name] for name in OPERANDS), *forwards]
    node = writing.instead(call.node, operation, *given, window.left, window.right, scale=call.given.get("scale"))
    results = [writing.call(call.node, operator.getitem, node, i) for i in range(len(node.meta["val"]))]
    for old in call.node.users:
        if (i := index(old)) == 0 or call.is_backward:
            old.replace_all_uses_with(restrided(results[i], old.meta["val"], writing.call))
    return results


def index(result: fx.Node) -> int:
    """Which of an operation's results it is."""
    return result.args[1]  # type: ignore[return-value]


def erase(node: fx.Node) -> None:
    """The node, and all that is made of it: its results, which nobody else reads."""
    for user in [*node.users]:
        erase(user)
    node.graph.erase_node(node)
