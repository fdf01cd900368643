"""The Regions of 8-bit matrices of the package's cases."""

from __future__ import annotations

from coda_inductor.codegen.cases_of_8_bits import COLUMNS as COLUMNS
from coda_inductor.codegen.cases_of_8_bits import EIGHT_BITS as EIGHT_BITS
from coda_inductor.codegen.cases_of_8_bits import ROWS as ROWS
from coda_inductor.codegen.cases_of_8_bits import scaled as scaled
from coda_inductor.codegen.cases_of_8_bits import scaled_norm_backward as scaled_norm_backward
from coda_inductor.codegen.cases_of_8_bits import scaled_swiglu as scaled_swiglu
from coda_inductor.codegen.cases_of_8_bits import scaled_swiglu_backward as scaled_swiglu_backward
