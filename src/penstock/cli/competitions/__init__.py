"""`penstock competitions`: `commands` has the commands, `addition` what `add` does."""

from penstock.cli.competitions.commands import competitions

__all__ = ["competitions"]
