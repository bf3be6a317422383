"""Rollouts from whatever holds them: Python objects, files, Arrow, and the columns of other RL stacks."""
