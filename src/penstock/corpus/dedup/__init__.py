"""Deduplication: from text to keys, and from keys to the rows that were seen before.

    text --minhash--> signature --> 14 band keys  \
                                                   seen_keys --> key_table (memory), runs (disk), log
    value --------> one xxh3-128 key              /
"""
