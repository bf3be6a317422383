"""Templates in a file: YAML or JSON that a person can read and change.

templates:
  - kind: sentence
    name: titanic_v1
    version: "2"
    text: "{Name} was a {Sex} passenger[ aged {Age}]."
    columns:
      Age: {unit: years, decimals: 0}
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError
from penstock.files.atomic import write_atomic
from penstock.files.documents import read_document
from penstock.templates.base_template import BaseTemplate
from penstock.templates.jinja import JinjaTemplate
from penstock.templates.sentences import SentenceTemplate
from penstock.templates.styles import STYLES, StyleTemplate

__all__ = ["make_template", "read_templates", "write_templates"]

KINDS: Mapping[str, Callable[..., BaseTemplate]] = {"sentence": SentenceTemplate, "jinja": JinjaTemplate, **STYLES}


def make_template(keys: Mapping[str, Any]) -> BaseTemplate:
    """A template from the keys that a file has for it."""
    if not isinstance(keys, Mapping) or "kind" not in keys:
        raise ConfigError(f"a template has keys, such as 'kind: sentence', got {keys!r:.80}")
    kind = keys["kind"]
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS) or f"; the kinds are {', '.join(KINDS)}"
        raise ConfigError(f"unknown kind of template {kind!r}{hint}")
    options = {key: value for key, value in keys.items() if key != "kind"}
    known = _options(KINDS[kind])
    for key in options:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; the keys are {', '.join(known)}"
            raise ConfigError(f"template {keys.get('name')!r}: unknown key {key!r}{hint}")
    if "version" in options:
        options["version"] = str(options["version"])  # 1 and 1.2 are numbers in YAML
    try:
        return KINDS[kind](**options)
    except TypeError as error:
        raise ConfigError(f"template {keys.get('name')!r} of kind {kind!r}: {error}") from error


def template_keys(template: BaseTemplate) -> dict[str, Any]:
    """What a file has for a template: the other way round."""
    kind = next((kind for kind, made in KINDS.items() if made is type(template)), None)
    if kind is None:
        raise ConfigError(f"{template!r} is of a class of its own, which a file cannot hold; register it in code")
    rules = {key: value for key, value in template.rules().items() if value not in (None, [], {})}
    return {"kind": kind, "name": template.name, "version": template.version, **rules}


def read_templates(path: Path) -> list[BaseTemplate]:
    """The templates of a file, in its order."""
    document = read_document(path, such_as="templates: [...]")
    strange = [key for key in document if key != "templates"]
    if strange or not isinstance(document.get("templates"), list):
        raise ConfigError(f"{path} must have one key, 'templates', with a list; it has {list(document)}")
    found = []
    for number, keys in enumerate(document["templates"]):
        try:
            found.append(make_template(keys))
        except ConfigError as error:
            raise ConfigError(f"{path}, template {number}: {error}") from error
    return found


def write_templates(path: Path, templates: Sequence[BaseTemplate]) -> None:
    """Put templates in a file: JSON if it is called so, YAML otherwise."""
    document = {"templates": [template_keys(template) for template in templates]}
    if path.suffix.lower() == ".json":
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    else:
        text = yaml.safe_dump(document, allow_unicode=True, sort_keys=False, width=120)
    write_atomic(path, text.encode())


def _options(kind: Callable[..., BaseTemplate]) -> list[str]:
    """The options of a class; those it passes on are the ones that all styles have."""
    parameters = dict(inspect.signature(kind).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = parameters | dict(inspect.signature(StyleTemplate).parameters)
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
