"""Make batches for the trainer: python prepare.py config/train_char_diffusion.py [--name=value ...]"""

import sys

from penstock.fsqueue.prepare_command import main

if __name__ == "__main__":
    sys.exit(main())
