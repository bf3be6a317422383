"""`TextTemplateEngine`: templates by name and version, and their YAML or JSON files.

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
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from penstock._suggest import check_options, did_you_mean
from penstock.errors import ConfigError
from penstock.files.atomic import write_atomic
from penstock.files.documents import read_document
from penstock.files.filesystems import require_local
from penstock.files.remote import fetched_path
from penstock.templates.base_template import BaseTemplate, version_text
from penstock.templates.converters import STYLES, StyleTemplate
from penstock.templates.frames import MixedTypes, as_table
from penstock.templates.sentences import JinjaTemplate, SentenceTemplate

KINDS: Mapping[str, Callable[..., BaseTemplate]] = {"sentence": SentenceTemplate, "jinja": JinjaTemplate, **STYLES}


def make_template(keys: Mapping[str, Any]) -> BaseTemplate:
    """Template of an entry in a file."""
    if not isinstance(keys, Mapping) or "kind" not in keys:
        raise ConfigError(f"an entry has keys such as 'kind: sentence', got {keys!r:.80}")
    kind = keys["kind"]
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS) or f"; the kinds are {', '.join(KINDS)}"
        raise ConfigError(f"unknown kind of template {kind!r}{hint}")
    options = {key: value for key, value in keys.items() if key != "kind"}
    known = _options(KINDS[kind])
    check_options(options, known, "key", where=f"template {keys.get('name')!r}")
    if "version" in options:
        options["version"] = str(options["version"])  # 1 and 1.2 are numbers in YAML
    try:
        return KINDS[kind](**options)
    except TypeError as error:
        raise ConfigError(f"template {keys.get('name')!r} of kind {kind!r}: {error}") from error


def template_keys(template: BaseTemplate) -> dict[str, Any]:
    """Entry of a template in a file; inverse of `make_template`."""
    kind = next((kind for kind, made in KINDS.items() if made is type(template)), None)
    if kind is None:
        raise ConfigError(f"{template!r} is of a user's class, which a file cannot contain; register it in code")
    rules = {key: value for key, value in template.rules().items() if value not in (None, [], {})}
    return {"kind": kind, "name": template.name, "version": template.version, **rules}


def read_templates(path: Path) -> list[BaseTemplate]:
    """Templates of a file, in its order."""
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
    """Write templates to a file: JSON by its suffix, else YAML."""
    document = {"templates": [template_keys(template) for template in templates]}
    if path.suffix.lower() == ".json":
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    else:
        text = yaml.safe_dump(document, allow_unicode=True, sort_keys=False, width=120)
    write_atomic(path, text.encode())


def _options(kind: Callable[..., BaseTemplate]) -> list[str]:
    """Options of a class, with those of all styles if it passes them on."""
    parameters = dict(inspect.signature(kind).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = parameters | dict(inspect.signature(StyleTemplate).parameters)
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]


class TextTemplateEngine:
    """Set of templates.

        engine = TextTemplateEngine()
        engine.register_template(SentenceTemplate("titanic_v1", "{Name} was a {Sex} passenger[ aged {Age}]."))
        texts = engine.convert_data(data=df, template_name="titanic_v1")

    The styles natural, key_value, markdown, json and list are registered. The default `version` is the latest: "10"
    comes after "9", and "1.2" after "1.1".
    """

    def __init__(self, templates: Iterable[BaseTemplate] = ()) -> None:
        self._templates: dict[str, dict[str, BaseTemplate]] = {}
        for template in (*(style() for style in STYLES.values()), *templates):
            self.register_template(template)

    def register_template(self, template: BaseTemplate, *, replace: bool = False) -> None:
        """Add a template. The same again is allowed; another of that name and version only with `replace`."""
        if not isinstance(template, BaseTemplate):
            raise ConfigError(f"expected a template, such as SentenceTemplate(...), got {type(template).__name__}")
        known = self._templates.setdefault(template.name, {})
        other = known.get(template.version)
        if other is not None and other != template and not replace:
            raise ConfigError(
                f"template {template.name!r} version {template.version!r} is registered with other content "
                f"({_difference(other, template)}); give it another version, or pass replace=True"
            )
        known[template.version] = template

    def get_template(self, name: str, version: str | int | None = None) -> BaseTemplate:
        """Template of a name; by default the latest version."""
        versions = self.versions(name)
        version = versions[-1] if version is None else version_text(version)
        if version not in versions:
            raise ConfigError(f"template {name!r} has no version {version!r}; it has {', '.join(map(repr, versions))}")
        return self._templates[name][version]

    def list_templates(self) -> list[str]:
        """Names, sorted."""
        return sorted(self._templates)

    def versions(self, name: str) -> list[str]:
        """Versions of a template, the latest last."""
        if name not in self._templates:
            hint = did_you_mean(str(name), self._templates) or f"; known: {', '.join(self.list_templates())}"
            raise ConfigError(f"unknown template {name!r}{hint}")
        return sorted(self._templates[name], key=_by_numbers)

    def convert_data(
        self, data: Any, template_name: str, version: str | int | None = None, *, mixed: MixedTypes = "error"
    ) -> list[str]:
        """Text of each row of a frame, an Arrow table, rows or a path; the columns are validated first."""
        return self.get_template(template_name, version).convert_batch(data, mixed=mixed)

    def convert_table(
        self, data: Any, template_name: str, version: str | int | None = None, *, mixed: MixedTypes = "error"
    ) -> pa.StringArray | pa.LargeStringArray:
        """The same as an Arrow array."""
        return self.get_template(template_name, version).convert_table(data, mixed=mixed)

    def validate(self, data: Any, template_name: str, version: str | int | None = None) -> None:
        """Validate a template against the columns of data, or against their names, without rendering."""
        names = isinstance(data, (list, tuple)) and all(isinstance(name, str) for name in data)
        columns = data if names or isinstance(data, pa.Schema) else as_table(data).schema
        self.get_template(template_name, version).validate(columns)

    def load_templates(self, path: str | os.PathLike[str], *, replace: bool = False) -> list[str]:
        """Register the templates of a YAML or JSON file; returns their names."""
        templates = read_templates(fetched_path(path))
        for template in templates:
            self.register_template(template, replace=replace)
        return [template.name for template in templates]

    def save_templates(self, path: str | os.PathLike[str]) -> None:
        """Write the registered templates, without the built-in styles, to a file for `load_templates`."""
        built_in = {style() for style in STYLES.values()}
        chosen = [
            self._templates[name][version]
            for name in self.list_templates()
            for version in self.versions(name)
            if self._templates[name][version] not in built_in
        ]
        write_templates(require_local(path, "the file of saved templates"), chosen)

    def __repr__(self) -> str:
        return f"TextTemplateEngine({', '.join(self.list_templates())})"


def _by_numbers(version: str) -> list[tuple[int, int, str]]:
    """Sort key of a version: numbers by value, words by letters."""
    parts = re.findall(r"\d+|[^\d.]+", version)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _difference(old: BaseTemplate, new: BaseTemplate) -> str:
    before, after = old.describe(), new.describe()
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            return f"{key} was {before.get(key)!r:.80}, is {after.get(key)!r:.80}"
    return "another class of template"
