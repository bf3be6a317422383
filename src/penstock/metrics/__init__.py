"""Metrics: one registry of names and units, and the exporters that carry readings to where people keep theirs.

registry     names, kinds, units, labels and help of all metrics
readings     flat keys such as `penstock_loader_epoch` or `penstock_queue_ready_files{split="train"}`
watch        the one background thread that reads `metrics()` of a run and hands it to exporters
targets      `open_exporter("prometheus://:9464")`, `otlp://`, `jsonl:`, `tensorboard:`, `wandb:`, `mlflow:`
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
