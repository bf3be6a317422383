"""The rules of the filters on UTF-8 bytes, compiled by numba: for every row the number of the first rule it breaks.

Importing this package needs numba. Limits are float64; NaN switches a rule off, since nothing compares with it.
"""

from penstock.corpus.quality.kernels.c4 import c4_lines, row_sentences
from penstock.corpus.quality.kernels.fineweb import fineweb_quality
from penstock.corpus.quality.kernels.gopher import gopher_quality, gopher_repetition
from penstock.corpus.quality.kernels.words import split_rows

__all__ = ["c4_lines", "fineweb_quality", "gopher_quality", "gopher_repetition", "row_sentences", "split_rows"]
