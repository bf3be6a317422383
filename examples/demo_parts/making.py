"""Training data of the demo: a corpus and a chat file from the sentences of examples/sample, deterministic."""

import json
import random
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "sample"
TOKENIZER = str(SAMPLE / "tokenizer")

CONFIG = """\
# Training data: `penstock plan` and every rank read this file.
loader: mixed
sources:
  text: text.store
  chats: {loader: conversation, path: chats.store}
weights: {text: 0.8, chats: 0.2}
stopping_strategy: first_exhausted
chunk_size: 256
packing: best_fit
truncation: split
batch_size: 8
seed: 7
"""


def make_data(folder: Path, documents: int) -> None:
    """Write `text.jsonl`, `chats.jsonl` with a sixteenth as many chats, and `train.yaml`."""
    texts = [json.loads(line)["text"] for line in _lines("documents.jsonl")]
    sentences = [f"{sentence.strip()}." for text in texts for sentence in text.split(".") if len(sentence) > 8]
    turns = [message["content"] for line in _lines("chats.jsonl") for message in json.loads(line)["messages"]]
    rng = random.Random(7)
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for number in range(documents):
            length = min(int(rng.lognormvariate(2.3, 0.8)) + 1, 120)
            file.write(json.dumps({"id": number, "text": " ".join(rng.choices(sentences, k=length))}) + "\n")
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(documents // 16):
            roles = ["user", "assistant"] * rng.randrange(1, 5)
            messages = [{"role": role, "content": " ".join(rng.choices(turns, k=2))} for role in roles]
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "train.yaml").write_text(CONFIG, encoding="utf-8")


def _lines(name: str) -> list[str]:
    return (SAMPLE / name).read_text(encoding="utf-8").splitlines()
