"""Hand-written parts of the kernels that multiply warp by warp: those of device.py, one kernel after the other.

Imported by generated modules, so it imports the compiler. Its content is part of those modules' names.
"""

from __future__ import annotations

from coda_inductor.codegen.device import HalfStore as HalfStore
from coda_inductor.codegen.device import HalfVector as HalfVector
from coda_inductor.codegen.device import LaneStore as LaneStore
from coda_inductor.codegen.device import LaneVector as LaneVector
from coda_inductor.codegen.device import SampleVector as SampleVector
from coda_inductor.codegen.device import decorators

one_product, two_products, summed_products, unlike_products, neighbours = decorators()
