"""What the quality filters measure: words, lines and repetition, on the UTF-8 bytes of a whole column.

characters      what kind of character each code point is
english         English words by rule: the tables, and the rules as regular expressions
measures        a column of text -> a reason code per row, by the fastest path there is
plain           the rules in plain Python: slow, short, and the definition of what is right
compiled        the same by numba, on bytes; imported only where numba is installed
"""
