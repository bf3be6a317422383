"""The values of one column as JSON: numbers and truth values as such, whatever a rule turned into words as text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.templates.arrays import TEXT, is_text, join
from penstock.templates.saying import Sayer
from penstock.templates.values import json_text

__all__ = ["JsonSayer"]

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_TO_ESCAPE = r'["\\\x00-\x1f]'


class JsonSayer(Sayer):
    """As `Sayer`, but each text is a JSON value. Infinity, which JSON lacks, is the text "inf"."""

    def _text(self, value: Any) -> str:
        rules = self.rules
        worded = bool(rules.categories or rules.prefix or rules.unit)
        if not worded:
            if isinstance(value, bool) and self._usual_truth():
                return "true" if value else "false"
            if isinstance(value, (list, tuple, dict)):
                return json_text(value)
        text = super()._text(value)
        number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
        if number and not worded and not rules.thousands and _NUMBER.fullmatch(text):
            return text
        return json_text(text)

    def _said_missing(self) -> str:
        return "null" if self.rules.missing_text is None else json_text(self.rules.missing_text)

    def _usual_truth(self) -> bool:
        return self.rules.true_text is None and self.rules.false_text is None

    def _quickly(self, values: pa.Array) -> pa.Array | None:
        kind = values.type
        if pa.types.is_null(kind):
            return pa.nulls(len(values), TEXT)
        if self._dressed or not self._as_is or (pa.types.is_boolean(kind) and not self._usual_truth()):
            return None
        if pa.types.is_boolean(kind):
            return pc.cast(values, TEXT)
        texts = super()._quickly(values)
        if texts is None:
            return None
        if is_text(kind):
            return _quoted(texts)
        if pa.types.is_floating(kind):
            infinite = pc.is_inf(values)
            if pc.any(infinite).as_py():
                return pc.if_else(infinite, join('"', texts, '"'), texts)
        return texts


def _quoted(texts: pa.Array) -> pa.Array:
    quoted = join('"', texts, '"')
    special = pc.fill_null(pc.match_substring_regex(texts, _TO_ESCAPE), False)
    if not pc.any(special).as_py():
        return quoted
    return pc.replace_with_mask(quoted, special, pa.array(map(json_text, texts.filter(special).to_pylist()), TEXT))
