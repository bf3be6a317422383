"""One config file for both commands: `prepare.py` makes batches by it, `train.py` trains by it.

    config = load_shared_config("config/train_char_diffusion.py", ["--batch_size=8"])
    config = validate(config, CharDiffusionProvider.settings, owner="CharDiffusionProvider")

shared      the frozen value, and how a file becomes one
validator   everything that is wrong with one, said at once; defaults filled in
known       the settings of both commands: kinds, defaults, checks
settings    what one setting may be
kinds       does a value fit, and what does a text on the command line mean
overrides   `--name=value`
running     a file of Python, run in a namespace of its own
values      plain values, frozen
"""

from penstock.config.settings import REQUIRED, Setting
from penstock.config.shared import SharedConfig, load_shared_config
from penstock.config.validator import validate

__all__ = ["REQUIRED", "Setting", "SharedConfig", "load_shared_config", "validate"]
