"""What the pages quote of the command line, printed again.

    python docs/outputs.py            # names the quotations that are not what the command prints
    python docs/outputs.py --write    # writes what it prints into the pages

A quotation is a comment that holds the command, and the block of code below it. With " | TEXT" behind the command only
the paragraph is quoted that begins with TEXT. The commands run in this process, in the repository's root.

What `diff` prints are errors, whose digits are the machine's: of that a quotation need only have the words.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from coda_inductor.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
QUOTED = re.compile(r"(<!-- output: coda-inductor (?P<command>[^|\n]+?)(?: \| (?P<start>[^\n]+?))? -->\n)"
                    r"(?P<block>```[a-z]*\n(?:(?!```).*\n)*```\n)")  # fmt: skip


@functools.cache
def printed(command: str) -> str:
    """The standard output of `coda-inductor COMMAND`, places relative to the root."""
    said = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(said):
        status = main(command.split())
    if status:
        raise ValueError(f"coda-inductor {command} ended with status {status}")
    return said.getvalue().replace(f"{ROOT}{os.sep}", "")


def wanted(command: str, start: str | None) -> str:
    """The block of code that should be quoted. Raises ValueError if no paragraph begins with `start`."""
    text = printed(command).rstrip("\n")
    if start:
        paragraphs = [p for p in text.split("\n\n") if p.startswith(start)]
        if not paragraphs:
            raise ValueError(f"coda-inductor {command} prints no paragraph that begins with {start!r}")
        text = paragraphs[0].strip("\n")
    return f"```text\n{text}\n```\n"


def right(found: re.Match[str], block: str) -> bool:
    """Is what is quoted what should be?"""
    if found["command"].startswith("diff "):
        return words(found["block"]) == words(block)
    return found["block"] == block


def words(block: str) -> list[str]:
    """Its lines in any order, as numbers decide it, without their numbers and spaces."""
    return sorted(re.sub(r"\d+(\.\d+)?(e[+-]\d+)?|\s+", " ", line).strip() for line in block.splitlines())


def stale(text: str) -> Iterator[tuple[str, str, str]]:
    """(command, what is quoted, what should be) of each quotation of a page that is not right."""
    for found in QUOTED.finditer(text):
        block = wanted(found["command"], found["start"])
        if not right(found, block):
            yield found["command"], found["block"], block


def written(text: str) -> str:
    """The page with every quotation as it should be; one that is right stays as it is."""

    def mended(found: re.Match[str]) -> str:
        block = wanted(found["command"], found["start"])
        return found[1] + (found["block"] if right(found, block) else block)

    return QUOTED.sub(mended, text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for page in PAGES:
        before = page.read_text()
        for command, _, _ in stale(before):
            print(f"{page.relative_to(ROOT)}: coda-inductor {command}")
        if "--write" in sys.argv[1:]:
            page.write_text(written(before))
