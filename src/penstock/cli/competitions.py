"""`penstock competitions add | list | search | show | remove | discover`: the registry of competitions."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.competition_add import SPEC_FILE, TYPES, add_data, as_options, check_type, said_as_options
from penstock.cli.console import clear_exits, output, print_table

if TYPE_CHECKING:  # what the commands need is imported when one runs: `penstock --version` needs none of it
    from penstock.datasets.base import KaggleDataset
    from penstock.datasets.registry import Competition, DatasetRegistry

__all__ = ["competitions"]

competitions = typer.Typer(
    name="competitions",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Register the data of a competition, and look at what is registered.",
)

logging.getLogger("penstock.datasets").addHandler(logging.NullHandler())  # the commands tell what is wrong themselves

RegistryOption = Annotated[
    Path | None, typer.Option("--registry", metavar="DIR", help="The registry; without it, the user's own.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A registered competition.")]


@competitions.command()
def add(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory, or URL, with the competition's files.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The competition's name; else what the file or DIR is called.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="The column to be predicted; again, if there are several."),
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="The column with the ids.")] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="METRIC", help="How it is scored: accuracy, auc, rmse ...")
    ] = None,
    kind: Annotated[str | None, typer.Option("--type", metavar="TYPE", help=f"{TYPES}.")] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="SIGN", help="What separates cells, if it is not found.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(metavar="NAME", help="Such as latin-1, if it is not UTF-8.")] = None,
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help=f"Instead of {SPEC_FILE} in DIR.")] = None,
    guess: Annotated[bool, typer.Option("--infer", help="Guess anew, and write over what is in the file.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Even if the name is that of other data.")] = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Register the data in a directory: its files are read, and what they are is guessed and put into competition.yaml.

    Correct the file where it is wrong and run the command again: it is then read, checked against the data, and
    registered; it is never written over, unless --infer is given. Nothing is written or registered that could not be
    loaded.
    """
    from penstock.datasets.registry import DatasetRegistry

    options = {
        "target": target or None,
        "id_column": id_column,
        "metric": metric,
        "competition_type": kind,
        "delimiter": delimiter,
        "encoding": encoding,
    }
    with clear_exits(debug=debug), said_as_options():
        check_type(kind)
        opened = DatasetRegistry(registry)
        added = add_data(opened, directory, spec, name, options, guess=guess, replace=replace)
    if as_json:
        facts = {"spec_file": str(added.file), "written": added.written, "rows": added.rows, "doubts": added.doubts}
        typer.echo(orjson.dumps(_facts(opened, added.competition) | facts, option=orjson.OPT_INDENT_2))
        return
    for column, why in added.doubts.items():
        typer.echo(f"penstock: column {column!r}: {why}", err=True)
    console, name = output(), added.competition.name
    print_table(console, _drawn(opened, added.competition))
    done = f"as {added.file} says"
    if added.written:
        done = f"wrote {added.file}: look through it, correct it, and run this again"
    if added.name_in_file != name:
        done += f", but for the name, which is {added.name_in_file} there"
    known = len(added.competition.versions)
    if 0 < added.versions_before < known:
        done += f"; the data has changed since it was registered, and is version {known}"
    console.print(f"registered {name}; {done}", markup=False, highlight=False, soft_wrap=True)


@competitions.command("list")
def list_all(registry: RegistryOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List what is registered."""
    from penstock.datasets.registry import DatasetRegistry

    with clear_exits(debug=debug):
        opened = DatasetRegistry(registry)
        _show_list(opened, opened.list_competitions(), as_json=as_json)


@competitions.command()
def search(
    text: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="In name, description or tags.")] = None,
    kind: Annotated[str | None, typer.Option("--type", metavar="TYPE", help=f"{TYPES}.")] = None,
    metric: Annotated[str | None, typer.Option(metavar="METRIC", help="accuracy, auc, rmse ...")] = None,
    min_samples: Annotated[
        int | None, typer.Option(min=0, metavar="COUNT", help="Rows of the training file, at least.")
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=0, metavar="COUNT", help="Rows of the training file, at most.")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the competitions that fit all that is given."""
    from penstock.datasets.registry import DatasetRegistry

    with clear_exits(debug=debug):
        check_type(kind)
        opened = DatasetRegistry(registry)
        names = opened.search_competitions(kind, metric, min_samples, max_samples, " ".join(text or ()))
        _show_list(opened, names, as_json=as_json)


@competitions.command()
def show(
    name: NameArgument,
    rows: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Also the texts and labels of the first rows; loads the data.")
    ] = 0,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Whose rows: train, val or test.")] = "train",
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what is registered under a name, and which class reads it."""
    from penstock.datasets.registry import DatasetRegistry

    with clear_exits(debug=debug):
        opened = DatasetRegistry(registry)
        competition = opened.get(name)
        samples = _samples(opened, name, split, rows) if rows else []
        facts = _facts(opened, competition)
    if as_json:
        typer.echo(orjson.dumps(facts | ({"rows": samples} if rows else {}), default=str, option=orjson.OPT_INDENT_2))
        return
    print_table(output(), _drawn(opened, competition))
    for number, sample in enumerate(samples):
        label = f": {orjson.dumps(sample['label'], default=str).decode()}" if "label" in sample else ""
        typer.echo(f"\n{split} row {number}{label}\n{sample['text']}")


@competitions.command()
def remove(name: NameArgument, registry: RegistryOption = None, debug: DebugOption = False) -> None:
    """Forget a competition. Its data and its competition.yaml stay."""
    from penstock.datasets.registry import DatasetRegistry

    with clear_exits(debug=debug):
        DatasetRegistry(registry).remove(name)
    output().print(f"removed {name}; its data stays", markup=False, highlight=False, soft_wrap=True)


@competitions.command()
def discover(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A file or directory whose code is run.")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the dataset classes of penstock, of plugins, and below PATH: in *_dataset.py and in folders called datasets.

    This runs the code of these files. A class below PATH that is called after a registered competition reads it from
    then on. Exit codes: 0 all could be loaded; 1 some could not, which are named.
    """
    from penstock.datasets.discovery import name_of
    from penstock.datasets.registry import DatasetRegistry

    with clear_exits(debug=debug):
        found = DatasetRegistry(registry).discover(path)
    classes = {name: name_of(dataset) for name, dataset in sorted(found.found.items())}
    errors = {place: f"{type(error).__name__}: {error}" for place, error in found.errors.items()}
    if as_json:
        typer.echo(orjson.dumps({"found": classes, "errors": errors}, option=orjson.OPT_INDENT_2))
    else:
        table = _table("competition", "class")
        for name, where in classes.items():
            table.add_row(Text(name), Text(where))
        print_table(output(), table)
        for place, problem in errors.items():
            if debug:
                typer.echo("".join(traceback.format_exception(found.errors[place])), err=True)
            typer.echo(f"penstock: {place}: {problem}", err=True)
    if errors:
        raise typer.Exit(1)


# -- inside ----------------------------------------------------------------------------------------------------------


def _samples(registry: DatasetRegistry, name: str, split: str, count: int) -> list[dict[str, Any]]:
    dataset = registry.load(name, split)
    samples = []
    for index in range(min(count, len(dataset))):
        sample = dataset[index]
        told = {"text": sample.get("text", "") if isinstance(sample, dict) else str(sample)}
        if isinstance(sample, dict) and sample.get("labels") is not None:
            told["label"] = _said(_plain(sample["labels"]), dataset)
        samples.append(told)
    return samples


def _said(label: Any, dataset: KaggleDataset) -> Any:
    """The name of the class that a label is the number of; other labels as they are."""
    names = dataset.class_names if isinstance(label, int) and not isinstance(label, bool) else None
    return names[label] if names is not None and 0 <= label < len(names) else label


def _plain(value: Any) -> Any:
    """Numbers and arrays of any framework as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _show_list(registry: DatasetRegistry, names: list[str], *, as_json: bool) -> None:
    found = [registry.get(name) for name in names]
    damaged = registry.damaged()
    if as_json:
        facts = {"competitions": [_facts(registry, one) for one in found], "damaged": [str(file) for file in damaged]}
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        return
    table = _table("competition", "type", "metric", "rows", "features", "target", "data")
    for one in found:
        table.add_row(
            Text(one.name),
            one.spec.competition_type.value,
            Text(registry.metric_of(one)),
            _count(one.spec.num_samples),
            _count(one.spec.num_features),
            Text(", ".join(one.spec.targets) or "-"),
            Text(str(one.spec.dataset_path)),
        )
    print_table(output(), table if found else Text("none"))
    for error in damaged.values():
        typer.echo(f"penstock: {as_options(str(error))}", err=True)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in ("rows", "features") else "left")
    return table


def _drawn(registry: DatasetRegistry, competition: Competition) -> Table:
    metadata, spec, chosen = competition.metadata, competition.spec, registry.class_of(competition)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("competition", Text(competition.name))
    for label, value in (
        ("", metadata.description),
        ("url", metadata.url),
        ("tags", ", ".join(metadata.tags)),
        ("type", metadata.competition_type.value),
        ("metric", registry.metric_of(competition)),
        ("data", str(spec.dataset_path)),
        ("files", ", ".join(spec.files.values())),
        ("rows", _count(spec.num_samples)),
        ("features", _count(spec.num_features)),
        ("target", ", ".join(spec.targets)),
        ("id", spec.id_column or "none"),
        ("group", spec.group_column or ""),
        ("time", spec.time_column or ""),
        ("version", _version(competition)),
        ("class", f"{chosen.name} ({chosen.why})"),
    ):
        if value:
            table.add_row(label, Text(value))
    kinds: dict[str, list[str]] = {}
    for name, column in spec.columns.items():
        kinds.setdefault(column.kind or "as in the file", []).append(name)
    for kind, names in kinds.items():
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        table.add_row(kind, Text(shown))
    return table


def _facts(registry: DatasetRegistry, competition: Competition) -> dict[str, Any]:
    chosen = registry.class_of(competition)
    reader = {"metric": registry.metric_of(competition), "class": chosen.name, "class_reason": chosen.why}
    return {"name": competition.name, **competition.to_dict(), **reader}


def _version(competition: Competition) -> str:
    """The last version of the data; nothing if nobody has read it yet."""
    if not competition.versions:
        return ""
    last = competition.versions[-1]
    return f"{last.number}, of {last.registered}: " + ", ".join(f"{one.name} {one}" for one in last.files.values())


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
