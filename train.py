"""Train on what `prepare.py` puts into the queue: `python train.py config/train_char_diffusion.py [--max_iters=60]`."""

import sys

from penstock.trainer import main

if __name__ == "__main__":
    sys.exit(main())
