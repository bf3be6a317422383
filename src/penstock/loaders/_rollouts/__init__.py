"""Rollouts: what one is, many of them as columns, where they come from, and the batches they become.

rollout     one sample, as people hand it over
table       many, as columns: no Python object per token
"""
