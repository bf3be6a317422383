"""The functions behind `penstock.datasets.metrics`: NumPy only, given arrays that were checked."""
