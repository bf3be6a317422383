"""Datasets of competitions: specs, a registry, folds, samples, metrics and submissions. Door 001.

    CSV -> pa.Table -> folds (train rows | val rows) -> text by a template -> token ids -> samples, or whole columns

    description    spec.py, metadata.py, spec_file.py; inferred from files: inference.py, guesses.py
    registry       registry.py, registry_entries.py, discovery.py
    rows           tables.py, column_types.py, dates.py, rows.py, folds.py
    datasets       base.py, tabular.py, text_encoder.py, titanic.py, house_prices.py, sample_data.py
    results        labels.py, predictions.py, metrics.py, metric_functions.py, submission.py

Names are imported when they are first used.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
