"""The job in DuckDB: one COPY."""

from __future__ import annotations

from pathlib import Path

import duckdb
from job import MAX_WORDS, MIN_WORDS

from engines import Work

_WORDS = r"len(list_filter(string_split(translate(text, e'\n\t\r', '   '), ' '), lambda word: word <> ''))"


def vector(source: Path, output: Path) -> Work:
    query = f"""
        COPY (
            SELECT * FROM (
                SELECT id, lower(text) AS text, lang, score, {_WORDS} AS words
                FROM read_json('{source}', format = 'newline_delimited')
            ) WHERE words BETWEEN {MIN_WORDS} AND {MAX_WORDS}
        ) TO '{output}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)
    """
    connection = duckdb.connect()
    return lambda: connection.execute(query)
