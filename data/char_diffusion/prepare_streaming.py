"""Masked-character diffusion: rows of a text with some characters masked, and the masked characters as targets.

Run it with `python prepare.py config/train_char_diffusion.py`. A `Stage` says how many characters are masked, and how;
`stages` in the config is a list of them, one after the other during training, or drawn by weight.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.config import Setting
from penstock.errors import ConfigError, DataError
from penstock.fsqueue import DataProviderBase

from .masking import CHECKS, SETTINGS, Ids, Stage

__all__ = ["CharDiffusionProvider", "read_text"]

MASK_SIGN = "_"

_log = logging.getLogger(__name__)


class CharDiffusionProvider(DataProviderBase):
    """Rows of `block_size` characters: `x` with some masked, `y` those characters, and `ignore_index` elsewhere.

    The last `val_fraction` of the text is the split `val`; no row crosses the border. All of `val` has the same stage,
    so that its losses can be compared: the last one, or one drawn by weight.
    """

    settings: ClassVar[Mapping[str, Setting]] = {
        **SETTINGS,
        "ignore_index": Setting(int, -100, text="value of y where nothing is predicted"),
        "input_file": Setting(str, "input.txt", text="the text, in the directory of the dataset"),
        "val_fraction": Setting(
            float, 0.1, check=lambda share: 0 < share < 1, text="share of the text, at its end, for val"
        ),
    }

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.text = read_text(self.data_dir / self.config["input_file"])
        points = np.frombuffer(self.text.encode("utf-32-le"), dtype="<u4")
        letters, ids = np.unique(points, return_inverse=True)
        self.chars = "".join(map(chr, letters.tolist()))
        self.mask_token_id = len(letters)
        self.vocab_size = len(letters) + 1
        self.ignore_index: int = self.config["ignore_index"]
        self.stages = self._make_stages()
        cut = len(ids) - int(len(ids) * self.config["val_fraction"])
        self.ids = {"train": ids[:cut].astype(np.int32), "val": ids[cut:].astype(np.int32)}
        self._check()

    def build_meta(self) -> dict[str, Any]:
        return {
            "training_type": "MLM",
            "vocab_size": self.vocab_size,
            "mask_token_id": self.mask_token_id,
            "ignore_index": self.ignore_index,
            "block_size": self.block_size,
            "chars": self.chars,
            "characters": {split: len(ids) for split, ids in self.ids.items()},
            "source": {"file": self.config["input_file"], "xxh3": xxhash.xxh3_128_hexdigest(self.text.encode("utf-8"))},
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
            ],
        }

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Ids]:
        stage = self.stage_of(split, rng)
        rows = np.lib.stride_tricks.sliding_window_view(self.ids[split], self.block_size)
        ids = rows[rng.integers(0, len(rows), size=self.batch_size)].astype(np.int64)
        seen, hidden = stage.hide(ids, rng, self.mask_token_id)
        return {"x": seen, "y": np.where(hidden, ids, self.ignore_index)}

    def stage_of(self, split: str, rng: np.random.Generator) -> Stage:
        """Stage of batch `self.batch_index`, which depends on the split, the number and the seed."""
        bounds = np.cumsum([stage.weight for stage in self.stages if stage.weight is not None])
        if len(bounds):
            return self.stages[int(np.searchsorted(bounds[:-1], rng.random() * bounds[-1], side="right"))]
        if split != "train":
            return self.stages[-1]
        return next(stage for stage in self.stages if stage.until is None or self.batch_index < stage.until)

    def decode(self, ids: npt.ArrayLike, mask: str = MASK_SIGN) -> str:
        """Characters of one row of `x` or `y`; `mask` for masked and ignored ones."""
        row = np.asarray(ids)
        if not row.size:
            return ""
        row = np.where(row == self.ignore_index, self.mask_token_id, row)
        if not 0 <= row.min() <= row.max() < self.vocab_size:
            raise DataError(f"ids must be in [0, {self.vocab_size}), got {int(row.min())} to {int(row.max())}")
        return "".join(np.array([*self.chars, mask])[row])

    def _make_stages(self) -> list[Stage]:
        """Stages of the config; settings that a stage leaves out are those of the config."""
        common = {name: self.config[name] for name in CHECKS}
        return [Stage(**{**common, **stage}) for stage in self.config["stages"] or [{}]]

    def _check(self) -> None:
        """Check settings, stages and text together; reports all problems at once."""
        problems = [
            f"the split {split!r} of {self.config['input_file']} has {len(ids)} characters, a row takes block_size="
            f"{self.block_size}; give it more text or set a smaller block_size"
            for split, ids in self.ids.items()
            if len(ids) < self.block_size
        ]
        if others := [split for split in self.proportions if split not in self.ids]:
            problems.append(f"split_proportions has {others}; the text is cut into 'train' and 'val' alone")
        if 0 <= self.ignore_index < self.vocab_size:
            problems.append(
                f"ignore_index={self.ignore_index} is the id of a character; use a negative one such as -100"
            )
        for number, stage in enumerate(self.stages):
            if stage.mask_keep + stage.mask_random > 1:
                shares = f"mask_keep={stage.mask_keep} and mask_random={stage.mask_random}"
                problems.append(f"stage {number}: {shares} are shares of the same characters and must not exceed 1")
            if stage.mask_span > self.block_size:
                problems.append(
                    f"stage {number}: mask_span={stage.mask_span} is longer than a row of {self.block_size}"
                )
        if problems:
            raise ConfigError("\n".join(problems))


def read_text(path: Path) -> str:
    """Text of a UTF-8 file, without a byte order mark, and with `\\n` as the end of every line."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        reason = f"the text cannot be read ({error.strerror}); put it there, or name another in input_file"
        raise DataError(reason, file=str(path)) from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: {error.reason}; save the text as UTF-8"
        raise DataError(reason, file=str(path), offset=error.start) from None
    marked, returns = text.startswith("\ufeff"), text.count("\r")
    if marked or returns:
        _log.warning("%s: byte order mark left out: %s, line ends made \\n: %d", path, marked, returns)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
