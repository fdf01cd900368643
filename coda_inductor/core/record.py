"""What Region and Sweep have in common: a record is its text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import Any


class Record:
    """Mixed into a frozen dataclass of numbers, names and more such records."""

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal text, equal kernel."""
        fields: Any = self
        return json.dumps(dataclasses.asdict(fields), separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Names the content: 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
