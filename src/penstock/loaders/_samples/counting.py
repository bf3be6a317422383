"""What the loss of a batch is divided by: the rows of its step, or the labels that the step has on all ranks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.distributed.ranks import Rank
from penstock.errors import DataError
from penstock.loaders._samples.assembly import Form, count_labels
from penstock.loaders._samples.columns import Columns
from penstock.loaders._samples.kinds import IGNORE
from penstock.loaders._samples.micro import Micro
from penstock.loaders._samples.origins import Origin
from penstock.order.plan import Step

__all__ = ["LabelCounts"]

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]


class LabelCounts:
    """How many labels steps have."""

    def __init__(self, origin: Origin, form: Form, rank: Rank) -> None:
        self._origin, self._form, self._rank = origin, form, rank
        self._last: tuple[Step, int] | None = None
        self._told = False

    def counts_step(self, micro: Micro) -> bool:
        """Whether it has to be counted how many labels the other batches of its step have."""
        return self._is_part(micro) and (self._form.corruption is not None or self._origin.labels_by_token)

    def _is_part(self, micro: Micro) -> bool:
        """Whether its step has other batches, here or on other ranks."""
        return self._rank.world > 1 or micro.count > 1

    def by_token(self, step: Step, columns: Columns, at: Ints) -> int:
        """Tokens with a label of a step whose samples are rows `at` of the columns."""
        held = self._last
        if held is None or held[0] is not step:
            rows = step.samples.rows
            labels = count_labels(columns, at, rows, step.epoch, self._form) if len(rows) else 0
            held = self._last = step, labels
        return held[1]

    def by_row(self, micro: Micro, ignored: npt.NDArray[np.bool_], at: Ints | None) -> int:
        """Rows of a step whose label is to be learned.

        `at`: where the samples of the batch are among those that were fetched; None: all of the dataset are known.
        """
        rows = micro.step.samples.rows
        if at is None:
            return len(rows) - int(np.count_nonzero(ignored[rows]))
        left_out = ignored[at]
        if self._is_part(micro) and left_out.any():
            row = int(micro.mine[np.argmax(left_out)])
            raise DataError(
                f"labels of row {row} is {IGNORE}, which is not to be learned, and how many such rows the other "
                f"batches of step {micro.step.number} have is not known where samples are fetched one by one; drop "
                "such rows (or the labels, if none is needed), or pass the samples as a list or as columns",
                row=row,
            )
        return len(rows) - int(np.count_nonzero(left_out))

    def tell_none(self, micro: Micro) -> None:
        """A step without a label: an error where the labels are made here, else they may not be meant for learning."""
        rows = micro.step.samples.rows
        some = ", ".join(map(str, rows[:8].tolist())) + (", ..." if len(rows) > 8 else "")
        if self._form.corruption is not None:
            raise DataError(
                f"step {micro.step.number} (rows {some}) has no token that could be hidden, so its loss would be "
                "divided by 0; drop rows of special tokens only (loader.edit(loader.plan.ban(rows))), or use larger "
                "batches",
                row=int(rows[0]),
            )
        if not self._told:
            self._told = True
            logger.warning(
                "step %d (rows %s) has no label but %d: its num_items_in_batch is 0, and a loss divided by that is NaN",
                micro.step.number,
                some,
                IGNORE,
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}
