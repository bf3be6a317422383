"""`python train.py CONFIG [--name=value ...]`: from a command line to a run, and from an error to one paragraph."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock._optional import require
from penstock.config import SharedConfig, load_shared_config, validate
from penstock.config.overrides import split_overrides
from penstock.config.settings import SHARED, TRAIN
from penstock.distributed.ranks import find_rank
from penstock.errors import ConfigError, PenstockError, QueueNotFoundError
from penstock.fsqueue.prepare_command import read_config
from penstock.fsqueue.provider_lookup import DatasetNotFoundError

__all__ = ["main"]

_USAGE = """\
usage: python train.py CONFIG [--name=value ...] [--debug]
       torchrun --nproc_per_node=2 train.py CONFIG [--name=value ...]

Trains a small transformer on the queue that `python prepare.py CONFIG` fills. Goes on from the checkpoint in out_dir
if there is one; --resume=False starts anew. Ctrl-C saves and leaves, a second one leaves at once.
--debug shows the traceback of an error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 when trained, or stopped and saved; 1 after an error, 2 after one on the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [each for each in given if each != "--debug"]
    given.sort(key=lambda each: each.startswith("--"))  # the config may stand behind what is said otherwise
    if not given or given[0] in ("-h", "--help"):
        Console(stderr=not given).print(_help(), markup=False, highlight=False, soft_wrap=True)
        return 0 if given else 2
    try:
        config = _read_config(given[0], given[1:])
        require("torch", "torch")
        return _train(config)
    except KeyboardInterrupt:  # before there was anything to save
        return 130
    except (PenstockError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != "torch":
            raise
        if debug:
            traceback.print_exception(error)
        return _complain(_with_the_command(error, given[0], given[1:]))


def _read_config(path: str, overrides: Sequence[str]) -> SharedConfig:
    """The config, checked against what its provider declares too, so that the same command line serves both commands.

    Where the dataset's directory is not at hand, as on a machine that only trains, its settings cannot be known.
    """
    try:
        config, provider = read_config(path, overrides)
    except DatasetNotFoundError:
        return validate(load_shared_config(path, overrides))
    return validate(config, provider.settings, owner=provider.__name__)


def _train(config: Mapping[str, Any]) -> int:
    # These bring torch, which is not needed to say that a config is wrong.
    from penstock.fsqueue.consumer import DatasetConsumer
    from penstock.trainer.feeding import refuse_other_settings
    from penstock.trainer.loop import Trainer
    from penstock.trainer.progress import Progress
    from penstock.trainer.settings import TrainSettings
    from penstock.trainer.stopping import Stopping
    from penstock.trainer.world import World

    settings = TrainSettings.of(config)
    with World(settings.device, settings.dtype) as world, Stopping(launched=world.rank.world_size > 1) as stopping:
        consumer = DatasetConsumer(
            queue_directory(config),
            order="strict",
            acknowledge="committed",
            rank=world.rank.rank,
            world_size=world.rank.world_size,
            device=None if world.device.type == "cpu" else str(world.device),
            backend="torch",
            on_bad=config.get("on_bad", "raise"),
        )
        console = Console() if world.first else None
        with consumer, Progress(console, settings.max_iters) as progress:
            refuse_other_settings(consumer, config)
            Trainer(settings, consumer, world, stopping=stopping, progress=progress).run()
    return 0


def queue_directory(config: Mapping[str, Any]) -> Path:
    """Where the provider of this config puts its batches."""
    given = config.get("queue_dir")
    return Path(given) if given is not None else Path(config.get("data_root", "data")) / config["dataset"] / "queue"


def _with_the_command(error: Exception, path: str, overrides: Sequence[str]) -> Exception:
    """Of a queue that is not there: the same, with the command that makes it as it has to be typed."""
    if not isinstance(error, QueueNotFoundError):
        return error
    texts, _ = split_overrides(overrides)
    theirs = [f"--{name}={text}" for name, text in texts.items() if name not in TRAIN]
    line = shlex.join(["python", "prepare.py", path, *theirs])
    return QueueNotFoundError(str(error).replace("python prepare.py <config>", line))


def _complain(error: Exception) -> int:
    rank = find_rank()
    whose = "" if rank.world_size == 1 else f" (rank {rank.rank})"
    text = " ".join(str(error).split("\n")) if not isinstance(error, ConfigError) else str(error)
    Console(stderr=True).print(f"train.py{whose}: {text}", markup=False, highlight=False, soft_wrap=True)
    return 1


def _help() -> str:
    known = {**SHARED, **TRAIN}
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {_default(each):>10}  {each.text}".rstrip() for name, each in known.items()]
    return "\n".join([_USAGE, "settings of the config, their defaults, and what they are:", *lines])


def _default(setting: Any) -> str:
    return "required" if setting.required else str(setting.default)
