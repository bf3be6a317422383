"""Arrays that wait in a file, where the budget has no room for them."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.files.atomic import naming

_ALIGNED = 64


class SpilledArrays:
    """Read-only arrays in a file without a name in the directory for temporary files, gone with the last of them."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        self._pages: mmap.mmap | None = None
        starts, end = [], 0
        with naming(tempfile.gettempdir()), tempfile.TemporaryFile(prefix="penstock-window-", buffering=0) as file:
            for array in arrays:
                starts.append(end)
                if array is not None and array.nbytes:
                    left = memoryview(np.ascontiguousarray(array)).cast("B")  # type: ignore[arg-type]
                    file.seek(end)
                    end += -(-left.nbytes // _ALIGNED) * _ALIGNED
                    while left:
                        left = left[file.write(left) :]
            if end:
                file.truncate(end)
                self._pages = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        self.arrays = [self._view(array, start) for array, start in zip(arrays, starts)]
        """The arrays that were given, in their order; None where none was."""

    def drop_pages(self) -> None:
        """Keep nothing of the file in the memory of this process: what was read stays there otherwise."""
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _view(self, array: npt.NDArray[Any] | None, start: int) -> Any:
        if array is None or not array.nbytes or self._pages is None:
            return array
        return np.frombuffer(self._pages, array.dtype, array.size, start)
