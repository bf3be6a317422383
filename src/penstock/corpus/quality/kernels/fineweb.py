"""FineWeb's rules on lines."""

from __future__ import annotations

import numpy as np

from penstock.corpus.quality.characters import TERMINAL
from penstock.corpus.quality.kernels.gopher import is_new, table_size
from penstock.corpus.quality.kernels.utf8 import Array, code_before, compiled, count_characters, skip_spaces

__all__ = ["fineweb_quality"]


@compiled
def fineweb_quality(data: Array, bounds: Array, firsts: Array, kinds: Array, limits: Array, accept_none: bool) -> Array:
    rows = len(bounds) - 1
    codes = np.zeros(rows, np.uint8)
    longest = 0
    for row in range(rows):
        newlines = 0
        for at in range(bounds[row], bounds[row + 1]):
            newlines += data[at] == 10
        longest = max(longest, newlines + 1)
    slots = np.empty(table_size(longest), np.int32)
    spans = np.empty((longest, 2), np.int64)
    for row in range(rows):
        begin, stop = bounds[row], bounds[row + 1]
        lines, newlines, finished, short, again, unique = 0, 0, 0, 0, 0, 0
        for at in range(begin, stop):
            newlines += data[at] == 10
        size = table_size(newlines + 1)
        slots[:size] = -1
        at = begin
        while at <= stop:
            last = at
            while last < stop and data[last] != 10:
                last += 1
            if skip_spaces(data, at, last, kinds) < last:
                lines += 1
                code, _ = code_before(data, at, last)
                finished += (kinds[code] & TERMINAL) != 0
                length = count_characters(data, at, last)
                short += length <= limits[2]
                if is_new(data, at, last, slots, size, spans, unique):
                    unique += 1
                else:
                    again += length
            at = last + 1
        if lines == 0:
            codes[row] = 1
        elif finished / lines < limits[0] and not (finished == 0 and accept_none):
            codes[row] = 2
        elif short / lines > limits[1]:
            codes[row] = 3
        elif again / (count_characters(data, begin, stop) - newlines) > limits[3]:
            codes[row] = 4
        elif newlines / (firsts[row + 1] - firsts[row]) > limits[4]:
            codes[row] = 5
    return codes
