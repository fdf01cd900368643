"""The plots of docs/plots, drawn by matplotlib.

Each SVG keeps its values as JSON in its description, so that a plot which is out of date is seen without matplotlib.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import page_values
from page_rows import RESULTS, ROOT, loses
from page_values import Values

PLOTS = ROOT / "docs" / "plots"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
GREY, RED = "#7a7f87", "#d1453b"
CARDS = {"H100": ("#2f81f7", "o"), "H200": ("#d9822b", "D")}
OTHER = ("#8957e5", "s")
TURNS = "x"
"""Colours that stand out on white and on GitHub's dark ground; for each card a colour and a marker."""

STYLE = {
    "svg.hashsalt": "coda-inductor", "font.size": 9, "text.color": GREY, "axes.labelcolor": GREY,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
WIDE = 8.33
"""Inches; an SVG of it is 800 pixels wide."""

APART, LEVEL = 0.0075, 0.085
"""How near two dots of a band may lie, in ratios, before one is moved by a level, in bands."""


LEFT, NEAR_RIGHT, RIGHT = 0.85, 1.2, 1.33
"""Where the axis of gains begins and ends, unless a row lies beyond; and from where on a name no longer fits to the
right of its dot."""


def style(card: str) -> tuple[str, str]:
    """Colour and marker of "H100", "2 x H200", ..."""
    return CARDS.get(card.split()[-1], OTHER)


def levels(ratios: Sequence[float]) -> list[float]:
    """For dots in order of their ratios, how far above or below their band's middle each lies, so that none overlap."""
    ends, found = dict[int, float](), []
    for ratio in ratios:
        level = next(n for i in range(99) for n in (i, -i) if ratio - ends.get(n, 0) >= APART)
        ends[level] = ratio
        found.append(level * LEVEL)
    return found


def named(point: Values) -> str:
    return f"{point['gain']:.3f}x {point['case']}{'' if point['alone'] else ', by turns'}"


def draw_gains(axes: Any, values: Values) -> None:
    """A dot for each row, in a band for each class, and a cross where it was timed by turns only. The greatest dot of
    a class is named, and so are all that lose."""
    every = [point["gain"] for points in values.values() for point in points]
    left, right = min([LEFT, *(gain - 0.02 for gain in every)]), max([RIGHT, *(gain + 0.02 for gain in every)])
    for band, points in enumerate(reversed(values.values())):
        points = sorted(points, key=lambda point: point["gain"])
        lost = [point for point in points if loses(point["gain"])]
        middle = band - 0.14 * max(0, len(lost) - 2)
        for point, level in zip(points, levels([p["gain"] for p in points]), strict=True):
            colour, marker = style(point["card"])
            if not point["alone"]:
                axes.scatter(point["gain"], middle + level, 26, color=colour, marker=TURNS, linewidths=1, zorder=3)
                continue
            face = "none" if loses(point["gain"]) else colour
            axes.scatter(point["gain"], middle + level, 26, facecolors=face, edgecolors=colour, marker=marker, zorder=3)
        for line, point in enumerate(lost):
            axes.text(left + 0.005, band + 0.38 - 0.15 * line, named(point), fontsize=8, va="center", color=RED)
        alone = [point for point in points if point["alone"]]
        if alone and not loses(best := alone[-1]["gain"]):
            room = best < NEAR_RIGHT
            place = (best + 0.01, middle - (0.22 if points[-1]["gain"] > best else 0)) if room else (best, band + 0.2)
            axes.text(*place, named(alone[-1]), fontsize=8, va="center", ha="left" if room else "right")
    axes.axvline(1.0, color=GREY, linewidth=1)
    for band in range(1, len(values)):
        axes.axhline(band - 0.5, color=GREY, linewidth=0.4, alpha=0.6)
    axes.set(xlim=(left, right), ylim=(-0.5, len(values) - 0.5), yticks=range(len(values)))
    axes.set_yticklabels([fill(name, 18) for name in reversed(values)])
    axes.set_xlabel("torch.compile's time / coda's, each side alone (hollow: coda is slower; cross: by turns only)")
    axes.tick_params(axis="y", length=0)
    legend(axes, sorted({point["card"].split()[-1] for points in values.values() for point in points}), "center right")


def draw_memory(axes: Any, values: Values) -> None:
    """A bar for each row: what the peak of a step changes by, in per cent."""
    rows = values["rows"]
    changes = [100 * (row["after"] / row["before"] - 1) for row in rows]
    for place, (row, change) in enumerate(zip(rows, changes, strict=True)):
        axes.barh(-place, change, 0.6, color=style(row["card"])[0], zorder=3)
        text = f"{row['before']:.2f} → {row['after']:.2f} GiB"
        axes.text(max(change, 0) + 1, -place, text, va="center", fontsize=8, color=RED if change > 0 else GREY)
    axes.axvline(0.0, color=GREY, linewidth=1)
    axes.set(
        yticks=[-place for place in range(len(rows))],
        xlim=(min([-52.0, *changes]), max([36.0, *(change + 22 for change in changes)])),
    )
    axes.set_yticklabels([row["case"] for row in rows], fontsize=8)
    axes.set_xlabel("change of the peak beside torch.compile's, %")
    legend(axes, sorted({row["card"].split()[-1] for row in rows}), "upper right")


def draw_width(axes: Any, values: Values) -> None:
    """A line for each kind of layer: gain by width."""
    looks = (("#2f81f7", "--"), ("#2f81f7", "-"), ("#d9822b", "--"), ("#d9822b", "-"))
    for (name, pairs), (colour, line) in zip(values.items(), looks, strict=True):
        axes.plot([str(d) for d, _ in pairs], [gain for _, gain in pairs], line, color=colour, marker="o", label=name)
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set(xlabel="width of the layer", ylabel="torch.compile's time over coda's, alone")
    axes.legend(frameon=False, labelcolor=GREY)


def legend(axes: Any, cards: Sequence[str], place: str = "lower right") -> None:
    """Each card's colour and marker."""
    for card in cards:
        colour, marker = style(card)
        axes.scatter([], [], 26, color=colour, marker=marker, label=card)
    axes.legend(frameon=False, labelcolor=GREY, loc=place)


DRAWN: dict[str, tuple[Callable[[Path], Values], Callable[[Any, Values], None], Callable[[Values], float]]] = {
    "gains": (page_values.gains, draw_gains, lambda values: 0.8 + 0.8 * len(values)),
    "memory": (page_values.memory, draw_memory, lambda values: 0.9 + 0.24 * len(values["rows"])),
    "width": (page_values.width, draw_width, lambda values: 3.2),
}
"""The plots: what their values are, what draws them, and how many inches high they are."""


def kept(path: Path) -> Values | None:
    """The values that an SVG was drawn from."""
    found = ElementTree.parse(path).getroot().find(f".//{DESCRIPTION}") if path.exists() else None
    return json.loads(found.text) if found is not None and found.text else None


def stale(results: Path = RESULTS, plots: Path = PLOTS) -> list[tuple[Path, str]]:
    """(path, what is wrong) for each plot that is missing or was drawn from other values."""
    found = []
    for name, (values, _, _) in DRAWN.items():
        path = plots / f"{name}.svg"
        was = kept(path)
        if was != values(results):
            found.append((path, "is missing" if was is None else "was drawn from other rows"))
    return found


def draw_all(results: Path = RESULTS, plots: Path = PLOTS) -> list[Path]:
    """Draws every plot; the same rows give the same bytes with the same matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    plots.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (values, draw, height) in DRAWN.items():
        found, path = values(results), plots / f"{name}.svg"
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDE, height(found)), layout="constrained")
            draw(figure.add_subplot(), found)
            said = {"Date": None, "Creator": None, "Title": f"coda-inductor: {name}", "Description": json.dumps(found)}
            figure.savefig(path, format="svg", transparent=True, metadata=said)
        paths.append(path)
    return paths
