"""Any source in, ready training batches out, through one memory-budgeted engine."""
