"""Where the project lives: one constant, and what is made of it. Without an address no link is printed or written."""

from __future__ import annotations

ADDRESS = ""
"""The repository's address on the web, "https://HOST/OWNER/NAME"; empty until it has one."""

PAGES = {
    "Homepage": "",
    "Documentation": "/tree/main/docs",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Security": "/security/policy",
}
"""The rows of [project.urls] in pyproject.toml, and where each lies below the address."""


def urls(address: str = ADDRESS) -> dict[str, str]:
    """[project.urls], which a test compares; empty without an address."""
    return {name: f"{address}{page}" for name, page in PAGES.items()} if address else {}


def at(page: str, address: str = ADDRESS) -> str:
    """ " at https://..." for a sentence that names a row of PAGES; empty without an address."""
    return f" at {urls(address)[page]}" if address else ""
