"""Inside of `penstock.loaders.streamed.reader`: blocks dealt to streams, windows of rows, samples, cursors.

catalog    what there is to read, in blocks, and which stream reads which of them in which epoch
rows       tokenised rows in memory
windows    from a place in a stream to a window of rows, and the place behind it
cursors    where a stream stands, in a few characters
reading    a stream that is being read: its window, and the next one made ahead of time
ending     when an epoch is over for everybody
"""
