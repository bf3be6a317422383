"""Tokenizers: one interface (`base`) over the libraries that define the ids, with a verified fast path.

`load` makes a tokenizer of a path, a name or an object; `huggingface`, `sentencepiece` and `tiktoken` are the reference
libraries, `simple` has tokenizers without a model. `fast` and `verification` are the fast path and its checks.
`token_rows` makes rows of token ids.
"""
