"""Batches of preferences: chosen and rejected answers, or answers with labels.

batch.py       what a trainer gets
engine.py      both sides of a pair gathered, step by step
mismatch.py    prompts with the answers of others, for KTO's KL term
stores.py      which stores hold preferences, and who may read them
"""
