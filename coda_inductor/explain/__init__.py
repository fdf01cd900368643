"""What coda-inductor does to a model, without a GPU: `explain` returns facts, `render` their text."""

from coda_inductor.explain.facts import explain, explain_graph, render

__all__ = ["explain", "explain_graph", "render"]
