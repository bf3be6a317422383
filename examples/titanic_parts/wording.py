"""Template of a passenger, and a tokenizer trained on the training texts only."""

from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from penstock.templates import ColumnFormat, SentenceTemplate
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# Short, for a small model on a CPU. Names are omitted: the model would memorise all 700.
TEMPLATE = SentenceTemplate(
    "titanic_short",
    "{Sex}, {Pclass} class[, {Age:.0f} years], {SibSp} siblings, {Parch} parents[, {Fare:.0f} pounds]"
    "[, cabin {Cabin}][, from {Embarked}]",
    columns={
        "Pclass": ColumnFormat(categories={1: "first", 2: "second", 3: "third"}),
        "Embarked": ColumnFormat(categories={"S": "Southampton", "C": "Cherbourg", "Q": "Queenstown"}),
    },
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = 300) -> Tokenizer:
    """WordPiece as BERT has it: lower case, the commonest words whole, others letter by letter.

    The trainer that comes with `tokenizers` breaks ties differently in every process; this one does not.
    """
    lower, split = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for text in texts for word, _ in split.pre_tokenize_str(lower.normalize_str(text)))
    letters = sorted(set().union(*words))
    common = sorted(words, key=lambda word: (-words[word], word))
    tokens = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *common])
    ids = {token: number for number, token in enumerate(list(tokens)[:vocabulary])}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = lower, split
    made.add_special_tokens(SPECIAL)
    return load_tokenizer(made, fast=False)  # the fast tokenizer does not support WordPiece
