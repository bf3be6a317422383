"""Train on the queue that `prepare.py` fills: `python train.py config/train_char_diffusion.py [--max_iters=60]`."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "examples"))
    sys.exit(import_module("char_diffusion").main())
