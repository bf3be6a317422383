"""`penstock competitions add | list | search | show | remove | discover`: the registry of competitions."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.consoles import output, print_table
from penstock.cli.exits import clear_exits
from penstock.datasets.discovery import name_of
from penstock.datasets.inference import infer
from penstock.datasets.registry import Competition, DatasetRegistry
from penstock.datasets.specfile import SPEC_FILE, check_files, read_spec, write_spec
from penstock.errors import ConfigError
from penstock.files.remote import RemotePath, path_of

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
    name: Annotated[str | None, typer.Option(help="The competition's name; else that of the directory.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="The column to be predicted; again, if there are several.")
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="The column with the ids.")] = None,
    metric: Annotated[str | None, typer.Option(help="How it is scored: accuracy, auc, rmse ...")] = None,
    kind: Annotated[str | None, typer.Option("--type", help="binary, multiclass, regression, time_series ...")] = None,
    delimiter: Annotated[str | None, typer.Option(help="What separates cells, if it is not found.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Such as latin-1, if it is not UTF-8.")] = None,
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help=f"Instead of {SPEC_FILE} in DIR.")] = None,
    guess: Annotated[bool, typer.Option("--infer", help="Guess anew, and write over what is in the file.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Even if the name is that of other data.")] = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Register the data in a directory: its files are read, and what they are is guessed and put into competition.yaml.

    Correct the file where it is wrong and run the command again: it is then read, checked against the data, and
    registered; it is never written over, unless --infer is given.
    """
    options = {
        "name": name,
        "target": target or None,
        "id_column": id_column,
        "metric": metric,
        "competition_type": kind,
        "delimiter": delimiter,
        "encoding": encoding,
    }
    with clear_exits(debug=debug):
        place = path_of(directory)
        file = _spec_file(place, spec)
        written = guess or not file.exists()
        if written:
            _refuse_missing(place)
            write_spec(infer(directory, **options), file, overwrite=guess)  # type: ignore[arg-type]
        elif given := [option for option, value in options.items() if value is not None]:
            option = given[0].removesuffix("_column").removeprefix("competition_")
            raise ConfigError(
                f"{file} is there already, and says what --{option} would say: correct the file, or pass --infer to "
                "guess anew and write over it"
            )
        metadata, found = read_spec(file)
        rows = check_files(metadata, found)
        opened = DatasetRegistry(registry)
        there = opened.get(metadata.competition_name) if metadata.competition_name in opened else None
        same = there is not None and str(there.spec.dataset_path) == str(found.dataset_path)
        competition = opened.register_competition(metadata.competition_name, metadata, found, replace=replace or same)
    if as_json:
        facts = {"spec_file": str(file), "written": written, "rows": rows}
        typer.echo(orjson.dumps(_facts(competition) | facts, option=orjson.OPT_INDENT_2))
        return
    console = output()
    print_table(console, _drawn(competition))
    done = f"wrote {file}: look through it, correct it, and run this again" if written else f"as {file} says"
    console.print(f"registered {metadata.competition_name}; {done}", markup=False, highlight=False, soft_wrap=True)


@competitions.command("list")
def list_all(registry: RegistryOption = None, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List what is registered."""
    with clear_exits(debug=debug):
        opened = DatasetRegistry(registry)
        _show_list(opened, opened.list_competitions(), as_json=as_json)


@competitions.command()
def search(
    text: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="In name, description or tags.")] = None,
    kind: Annotated[str | None, typer.Option("--type", help="binary, multiclass, regression ...")] = None,
    metric: Annotated[str | None, typer.Option(help="accuracy, auc, rmse ...")] = None,
    min_samples: Annotated[int | None, typer.Option(min=0, help="Rows of the training file, at least.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=0, help="Rows of the training file, at most.")] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the competitions that fit all that is given."""
    with clear_exits(debug=debug):
        opened = DatasetRegistry(registry)
        names = opened.search_competitions(kind, metric, min_samples, max_samples, " ".join(text or ()))
        _show_list(opened, names, as_json=as_json)


@competitions.command()
def show(
    name: NameArgument, registry: RegistryOption = None, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Show what is registered under a name."""
    with clear_exits(debug=debug):
        competition = DatasetRegistry(registry).get(name)
    if as_json:
        typer.echo(orjson.dumps(_facts(competition), option=orjson.OPT_INDENT_2))
    else:
        print_table(output(), _drawn(competition))


@competitions.command()
def remove(name: NameArgument, registry: RegistryOption = None, debug: DebugOption = False) -> None:
    """Forget a competition. Its data and its competition.yaml stay."""
    with clear_exits(debug=debug):
        DatasetRegistry(registry).remove(name)
    output().print(f"removed {name}; its data stays", markup=False, highlight=False, soft_wrap=True)


@competitions.command()
def discover(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A file or directory whose code is run.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the dataset classes of penstock, of plugins, and below PATH: in *_dataset.py and in folders called datasets.

    This runs the code of these files. Exit codes: 0 all could be loaded; 1 some could not, which are named.
    """
    with clear_exits(debug=debug):
        found = DatasetRegistry().discover(path)
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


def _spec_file(place: Path | RemotePath, given: Path | None) -> Path:
    if given is not None:
        return given.expanduser()
    if isinstance(place, RemotePath):
        raise ConfigError(f"{str(place)!r} is a URL, where no {SPEC_FILE} can be written; say where with --spec FILE")
    return place / SPEC_FILE


def _refuse_missing(place: Path | RemotePath) -> None:
    if isinstance(place, Path) and not place.exists():
        raise FileNotFoundError(f"no such directory: {str(place)!r} (looked from {Path.cwd()})")


def _show_list(registry: DatasetRegistry, names: list[str], *, as_json: bool) -> None:
    found = [registry.get(name) for name in names]
    damaged = registry.damaged()
    if as_json:
        facts = {"competitions": [_facts(one) for one in found], "damaged": [str(file) for file in damaged]}
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        return
    table = _table("competition", "type", "metric", "rows", "features", "target", "data")
    for one in found:
        table.add_row(
            Text(one.name),
            one.spec.competition_type.value,
            Text(one.metadata.evaluation_metric),
            _count(one.spec.num_samples),
            _count(one.spec.num_features),
            Text(", ".join(one.spec.targets) or "-"),
            Text(str(one.spec.dataset_path)),
        )
    print_table(output(), table if found else Text("none"))
    for error in damaged.values():
        typer.echo(f"penstock: {error}", err=True)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in ("rows", "features") else "left")
    return table


def _drawn(competition: Competition) -> Table:
    metadata, spec = competition.metadata, competition.spec
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("competition", Text(competition.name))
    for label, value in (
        ("", metadata.description),
        ("url", metadata.url),
        ("tags", ", ".join(metadata.tags)),
        ("type", metadata.competition_type.value),
        ("metric", metadata.evaluation_metric),
        ("data", str(spec.dataset_path)),
        ("files", ", ".join(spec.files.values())),
        ("rows", _count(spec.num_samples)),
        ("features", _count(spec.num_features)),
        ("target", ", ".join(spec.targets)),
        ("id", spec.id_column or "none"),
        ("group", spec.group_column or ""),
        ("time", spec.time_column or ""),
        ("class", competition.dataset_class or ""),
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


def _facts(competition: Competition) -> dict[str, Any]:
    return {"name": competition.name, **competition.to_dict()}


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
