"""Make this sample: documents, chats, pairs of answers, and a small tokenizer trained on them.

    python examples/sample/make.py

The files are in the repository; run this only to change them. Everything in them is made up here.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

HERE = Path(__file__).parent

NOUNS = [
    "penstock",
    "turbine",
    "gate",
    "spillway",
    "channel",
    "generator",
    "reservoir",
    "valley",
    "river",
    "harbour",
    "engineer",
    "report",
    "gauge",
    "flood",
    "winter",
    "morning",
    "fisherman",
    "bridge",
    "mill",
    "pump",
    "pipe",
    "valve",
    "storm",
    "village",
    "lamp",
    "cable",
    "road",
    "meadow",
    "boat",
    "letter",
    "machine",
    "bearing",
    "shaft",
    "ladder",
    "map",
    "crew",
    "bell",
    "tunnel",
    "fence",
    "ditch",
    "lock",
    "ferry",
    "basin",
    "shore",
    "mountain",
    "glacier",
    "forest",
    "clerk",
    "museum",
    "school",
]
QUALITIES = [
    "old",
    "quiet",
    "narrow",
    "heavy",
    "northern",
    "shallow",
    "wooden",
    "broken",
    "patient",
    "bright",
    "frozen",
    "hidden",
    "careful",
    "small",
    "distant",
    "muddy",
    "rusty",
    "steep",
    "warm",
    "early",
    "late",
    "stubborn",
    "hollow",
    "honest",
    "pale",
    "rough",
    "slow",
    "steady",
    "sudden",
    "tidy",
    "useful",
    "weary",
    "wild",
    "young",
]
DEEDS = [
    "carries",
    "follows",
    "repairs",
    "remembers",
    "crosses",
    "measures",
    "lifts",
    "surrounds",
    "warns",
    "feeds",
    "holds",
    "moves",
    "shelters",
    "watches",
    "empties",
    "fills",
    "paints",
    "explains",
    "questions",
    "counts",
    "avoids",
    "reaches",
    "guards",
    "replaces",
    "supports",
    "forgets",
    "joins",
    "leaves",
    "needs",
    "shows",
]
LINKS = [
    "because",
    "while",
    "although",
    "until",
    "before",
    "after",
    "whenever",
    "since",
    "so",
    "unless",
    "where",
    "and",
    "but",
]
TIMES = [
    "every evening", "in the spring", "after the flood", "long ago", "without any hurry", "by hand", "twice a year",
    "before sunrise", "with great care", "against the wind", "near the coast", "as planned", "for the last time",
    "under thick ice", "at the same hour", "with a borrowed rope", "in plain sight", "for no clear reason",
]  # fmt: skip
QUESTIONS = [
    ("What is a penstock?", "A pipe with a gate that feeds water to a turbine."),
    ("Why does it need a gate?", "So that it never carries more water than the turbine can take."),
    ("Qu'est-ce qu'une vanne ?", "Une porte qui règle le débit de l'eau."),
    ("How much water flows through it?", "As much as the reservoir gives and the gate lets pass."),
    ("Is it loud? 🌊", "Near the turbine it is. In the valley you hear nothing."),
    ("水はどこから来ますか", "山の雪から来ます。"),
    ("When was it built?", "In the year the old mill closed."),
    ("Who opens the gate?", "The engineer on duty, every morning at six."),
]


def clause(draw: random.Random) -> str:
    one, other = draw.sample(NOUNS, 2)
    first = f"the {draw.choice(QUALITIES)} {one}" if draw.random() < 0.6 else f"the {one}"
    second = f"a {draw.choice(QUALITIES)} {other}" if draw.random() < 0.5 else f"the {other}"
    return f"{first} {draw.choice(DEEDS)} {second}" + (f" {draw.choice(TIMES)}" if draw.random() < 0.5 else "")


def report(draw: random.Random) -> str:
    sentences = []
    for _ in range(draw.randint(8, 16)):
        text = f"{clause(draw)} {draw.choice(LINKS)} {clause(draw)}" if draw.random() < 0.6 else clause(draw)
        sentences.append(text[0].upper() + text[1:] + ".")
    sentences.append("That is all there is to say, and it has to be read with the map at hand.")
    return " ".join(sentences)


def documents(draw: random.Random) -> list[dict[str, str]]:
    """Short reports; one of them twice, one nearly twice, and two that are no prose."""
    rows = [{"id": f"report-{number}", "text": report(draw)} for number in range(60)]
    rows.append({"id": "copy", "text": rows[3]["text"]})
    words = rows[5]["text"].split()
    words[10] = "perhaps"
    rows.append({"id": "near-copy", "text": " ".join(words)})
    rows.append({"id": "noise", "text": "## ## ## ... ... click here | click here | click here"})
    rows.append({"id": "refrain", "text": "The gate is open. " * 40})
    return rows


def chats(draw: random.Random) -> list[dict[str, object]]:
    """Conversations of one to three turns; one with a tool."""
    rows: list[dict[str, object]] = []
    for number in range(24):
        messages = []
        if number % 3 == 0:
            messages.append({"role": "system", "content": "Answer in one sentence."})
        for question, answer in draw.sample(QUESTIONS, draw.randint(1, 3)):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"id": number, "messages": messages})
    return rows


def pairs() -> list[dict[str, object]]:
    """Questions with their answer, and with that of another question."""
    others = [*QUESTIONS[1:], QUESTIONS[0]]
    return [
        {"prompt": question, "chosen": answer, "rejected": other}
        for (question, answer), (_, other) in zip(QUESTIONS, others)
    ]


def files() -> dict[str, str]:
    """The data, by file name: the same on every machine."""
    draw = random.Random(20)
    rows = {"documents.jsonl": documents(draw), "chats.jsonl": chats(draw), "pairs.jsonl": pairs()}
    return {name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made) for name, made in rows.items()}


def main() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    (HERE / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8")
    texts = [json.loads(line) for line in files()["documents.jsonl"].splitlines()]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = itertools.chain.from_iterable(QUESTIONS)
    tokenizer.train_from_iterator([*(row["text"] for row in texts), *said], trainer)
    tokenizer.save(str(HERE / "tokenizer" / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 2048}
    (HERE / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
