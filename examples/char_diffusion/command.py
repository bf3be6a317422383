"""Command line of the trainer: `python train.py CONFIG [--name=value ...]`."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence

from penstock.config import SharedConfig, load_shared_config, validate
from penstock.config.settings import SHARED, TRAIN, thaw
from penstock.config.shared import split_overrides
from penstock.distributed.ranks import find_rank
from penstock.errors import PenstockError, QueueNotFoundError, StaleQueueError
from penstock.fsqueue import DatasetConsumer
from penstock.fsqueue.prepare_command import DatasetNotFoundError, read_config
from penstock.fsqueue.queue import differences, how_to_purge

__all__ = ["main"]

_USAGE = """\
usage: python train.py CONFIG [--name=value ...] [--debug]
       torchrun --nproc_per_node=2 train.py CONFIG [--name=value ...]

Trains a small transformer on the queue that `python prepare.py CONFIG` fills. Resumes from the checkpoint in out_dir
if there is one; --resume=False starts a new run. Ctrl-C saves a checkpoint and stops, a second Ctrl-C stops at once.
--debug shows the traceback of an error.

settings of the config and their defaults:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 when trained or stopped, 1 after an error, 2 after a wrong command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    paths = [each for each in given if not each.startswith("-")]
    overrides = [each for each in given if each.startswith("-") and each != "--debug"]
    if len(paths) != 1 or {"-h", "--help"} & set(overrides):
        asked = {"-h", "--help"} & set(overrides)
        print(_help(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        _train(_read(paths[0], overrides))
    except KeyboardInterrupt:  # there was nothing to save yet
        return 130
    except (PenstockError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != "torch":
            raise
        if "--debug" in given:
            traceback.print_exception(error)
        rank = find_rank()
        whose = "" if rank.world_size == 1 else f" (rank {rank.rank})"
        print(f"train.py{whose}: {_message(error, paths[0], overrides)}", file=sys.stderr)
        return 1
    return 0


def _read(path: str, overrides: Sequence[str]) -> SharedConfig:
    """The config, validated with the settings of its provider, so that one command line serves both commands."""
    try:
        config, provider = read_config(path, overrides)
    except DatasetNotFoundError:  # a machine that only trains has no provider
        return validate(load_shared_config(path, overrides))
    return validate(config, provider.settings, owner=provider.__name__)


def _train(config: SharedConfig) -> None:
    # torch is imported here: a wrong config is reported without it.
    from char_diffusion.ranks import RankGroup, StopSignals
    from char_diffusion.trainer import Trainer

    with RankGroup(config["device"], config["dtype"]) as ranks, StopSignals(launched=ranks.world_size > 1) as signals:
        consumer = DatasetConsumer(
            config["queue_dir"] or config["data_root"] / config["dataset"] / "queue",
            order="strict",
            acknowledge="committed",
            rank=ranks.rank,
            world_size=ranks.world_size,
            device=None if ranks.device.type == "cpu" else str(ranks.device),
            on_error=config["on_error"],
            metrics=config["metrics"],
        )
        with consumer:
            _refuse_other_settings(consumer, config)
            Trainer(config, consumer, ranks, signals).run()


def _refuse_other_settings(consumer: DatasetConsumer, config: SharedConfig) -> None:
    """Raise if the batches were made with another seed, size or provider setting than the config has.

    Names that only one of the two has are not compared: without the provider its defaults are unknown.
    """
    made = {name: value for name, value in consumer.settings.items() if name in config and name != "lanes"}
    if found := differences(made, {name: thaw(config[name]) for name in made}):
        raise StaleQueueError(
            f"{consumer.queue_dir} was made with other settings than the config has: {'; '.join(found)}; train with "
            f"the settings of the queue, or {how_to_purge(consumer.queue_dir)}"
        )


def _message(error: Exception, path: str, overrides: Sequence[str]) -> str:
    """The message of an error; one about a missing queue names the whole command that makes it."""
    if not isinstance(error, QueueNotFoundError):
        return str(error)
    texts, _ = split_overrides(overrides)
    theirs = [f"--{name}={text}" for name, text in texts.items() if name not in TRAIN]
    return str(error).replace("python prepare.py <config>", shlex.join(["python", "prepare.py", path, *theirs]))


def _help() -> str:
    known = {**SHARED, **TRAIN}
    width = max(map(len, known))
    return _USAGE + "\n".join(
        f"  {name:{width}}  {'required' if each.required else str(each.default):>10}  {each.text}".rstrip()
        for name, each in known.items()
    )
