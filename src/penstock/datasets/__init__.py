"""A competition's tables as samples: specs, metadata with metrics, folds, the registry, and datasets. Door 001.

    CSV -> pa.Table -> folds (train rows | val rows) -> text by a template -> token ids -> samples, or columns whole

    what the data is      base.py, metadata.py      found out from the files: inference.py
    what there is         registry.py, discovery.py
    rows                  reading.py, folds.py, tabular.py, titanic.py, house_prices.py, generated.py
    what comes of it      metrics.py, submission.py

Names are imported when they are first used.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
