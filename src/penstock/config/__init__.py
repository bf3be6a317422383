"""Shared config of the two queue commands: `prepare.py` and `train.py` read the same Python file.

    config = load_shared_config("config/train_char_diffusion.py", ["--batch_size=8"])
    config = validate(config, CharDiffusionProvider.settings, owner="CharDiffusionProvider")

shared       SharedConfig, the frozen settings, and load_shared_config with its overrides
validator    validate: defaults, checks, and all problems in one error
settings     Setting, the settings of both commands, frozen values
"""

from penstock.config.settings import REQUIRED, Setting
from penstock.config.shared import SharedConfig, load_shared_config
from penstock.config.validator import validate

__all__ = ["REQUIRED", "Setting", "SharedConfig", "load_shared_config", "validate"]
