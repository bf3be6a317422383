"""Runs of trainers on loaders: tiny models, stores and what a model was given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.lazy_modules import LazyModule

from penstock import DataLoader, Pipeline
from penstock.sinks import StoreSink
from penstock.sources import MemorySource

torch = LazyModule("torch")

EXAMPLES = Path(__file__).parents[1] / "examples" / "training"
VOCABULARY = 128
Make = Callable[[], DataLoader]
Ids = list[list[int]]

# Lightning makes a leaf of torch's pytree in a way that torch has deprecated.
LEAF = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
# Lightning is resumed into the folder it wrote to.
FOLDER = pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty")


def write_stores(folder: Path) -> Path:
    """`text` has rows of tokens; `chats` knows which of them are to be learned."""
    random = np.random.default_rng(5)
    for name, rows, shortest in (("text", 60, 1), ("chats", 50, 4)):
        lengths = random.integers(shortest, 25, rows)
        ids = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
        table = {"input_ids": pa.array(ids, pa.list_(pa.uint16()))}
        if name == "chats":
            table["loss_mask"] = pa.array([[at >= 2 for at in range(length)] for length in lengths])
        Pipeline(MemorySource(pa.table(table)), [], StoreSink(folder / name)).run()
    return folder


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(array: Any) -> list[int]:
    return array.flatten().tolist()


def batches(make: Make, count: int) -> list[Any]:
    """The first so many batches of the loader by itself."""
    with make() as loader:
        return [loader.get_batch() for _ in range(count)]


def ids(make: Make, count: int) -> Ids:
    return [flat(batch.input_ids) for batch in batches(make, count)]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Hugging Face


class Witness:
    """What a model was given, call by call."""

    def __init__(self, model: Any) -> None:
        self.ids: Ids = []
        self.labels: Ids = []
        self.items: list[int] = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model: Any, args: Any, given: dict[str, Any]) -> None:
        self.ids.append(flat(given["input_ids"]))
        self.labels.append(flat(given["labels"]))
        if "num_items_in_batch" in given:
            self.items.append(int(given["num_items_in_batch"]))


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **shape))


def hf_arguments(folder: Path, steps: int, accumulate: int = 1) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "max_steps": steps,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": 1e-2,
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def run_hf(make: Make, folder: Path, steps: int, accumulate: int, **more: Any) -> tuple[Witness, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations.transformers import LoaderTrainer

    model = tiny_llama()
    witness = Witness(model)
    checkpoint = more.pop("checkpoint", None)
    args = transformers.TrainingArguments(**hf_arguments(folder, steps, accumulate), **more)
    with make() as loader:
        trainer = LoaderTrainer(model, args, train_dataset=loader)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert loader.step == steps * accumulate
    return witness, {key: value.clone() for key, value in model.state_dict().items()}
