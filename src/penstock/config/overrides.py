"""`--name=value` on the command line: values that win over those of the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from penstock._suggest import did_you_mean
from penstock.config.kinds import Misfit, from_text, kind_of
from penstock.config.settings import Setting
from penstock.config.values import NotPlain, freeze

__all__ = ["Overrides", "split_overrides"]


def split_overrides(arguments: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The text given for every name, and what is wrong with the arguments. `--batch-size=8` is `batch_size` too."""
    found: dict[str, str] = {}
    problems = []
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.strip().replace("-", "_")
        if not argument.startswith("--") or not name.isidentifier() or name.startswith("_"):
            problems.append(f"{argument!r} is no override; write --name=value")
        elif not equals:
            problems.append(f"{argument!r} has no value; write --{name}=value, in one word")
        elif name in found:
            problems.append(f"--{name} is given twice, as {found[name]!r} and {text!r}; give it once")
        else:
            found[name] = text
    return found, problems


class Overrides:
    """The values for one run of a file, put in wherever the file sets their names.

    So what the file works out from such a name (`lr_decay_iters = max_iters`) follows the override. The kind of the
    value is that of the setting, if there is one of that name, or else that of the value in the file.
    """

    def __init__(self, arguments: Iterable[str], settings: Mapping[str, Setting]) -> None:
        self._texts, self.problems = split_overrides(arguments)
        self._settings = settings
        self._values: dict[str, Any] = {}

    def apply(self, namespace: dict[str, Any]) -> None:
        """After a statement of the file: what it has set is set again."""
        for name, text in self._texts.items():
            if name in namespace and not (name in self._values and namespace[name] is self._values[name]):
                namespace[name] = self._value(name, text, namespace[name])

    def finish(self, namespace: dict[str, Any]) -> None:
        """After the file: what it does not set, if a setting of that name exists."""
        names = [name for name in namespace if not name.startswith("_")]
        for name, text in self._texts.items():
            if name in self._settings:
                namespace[name] = self._value(name, text, None)
            elif name not in self._values:
                hint = did_you_mean(name, [*self._settings, *names])
                self.problems.append(f"--{name}={text}: no such setting, here or in the file{hint}")

    def _value(self, name: str, text: str, in_file: Any) -> Any:
        if name not in self._values:
            setting = self._settings.get(name)
            kind = setting.kind if setting is not None else kind_of(in_file)
            given = from_text(text, kind)
            try:
                fitted = (setting or Setting(kind)).accept(freeze(given, name))
            except (Misfit, NotPlain) as error:
                as_there = "" if setting is not None else f", as {name} = {in_file!r:.60} in the file"
                self.problems.append(f"--{name}={text}: {error}{as_there}")
                fitted = given = in_file  # the file goes on with its own, and this error is not hidden by another
            # Numbers as they will be; but a list that the file may append to, and a path as the file has it.
            self._values[name] = fitted if isinstance(given, (int, float)) or isinstance(in_file, PurePath) else given
        return self._values[name]
