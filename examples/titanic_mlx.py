"""Titanic as text: a small BERT in MLX predicts survival and writes the submission.

python examples/titanic_mlx.py --out here                         # synthetic passengers
python examples/titanic_mlx.py --data titanic/                    # the real data
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx
from titanic_parts.model import Encoder
from titanic_parts.plots import report
from titanic_parts.training import fit, learn_classes, predict, token_loss
from titanic_parts.wording import TEMPLATE, train_tokenizer

from penstock.batching.masked_lm import MaskedLM
from penstock.datasets import Folds, TitanicDataset, make_titanic
from penstock.datasets.titanic import titanic_spec
from penstock.loaders.mlx_loader import MLXDataLoader

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--data", type=Path, help="a directory with train.csv and test.csv, or the path of train.csv")
options.add_argument("--epochs", type=int, default=8)
options.add_argument("--pretrain", type=int, default=0, metavar="STEPS", help="steps of masked language modelling")
options.add_argument(
    "--out", type=Path, help="directory for submission.csv and titanic.html; by default a temporary one"
)
given = options.parse_args()
scratch = tempfile.TemporaryDirectory()
out = given.out or Path(scratch.name)
out.mkdir(parents=True, exist_ok=True)
mx.random.seed(0)

data = given.data or make_titanic(scratch.name)
spec = titanic_spec(data.parent if data.is_file() else data, num_samples=None)
passengers, folds = partial(TitanicDataset, spec, template=TEMPLATE), Folds(5, kind="stratified", seed=0)
tokenizer = train_tokenizer(passengers("train", folds=folds).texts())  # trained on the training fold only
train, val = (passengers(split, folds=folds, tokenizer=tokenizer) for split in ("train", "val"))
print(f"{len(train)} training passengers, {len(val)} for validation, such as:\n  {train.texts()[0]}")

model = Encoder(tokenizer.vocab_size, len(train.class_names), longest=64)
if given.pretrain:
    mlm = MaskedLM.of(tokenizer, whole_words=True)
    first, *_, last = fit(model, MLXDataLoader(train, objective="masked_lm", mlm=mlm), given.pretrain, token_loss)
    print(f"hidden words: the loss went from {first:.2f} to {last:.2f}")
losses, validation = learn_classes(model, train, val, given.epochs)

print(*report(out / "titanic.html", train, val, predict(model, val), losses, validation), sep="\n")
test = passengers("test", tokenizer=tokenizer)
test.submission(test.class_of(predict(model, test)), out / "submission.csv")
print("submission.csv and titanic.html written to", given.out or "a scratch place; name one with --out")
scratch.cleanup()
