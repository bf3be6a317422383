"""Compilation of chat templates: layouts that are proven once and filled for whole batches."""
