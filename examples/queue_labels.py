"""Queue between a provider and a consumer, with batches of labels, masks and weights besides x and y.

The dataset is in examples/queue_labels/, with the layout of a project: data/majority/prepare_streaming.py and a config.
`python prepare.py` and `python train.py` with that config do the same in two processes and train a model.
"""

import tempfile
import threading
from pathlib import Path

import numpy as np

from penstock.config import load_shared_config
from penstock.fsqueue import DatasetConsumer
from penstock.fsqueue.prepare_command import find_provider

HERE = Path(__file__).parent / "queue_labels"

config = load_shared_config(HERE / "config" / "train_majority.py", ["--batch_size=64", "--max_batches=40"])
provider_class = find_provider(config.dataset, HERE / "data")

with tempfile.TemporaryDirectory() as directory:
    provider = provider_class(config, queue_dir=Path(directory) / "queue")
    first = provider.make_batch("train", 0)  # a batch depends only on its number, so no queue is needed

    making = threading.Thread(target=provider.run)
    making.start()
    while not provider.queue_dir.exists():
        making.join(0.01)

    with DatasetConsumer(provider.queue_dir, order="strict", backend="numpy") as consumer:
        print("to be learned:", consumer.meta["training_type"], "of", consumer.meta["num_classes"], "classes")
        for field in consumer.schema("train") or []:
            print(f"  {field['name']:14} {field['dtype']:8} {field['shape']!s:5} {field['role']}")
        right = rows = 0
        for number, batch in enumerate(consumer.batches("train")):
            if number == 0:
                print("a batch is a dict of", ", ".join(batch))
                print(
                    "the batch that was made without a queue:", all(np.array_equal(batch[k], first[k]) for k in batch)
                )
            votes = [np.bincount(x[mask]).argmax() - 1 for x, mask in zip(batch["x"], batch["attention_mask"])]
            clear = batch["weight"] > 0  # a tie has weight 0
            right += int((np.array(votes) == batch["label"])[clear].sum())
            rows += int(clear.sum())
        print(f"{number + 1} batches; labels that counting gives as well: {right / rows:.0%}")
    making.join()
    left = [path.name for path in provider.queue_dir.glob("train/*.arrow")]
    print("files left in the split that was read:", left)
