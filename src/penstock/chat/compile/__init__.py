"""Compiled chat templates: layouts proven once (`tracer`, `prover`) and filled for whole batches (`layouts`)."""
