"""Golden keys: content keys of stores, and fingerprints of plans, datasets and queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

import golden_loaders as made
from golden_digests import digest
from penstock import TextTemplateEngine, open_store

TEMPLATES = ("natural", "key_value", "markdown", "json", "list", "{Name}[ of age {Age}] in class {Pclass}")
PLANNED = ("text: concat", "text: best fit", "chats: packed", "mixed: schedule", "mixed: edited", "samples: buckets")


def keys(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("text", "chats", "pairs", "labelled"):
        with open_store(root / f"stores/{name}.store") as store:
            manifest = store.manifest
            found[f"store {name}"] = [manifest.key, manifest.tokenizer, manifest.template]
    for name in PLANNED:
        with made.LOADERS[name](root) as loader:
            found[f"plan of {name}"] = loader.plan.fingerprint
    found["titanic"] = made.titanic(root).fingerprint
    for template in TEMPLATES:
        dataset = made.table(root, template, few_shot=1)
        found[f"table {template}"] = [dataset.fingerprint, digest(dataset.texts())]
    engine = TextTemplateEngine()
    engine.load_templates(root / "templates.yaml")
    passengers = pd.read_csv(root / "titanic/train.csv")
    found["saved template"] = digest(list(engine.convert_data(data=passengers, template_name="golden")))
    return found
