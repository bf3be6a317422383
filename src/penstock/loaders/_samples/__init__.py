"""Samples by their number, from a dataset or from columns, as batches: what `MLXDataLoader` is made of.

kinds.py       what the values of a sample are: tokens, numbers, or something to keep beside the batch
ragged.py      rows of tokens wherever they lie in memory, as padded grids
columns.py     samples as columns
gathering.py   samples, tables and stores made into columns
origins.py     what a loader was given: columns, a list, or something to ask sample by sample
batch.py       the batch
assembly.py    columns and row numbers to the arrays of a batch
making.py      micro-batches made, one by one or many at once
engine.py      batches by a plan from any position on
"""
