"""Loaders with `streaming=True`. The way of a row, from the files to a batch:

    catalog          blocks of the files, and the streams that they belong to
    windows, rows    a window of a stream: rows that are read, tokenized and shuffled together
    sampled_windows  the samples packed from a window
    stream, steps    the streams of one rank, and the batch of a step
    workers          threads, or processes that make the same steps (processes, serialization)
    reader, engine   positions, epochs and states

`spec` has everything that the batches depend on, and can be opened by another process.
"""
