"""Live web page about stores, files, plans, runs and queues, on loopback. It only reads.

penstock ui corpus.store train.yaml run.metrics.jsonl

`targets` are what was opened; `rows`, `plans`, `runs` and `queues` read them; `pages` shows them; `guard` decides who
sees a page; `app` has the routes, `server` the port.
"""
