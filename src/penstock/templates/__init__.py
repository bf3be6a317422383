"""Tables to text: door 001.

    frame, Arrow table, rows or path -> as_table -> template -> one text for each row

    columns      unit, digits, categories and missing values of a column        columns.py, values.py
    templates    a written sentence, Jinja, or a style over the columns         sentences.py, converters.py
    few-shot     labelled examples before each row                              few_shot.py
    doors        TabularTextConverter, TextTemplateEngine                       converters.py, engine.py

Names are imported on first use.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
