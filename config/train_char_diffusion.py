"""Masked-character diffusion on the text of data/char_diffusion: some minutes on two CPU cores.

    python prepare.py config/train_char_diffusion.py    # in one terminal: fills the queue, pauses while it is full
    python train.py config/train_char_diffusion.py      # in another: consumes it

Any setting can be given on the command line of both: --batch_size=8 --max_iters=60
"""

# Both commands.
dataset = "char_diffusion"  # data/char_diffusion/prepare_streaming.py and the queue
batch_size = 32  # rows of a batch
block_size = 64  # characters of a row: a sentence, more or less
seed = 1337  # the same seed gives the same batches and the same first weights

# Masking (CharDiffusionProvider). Easy rows first: with few masks the model soon learns that neighbours matter. Then
# every row has a share of masks of its own, from a tenth to nearly all.
stages = [
    {"until": 200, "mask_probability": 0.15},
    {"mask_probability": (0.1, 0.9)},
]
ignore_index = -100  # value of y where nothing is masked; excluded from the loss

# The queue.
batches_per_file = 8  # 256 KiB a file
backlog_files = 32  # largest backlog of a split: under a minute of training
split_proportions = {"train": 0.9, "val": 0.1}  # val is read only now and then

# The model: 0.6 million weights.
n_layer = 3  # blocks
n_head = 4  # heads of attention in each
n_embd = 128  # width
dropout = 0.0  # the masks are noise enough

# The training.
max_iters = 1500  # some minutes; after 1000 steps 64 % of the masked characters of val are right
learning_rate = 2e-3  # high, as suits a small model and a short run
min_lr = 2e-4  # where the cosine ends
warmup_iters = 50  # steps up to the highest rate
lr_decay_iters = max_iters
weight_decay = 0.1  # of the matrices
grad_clip = 1.0  # the largest norm of a gradient
eval_interval = 250  # steps between two evaluations, each with a checkpoint and a commit of the queue
eval_iters = 8  # batches per evaluation
log_interval = 25  # steps between two lines
