"""`penstock competitions add | list | search | show | remove | discover`: the registry of competitions."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.table import Table

from penstock.cli.competitions.addition import (
    SPEC_FILE,
    TYPES,
    AddedData,
    add_data,
    as_options,
    check_type,
    errors_as_options,
)
from penstock.cli.console import emit, fact_table, found_problems, print_json, print_table, say, table, warn, working
from penstock.cli.options import CommandGroup, DebugOption, JsonOption, command
from penstock.files.filesystems import shown_place

if TYPE_CHECKING:  # imported when a command runs: `penstock --version` needs none of it
    from penstock.datasets.base import KaggleDataset
    from penstock.datasets.registry import Competition, DatasetRegistry

competitions = typer.Typer(
    name="competitions",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Register the data of competitions, and list them.",
)

logging.getLogger("penstock.datasets").addHandler(logging.NullHandler())  # the commands report it themselves

RegistryOption = Annotated[
    Path | None, typer.Option("--registry", metavar="DIR", help="The registry. Default: the user's own.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-code", help="Run the dataset class that the registry names for the competition.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A registered competition.")]
MetricOption = Annotated[str | None, typer.Option(metavar="METRIC", help="Metric: accuracy, auc, rmse ...")]
TypeOption = Annotated[str | None, typer.Option("--type", metavar="TYPE", help=f"{TYPES}.")]


@competitions.command()
@command()
def add(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The directory, or URL, with the competition's files.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the competition. Default: that of the file or of DIR.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Column to predict; repeatable.")] = None,
    id_column: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="Column with the ids.")] = None,
    metric: MetricOption = None,
    kind: TypeOption = None,
    delimiter: Annotated[str | None, typer.Option(metavar="SIGN", help="Separator. Default: detected.")] = None,
    encoding: Annotated[str | None, typer.Option(metavar="NAME", help="Such as latin-1. Default: UTF-8.")] = None,
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help=f"Instead of {SPEC_FILE} in DIR.")] = None,
    guess: Annotated[bool, typer.Option("--infer", help="Infer again, and overwrite the file.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Even if other data has this name.")] = False,
    trust_code: TrustOption = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register the data in a directory: the files are read, and their description is inferred into competition.yaml.

    Correct the file where it is wrong and run the command again: then it is read, checked against the data, and
    registered. It is overwritten only with --infer. Data that cannot be loaded is not registered.
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
    with errors_as_options():
        check_type(kind)
        opened = DatasetRegistry(registry)
        flags = {"infer_again": guess, "replace": replace, "trust_code": trust_code}
        with working(f"reading {shown_place(directory)}"):
            added = add_data(opened, directory, spec, name, options, **flags)
    facts = {"spec_file": str(added.file), "written": added.written, "rows": added.rows, "doubts": added.doubts}
    emit(_facts(opened, added.competition) | facts, lambda: _print_added(opened, added), as_json=as_json)


def _print_added(registry: DatasetRegistry, added: AddedData) -> None:
    for column, why in added.doubts.items():
        warn(f"column {column!r}: {why}")
    print_table(_drawn(registry, added.competition))
    name, known = added.competition.name, len(added.competition.versions)
    done = f"as described by {added.file}"
    if added.written:
        done = f"wrote {added.file}: check it, correct it, and run this again"
    if added.name_in_file != name:
        done += f" (its name there is {added.name_in_file})"
    if 0 < added.versions_before < known:
        done += f"; the data has changed since it was registered, and is version {known}"
    say(f"registered {name}; {done}")


@competitions.command("list")
@command()
def list_all(registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """List the registered competitions."""
    from penstock.datasets.registry import DatasetRegistry

    opened = DatasetRegistry(registry)
    _show_list(opened, opened.list_competitions(), as_json=as_json)


@competitions.command()
@command()
def search(
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Words in name, description or tags.")
    ] = None,
    kind: TypeOption = None,
    metric: MetricOption = None,
    min_samples: Annotated[int | None, typer.Option(min=0, metavar="N", help="Minimum of training rows.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=0, metavar="N", help="Maximum of training rows.")] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the competitions that match all criteria."""
    from penstock.datasets.registry import DatasetRegistry

    check_type(kind)
    opened = DatasetRegistry(registry)
    names = opened.search_competitions(kind, metric, min_samples, max_samples, " ".join(text or ()))
    _show_list(opened, names, as_json=as_json)


@competitions.command()
@command()
def show(
    name: NameArgument,
    rows: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Also show texts and labels of the first rows; loads the data.")
    ] = 0,
    split: Annotated[str, typer.Option(metavar="SPLIT", help="Split of the rows: train, val or test.")] = "train",
    trust_code: TrustOption = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a registered competition, and the class that reads it."""
    from penstock.datasets.registry import DatasetRegistry

    opened = DatasetRegistry(registry)
    competition = opened.get(name)
    if rows and not trust_code:
        opened.refuse_code(competition)
    with working(f"loading {name}"):
        samples = _samples(opened, name, split, rows) if rows else []

    def print_all() -> None:
        print_table(_drawn(opened, competition))
        for number, sample in enumerate(samples):
            label = f": {orjson.dumps(sample['label'], default=str).decode()}" if "label" in sample else ""
            typer.echo(f"\n{split} row {number}{label}\n{sample['text']}")

    emit(_facts(opened, competition) | ({"rows": samples} if rows else {}), print_all, as_json=as_json)


@competitions.command()
@command()
def remove(name: NameArgument, registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """Remove a competition from the registry. Its data and its competition.yaml stay."""
    from penstock.datasets.registry import DatasetRegistry

    DatasetRegistry(registry).remove(name)
    emit({"removed": name}, lambda: say(f"removed {name}; its data stays"), as_json=as_json)


@competitions.command()
@command()
def discover(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A file or directory whose code is run.")
    ] = None,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List the dataset classes of penstock, of plugins, and below PATH: in *_dataset.py and in folders called datasets.

    This runs the code of these files. From then on a class below PATH with the name of a registered competition reads
    it.

    Exit codes: 0 all could be loaded; 1 an error; 3 some could not be loaded, which are named.
    """
    from penstock.datasets.discovery import name_of
    from penstock.datasets.registry import DatasetRegistry

    with working("searching dataset classes"):
        found = DatasetRegistry(registry).discover(path)
    classes = {name: name_of(dataset) for name, dataset in sorted(found.found.items())}
    errors = {place: f"{type(error).__name__}: {error}" for place, error in found.errors.items()}

    def print_all() -> None:
        print_table(table(["competition", "class"], classes.items()))
        for place, problem in errors.items():
            if debug:
                typer.echo("".join(traceback.format_exception(found.errors[place])), err=True)
            warn(f"{place}: {problem}")

    emit({"found": classes, "errors": errors}, print_all, as_json=as_json)
    if errors:
        found_problems()


# -- output ----------------------------------------------------------------------------------------------------------


def _samples(registry: DatasetRegistry, name: str, split: str, count: int) -> list[dict[str, Any]]:
    dataset = registry.load(name, split)
    samples = []
    for index in range(min(count, len(dataset))):
        sample = dataset[index]
        shown = {"text": sample.get("text", "") if isinstance(sample, dict) else str(sample)}
        if isinstance(sample, dict) and sample.get("labels") is not None:
            shown["label"] = _label(sample["labels"], dataset)
        samples.append(shown)
    return samples


def _label(label: Any, dataset: KaggleDataset) -> Any:
    """The label as JSON has it; a class number as the name of the class."""
    label = label.tolist() if hasattr(label, "tolist") else label
    names = dataset.class_names if isinstance(label, int) and not isinstance(label, bool) else None
    return names[label] if names is not None and 0 <= label < len(names) else label


def _show_list(registry: DatasetRegistry, names: list[str], *, as_json: bool) -> None:
    found = [registry.get(name) for name in names]
    damaged = registry.damaged()
    if as_json:
        facts = [_facts(registry, competition) for competition in found]
        print_json({"competitions": facts, "damaged": [str(file) for file in damaged]})
        return
    rows = (
        (
            competition.name,
            competition.spec.competition_type.value,
            registry.metric_of(competition),
            _count(competition.spec.num_samples),
            _count(competition.spec.num_features),
            ", ".join(competition.spec.targets) or "-",
            str(competition.spec.dataset_path),
        )
        for competition in found
    )
    columns = ["competition", "type", "metric", ">rows", ">features", "target", "data"]
    print_table(table(columns, rows) if found else "none")
    for error in damaged.values():
        warn(as_options(str(error)))


def _drawn(registry: DatasetRegistry, competition: Competition) -> Table:
    metadata, spec, chosen = competition.metadata, competition.spec, registry.class_of(competition)
    facts = [
        ("competition", competition.name),
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
    ]
    kinds: dict[str, list[str]] = {}
    for name, column in spec.columns.items():
        kinds.setdefault(column.kind or "as in the file", []).append(name)
    for kind, names in kinds.items():
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        facts.append((kind, shown))
    return fact_table((name, value) for name, value in facts if value)


def _facts(registry: DatasetRegistry, competition: Competition) -> dict[str, Any]:
    chosen = registry.class_of(competition)
    reader = {"metric": registry.metric_of(competition), "class": chosen.name, "class_reason": chosen.why}
    return {"name": competition.name, **competition.to_dict(), **reader}


def _version(competition: Competition) -> str:
    """The last version of the data; empty if it has not been read yet."""
    if not competition.versions:
        return ""
    last = competition.versions[-1]
    return f"{last.number}, of {last.registered}: " + ", ".join(f"{file.name} {file}" for file in last.files.values())


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
