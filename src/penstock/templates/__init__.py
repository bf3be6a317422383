"""Tables to text: door 001.

    frame, Arrow table, rows or path -> as_table -> template -> one text for each row

    columns      how a column is said: unit, digits, categories, missing values      columns.py, saying.py
    templates    a written sentence, or a style made from the columns                sentences.py, styles.py
    few-shot     labelled examples before each row                                   few_shot.py
    doors        TabularTextConverter, TextTemplateEngine                            converters.py, engine.py

Names are imported when they are first used.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
