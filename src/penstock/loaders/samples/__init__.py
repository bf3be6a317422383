"""Samples by their number, from a dataset or from columns, as batches: what `MLXDataLoader` is made of.

kinds.py       what the values of a sample are: tokens, numbers, or something to keep beside the batch
ragged.py      rows of tokens wherever they lie in memory, as padded grids
columns.py     samples as columns
gathering.py   samples, tables and stores made into columns
origins.py     columns, a list, or something to ask sample by sample
opening.py     which of these a loader was given
batch.py       the batch
assembly.py    columns and row numbers to the arrays of a batch
micro.py       a micro-batch before it is made
counting.py    what the losses of a step are divided by
making.py      micro-batches made, one by one or many at once
production.py  micro-batches made in order, some at a time or by threads
engine.py      batches by a plan from any position on
"""
