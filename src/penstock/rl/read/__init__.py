"""Rollouts from Python objects, files, Arrow, and the columns of other RL stacks."""
