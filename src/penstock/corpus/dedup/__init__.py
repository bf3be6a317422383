"""Inside deduplication: from text to keys, and from keys to what was seen before.

    text --shingles--> MinHash signature --signatures--> 14 band keys  \
                                                                        seen --> tables (memory), runs (disk), log
    value --fingerprints--> one xxh3-128 key                           /
"""
