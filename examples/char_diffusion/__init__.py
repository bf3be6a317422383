"""Small transformer trained on the batches of a queue: `python train.py config/train_char_diffusion.py`.

command     command line: config, overrides, help, errors
trainer     training loop: step, evaluate, save, resume exactly
model       transformer, bidirectional or causal
objective   input, target and masks of a batch by role; loss and accuracy by `training_type`
ranks       process group of torchrun, devices, random state, signals
checkpoint  checkpoint files, and the check that one fits the run
report      lines of a run, `log.jsonl` and `curve.html`
"""

from char_diffusion.command import main

__all__ = ["main"]
