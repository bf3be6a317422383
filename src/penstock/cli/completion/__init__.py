"""Completion in the shell: `table` has the options of all commands, `light_commands` makes commands of it."""
