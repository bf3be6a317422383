"""A small transformer trained on what the queue holds: `python train.py config/train_char_diffusion.py`.

command      the command line: the shared config, overrides, errors as one paragraph
settings     the numbers of a run, and its learning rate at every step
feeding      what it asks of the queue, and whether that is the one of the config
fields       which array of a batch is the input, the target, a mask: by the roles of the schema
model        the transformer: sees both ways, or only back
objectives   what is learned, by `training_type`; loss and accuracy as sums that ranks can add
world        the ranks of torchrun and their device
loop         step, evaluate, save, go on exactly where a killed run was saved
checkpoints  the files of a run, and why one does not fit
figures      sums, means, pace
curve        losses so far, as lines of JSON and as a page with a drawing
stopping     SIGINT and SIGTERM
progress     what is shown while it runs
telling      what is said before and after

This package alone, beside backends/ and engines/, imports torch; importing it does not, running it does.
"""

from penstock.trainer.command import main

__all__ = ["main"]
