"""Quality filters: each leaves rows of text out, and counts them by reason.

filters         every filter by name
gopher c4 fineweb   published rules: a class and its kernels each
content         length, script, patterns, word lists
base            the class they share
characters words    what the kernels read: kinds of characters, lines, English words and sentences
"""
