"""docs/models.md, as text: the rows of `coverage.py` as a table, and what is summed up of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

Row = dict[str, Any]

KEPT_LIMIT = 1.02
"""How many times what Inductor keeps for the backward may be kept before a run is counted as one that keeps more."""

INTRODUCTION = """# Models, counted on their graphs

What coda-inductor makes of models of transformers, diffusers and timm at their published widths. Each has two layers,
or two of each kind. (Swin has two blocks in each stage, ConvNeXt one or two, Stable Diffusion 3.5 three in all.) So
embeddings, heads and losses weigh more than at full depth. Weights are in bfloat16, or in float32 where the name says
autocast. Dropout is off where the name does not say it. Attention is what each package takes by default.
Decoders and encoders read 8192 tokens. Flux has one image of 4096 tokens, Stable Diffusion 3.5 and PixArt two,
Wan one video of 8100, DiT 32 images of 256 tokens. All inputs stand in `bench/coverage_zoo.py`.

These are counts, not times, and no GPU is needed. `explain` traces each model as CUDA would and derives its Regions for
`sm_90a`. Every legal Region is kept; a compile on a GPU leaves those that lose to Inductor. In training a model with a
head is traced with its loss, any other with the sum of its first output.

- **coverage**: the share of the bytes of `torch.compile`'s memory-bound kernels that no kernel outside a Region moves
  any more. Copies and masks that attention [does not read any more](numerics.md#attention) are among them, and copies
  of tensors that are written in parts. Matrix products and attention are not memory-bound kernels. It is no speed:
  times the share of such kernels in a step it [tells how much can be gained](explain.md#explain).
- **kernels**: the memory-bound kernels, first `torch.compile`'s and then those that are left.
- **passes left**: those that still go over a whole tensor of tokens by features, for each layer. Those of embeddings,
  heads and losses are among them.
- **bytes**: what the memory-bound kernels move, first `torch.compile`'s and then ours. Ours include what epilogues read
  and write beside the outputs of their products.
- **kept**: what the forward keeps for the backward, first by Inductor and then by ours.
- **s**: the seconds that tracing and deriving took.

A star marks the dense transformers, over which the means below the table are taken. A number in bold is worse than
`torch.compile`'s: more bytes moved, or more than 1.02 times the bytes kept.
"""

HEAD = (
    "| family | model | | coverage | kernels | passes left | bytes, GB | kept, GB | s |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)
MODES = {"infer": "inference", "train": "training"}


def rendered(rows: Sequence[Row]) -> str:
    """The page: introduction, how to make it again, table by family, and the sums."""
    by_family = sorted(rows, key=lambda row: row["family"])  # the order of the rows within a family stays
    table = [*HEAD, *map(line, by_family)]
    return "\n".join([INTRODUCTION, *made_by(rows), "", *table, "", *summary(rows)]) + "\n"


def made_by(rows: Iterable[Row]) -> list[str]:
    """The command, and the versions and commits of the rows."""
    packages = dict.fromkeys(f"{name} {number}" for row in rows for name, number in row["versions"].items())
    commits = dict.fromkeys(row["commit"] for row in rows)
    return [
        "    python bench/coverage.py --out bench/results/coverage.jsonl --write docs/models.md",
        "",
        f"Counted at {', '.join(commits)}, with:",
        f"{', '.join(packages)}.",
        "",
        "All rows are in [coverage.jsonl](../bench/results/coverage.jsonl), with the main reasons for what is left.",
    ]


def line(row: Row) -> str:
    """A row of the table, or what stands in its place."""
    name = f"| {row['family']} | {row['model']}{' *' if row['dense'] else ''} | {MODES[row['mode']]} |"
    if not is_counted(row):
        why = f"error: {row['error']}" if "error" in row else f"skipped: {row['skipped']}"
        return f"{name} {why.replace('|', '/')} | | | | | |"
    moved, kept = pair(row["bytes_before"], row["bytes_after"], moves_more(row)), ""
    if row["saved_bytes_inductor"]:
        kept = pair(row["saved_bytes_inductor"], row["saved_bytes"], keeps_more(row))
    return (
        f"{name} {row['coverage']:.3f} | {row['kernels_before']} → {row['kernels_after']} |"
        f" {row['passes_left_per_layer']:.1f} | {moved} | {kept} | {row['seconds']:.0f} |"
    )


def pair(before: int, after: int, worse: bool) -> str:
    """Two numbers of bytes, in GB."""
    mark = "**" if worse else ""
    return f"{before / 1e9:.2f} → {mark}{after / 1e9:.2f}{mark}"


def is_counted(row: Row) -> bool:
    return "error" not in row and "skipped" not in row


def moves_more(row: Row) -> bool:
    return bool(row["bytes_after"] > row["bytes_before"])


def keeps_more(row: Row) -> bool:
    return bool(row["saved_bytes"] > KEPT_LIMIT * row["saved_bytes_inductor"])


def summary(rows: Sequence[Row]) -> list[str]:
    """The means over the dense transformers, and the runs that look bad, by name."""
    counted = [row for row in rows if is_counted(row)]
    lines = []
    for mode, word in MODES.items():
        dense = [row["coverage"] for row in counted if row["dense"] and row["mode"] == mode]
        if dense:
            lines.append(f"- Mean coverage of {word} over the {len(dense)} dense transformers: {mean(dense):.3f}.")
    kept = [row for row in counted if row["saved_bytes_inductor"]]
    more, keep = list(filter(moves_more, counted)), list(filter(keeps_more, kept))
    lines += named(f"- Of {len(counted)} runs {len(more)} move more bytes than before", more)
    lines += named(
        f"- Of {len(kept)} training runs {len(keep)} keep more than {KEPT_LIMIT} times Inductor's bytes", keep
    )
    for key, what in (("error", "ended with an error"), ("skipped", "were skipped")):
        if missed := [row for row in rows if key in row]:
            lines += named(f"- Of {len(rows)} runs {len(missed)} {what}", missed)
    return [filled(line) for line in lines]


def filled(line: str) -> str:
    """An item of a list in lines of at most 120 characters."""
    indent = "  " if line.startswith("-") else "    "
    return textwrap.fill(line, 120, subsequent_indent=indent, break_on_hyphens=False)


def named(line: str, rows: Sequence[Row]) -> list[str]:
    """The line, and below it for each family "  - decoder: llama (training), ..."."""
    families: dict[str, list[str]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(f"{row['model']} ({MODES[row['mode']]})")
    return [line + (":" if rows else "."), *(f"  - {family}: {', '.join(names)}" for family, names in families.items())]
