"""Graphs that look for trouble: sizes that coincide, values needed twice, layouts that do not fit, opaque operations.

Whatever becomes of one, it computes what eager computes. random_programs.py continues the table without an end.
"""

from __future__ import annotations

from odd_layouts import LAYOUTS
from odd_norms import NORMS
from odd_products import PRODUCTS
from odd_values import VALUES
from program_table import Table

ODD: Table = PRODUCTS | NORMS | LAYOUTS | VALUES
