"""The part of a graph that is computed by blocks of rows: from a gradient of scores to all tensors as large as it.

It is found from the gradient D of scores [rows, vocabulary], both ways. Backwards: each operation that made D, as long
as its result is as large as D; smaller ones, as the targets, are inputs. Forwards: each reader of a large tensor. The
results are small: one number or vector a row, as D W, or a sum over all rows, as D^T x. An input that depends on one of
the results is computed by blocks, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from coda_inductor.ops.custom import REGION
from coda_inductor.patterns import graph as g
from coda_inductor.write import rows as by
from coda_inductor.write.linear import Degree, NotLinear, degree
from coda_inductor.write.rows import LIST, SUMMED, TURNED, WHOLE, Demands, Form, NotByRow, Rows, Spread


@dataclass(slots=True)
class ByRows:
    """What is computed by blocks: each node's form, and what is read of the rest of the graph."""

    gradient: fx.Node
    rows: int
    early: bool
    """In the forward, with the scores themselves."""
    forms: dict[fx.Node, Form] = field(default_factory=dict)
    inputs: Demands = field(default_factory=dict)
    once: set[fx.Node] = field(default_factory=set)
    """Numbers that are made of the loss's gradient before the blocks."""
    tangents: set[fx.Node] = field(default_factory=set)
    """Nodes that depend on gradients of results."""
    proportional: set[fx.Node] = field(default_factory=set)
    """What is to be multiplied by the loss's gradient, of what is computed early."""

    def need(self, node: fx.Node, form: Form) -> None:
        """The node, and what it reads, in this form. Raises NotByRow."""
        if node in self.forms or node in self.inputs:
            if self.forms.get(node, self.inputs.get(node)) != form:
                raise NotByRow(f"{node} is read in two ways")
        elif self.belongs(node, form):
            self.take(node, form)
        else:
            self.inputs[node] = form

    def take(self, node: fx.Node, form: Form) -> None:
        """The node is computed by blocks."""
        if self.inputs.pop(node, form) != form:
            raise NotByRow(f"{node} is read in two ways")
        self.forms[node] = form
        for source, demanded in by.demands(node, form, self.rows).items():
            self.need(source, demanded)

    def belongs(self, node: fx.Node, form: Form) -> bool:
        """Must it be computed by blocks? What is as large as the scores must; but not scores that stay whole."""
        if node.op != "call_function" or form is WHOLE or isinstance(form, Spread):
            return False
        if form in (LIST, TURNED) or not self.large(node):
            return form in (LIST, TURNED)
        return self.early or g.is_backward(node) or not self.product(node)

    def product(self, node: fx.Node) -> bool:
        """Is it a product's result, in memory?"""
        return node.target in g.PRODUCTS or any(n.target is REGION for n in node.all_input_nodes)

    def large(self, node: fx.Node) -> bool:
        """Is it of the scores' size, a half at least?"""
        value = g.tensor(node)
        return value is not None and 2 * value.numel() >= self.gradient.meta["val"].numel()

    def follow(self) -> None:
        """Takes in who reads what is never whole, and what lies between. Raises NotByRow."""
        self.take(self.gradient, Rows(by.lead(by.shape(self.gradient), self.rows)))
        before = -1
        while before != len(self.forms):
            before = len(self.forms)
            for node, form in list(self.forms.items()):
                if form in (LIST, TURNED) or (form is not SUMMED and self.large(node)):
                    self.readers(node, form)
            self.between()

    def readers(self, node: fx.Node, form: Form) -> None:
        """Takes in those of a node that is never whole."""
        for user in node.users:
            stays = not self.early and not g.is_backward(node) and not g.is_backward(user)
            if user in self.forms or stays:
                continue
            if user.op == "output":
                raise NotByRow(f"{node} is returned")
            self.take(user, by.form_of(user, node, form, self.rows))

    def between(self) -> None:
        """Takes in what is read and depends on what is made by blocks, or on the loss's gradient."""
        made = g.reached(self.forms, lambda n: n.users)
        late = self.tangents if self.early else set[fx.Node]()
        for node, form in list(self.inputs.items()):
            if isinstance(form, Rows) and (node in made or node in late):
                self.take(node, form)
            elif node in made or (node in late and form is not WHOLE):
                raise NotByRow(f"{node} is of all rows")
            elif node in late:
                self.once |= {n for n in g.reached([node], lambda n: n.all_input_nodes) if n in late}


def proportional(program: ByRows) -> set[fx.Node]:
    """What of all that is computed early is proportional to the gradient of the loss, the one number among the
    gradients that it depends on, if it depends on any. Raises NotLinear, NotByRow."""
    number = tangent(program)
    if not any(f is LIST or program.product(n) for n, f in program.forms.items() if not g.is_backward(n)):
        raise NotByRow("no scores are made here")
    if any(n.meta["val"].dtype == torch.float16 for n in program.forms if g.tensor(n) is not None):
        raise NotLinear("gradients of float16 may vanish unless they are multiplied by the loss's")
    found: dict[fx.Node, Degree | tuple[Degree, ...]] = {number: 1} if number else {}
    for node in program.gradient.graph.nodes:
        if node is not number and (node in program.once or node in program.forms):
            found[node] = degree(node, found)
    return {node for node, of in found.items() if of == 1}


def tangent(program: ByRows) -> fx.Node | None:
    """The gradient of the loss, None if nothing depends on it. Raises NotLinear."""
    found = [n for n in program.once if g.is_tangent(n)]
    if len(found) > 1 or (found and found[0].meta["val"].dim()):
        raise NotLinear("several gradients, or one that is no number")
    return found[0] if found else None
