"""Page of a target: what it is decides which sections it has."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.files.filesystems import cut, is_remote, local_or_none, name_of, shown
from penstock.html import Section, page
from penstock.loaders.loader_file import load_config
from penstock.report.run_directory import is_metrics_file, is_run_directory
from penstock.store import open_store
from penstock.store.foreign.lookup import is_foreign
from penstock.store.manifest import is_bucket_store, is_store

MOST_BYTES: Final = 3_000_000
"""Size that no page exceeds."""
_CONFIGS = (".yaml", ".yml", ".json")


def build_report(
    target: str,
    other: str | None = None,
    *,
    tokenizer: str | None = None,
    quarantine: str | None = None,
    samples: int = 12,
    seed: int = 0,
) -> str:
    """The page of a store, a loader's file or a run's metrics file; of two of a kind, side by side.

    `tokenizer` is for a store whose own is not found, `quarantine` for one whose bad rows are in another file than
    `STORE.quarantine.jsonl`. `samples` rows of a store are drawn by `seed`; the same store gives the same page.
    """
    kind = target_kind(target)
    if other is not None and target_kind(other) != kind:
        raise ConfigError(f"{shown(target)} is a {kind}, and {shown(other)} a {target_kind(other)}; give two of a kind")
    names = shown(target) if other is None else f"{name_of(target)} and {name_of(other)}"
    if kind == "store":
        sections, lead = _store_sections(target, other, tokenizer, quarantine, samples=samples, seed=seed)
    elif kind == "plan":
        sections, lead = _plan_sections(target, other), f"Plan of {names}"
    else:
        if other is not None:
            raise ConfigError("two runs are not compared; give one metrics file")
        sections, lead = _imported("run").run_sections(Path(target)), f"Run recorded in {target}"
    title = name_of(target) if other is None else names
    made = page(title, sections, lead=lead)
    if len(made.encode()) > MOST_BYTES:
        raise ConfigError(f"the page would have {len(made):,} bytes, more than {MOST_BYTES:,}; pass fewer --samples")
    return made


def target_kind(target: str) -> str:
    """`store`, `plan` or `run`; anything else is a ConfigError that says what was expected."""
    if is_remote(target):
        if is_bucket_store(target):
            return "store"
        if cut(target)[0].endswith(_CONFIGS):
            return "plan"
        raise ConfigError(
            f"{shown(target)} is no store in a bucket; a report is about a store, a loader's file, or the metrics file "
            "of a run on this machine"
        )
    path = local_or_none(target)
    if path is None or not path.exists():
        raise ConfigError(f"{target} does not exist")
    if is_store(path) or is_foreign(path):
        return "store"
    if is_run_directory(path) or (path.is_file() and is_metrics_file(path)):
        return "run"
    if path.suffix in _CONFIGS:
        return "plan"
    raise ConfigError(
        f"{target} is neither a store, nor a YAML or JSON file that describes a loader, nor the metrics file of a run "
        "(metrics='run.metrics.jsonl')"
    )


def _store_sections(
    target: str, other: str | None, tokenizer: str | None, quarantine: str | None, *, samples: int, seed: int
) -> tuple[list[Section], str]:
    with open_store(target) as store:
        if other is not None:
            with open_store(other) as second:
                return _imported("comparison").compare_stores(store, second), "Two stores side by side"
        from penstock.report.samples import sample_sections
        from penstock.report.store import lead_of, open_tokenizer, store_sections

        known = open_tokenizer(store, tokenizer)
        sections = store_sections(store, known, seed=seed)
        sections += sample_sections(store, known, count=samples, seed=seed, quarantine=quarantine)
        return sections, lead_of(store)


def _plan_sections(target: str, other: str | None) -> list[Section]:
    config = load_config(target)
    if other is not None:
        return list(_imported("comparison").compare_plans(config, load_config(other)))
    return list(_imported("plan").plan_sections(config))


def _imported(name: str) -> Any:
    """A module of this package, imported when a page needs it."""
    return import_module(f"penstock.report.{name}")
