"""Tables to text: door 001.

    frame, Arrow table, rows or path -> as_table -> template -> one text for each row

    columns      how a column is said: unit, digits, categories, missing values      columns.py, saying.py
    templates    a written sentence, or a style made from the columns                sentences.py, styles.py
    few-shot     labelled examples before each row                                   few_shot.py
    doors        TabularTextConverter, TextTemplateEngine                            converters.py, engine.py

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.templates.base_template import BaseTemplate
    from penstock.templates.columns import ColumnFormat
    from penstock.templates.converters import TabularTextConverter
    from penstock.templates.engine import TextTemplateEngine
    from penstock.templates.few_shot import FewShot
    from penstock.templates.frames import as_row, as_table
    from penstock.templates.jinja import JinjaTemplate
    from penstock.templates.sentences import SentenceTemplate
    from penstock.templates.styles import (
        JsonTemplate,
        KeyValueTemplate,
        ListTemplate,
        MarkdownTemplate,
        NaturalTemplate,
    )

__all__ = [
    "BaseTemplate",
    "ColumnFormat",
    "FewShot",
    "JinjaTemplate",
    "JsonTemplate",
    "KeyValueTemplate",
    "ListTemplate",
    "MarkdownTemplate",
    "NaturalTemplate",
    "SentenceTemplate",
    "TabularTextConverter",
    "TextTemplateEngine",
    "as_row",
    "as_table",
]

__getattr__ = lazy(
    __name__,
    {
        "BaseTemplate": "penstock.templates.base_template",
        "ColumnFormat": "penstock.templates.columns",
        "FewShot": "penstock.templates.few_shot",
        "JinjaTemplate": "penstock.templates.jinja",
        "JsonTemplate": "penstock.templates.styles",
        "KeyValueTemplate": "penstock.templates.styles",
        "ListTemplate": "penstock.templates.styles",
        "MarkdownTemplate": "penstock.templates.styles",
        "NaturalTemplate": "penstock.templates.styles",
        "SentenceTemplate": "penstock.templates.sentences",
        "TabularTextConverter": "penstock.templates.converters",
        "TextTemplateEngine": "penstock.templates.engine",
        "as_row": "penstock.templates.frames",
        "as_table": "penstock.templates.frames",
    },
)
