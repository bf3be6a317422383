"""The loader blocks of design document 001 as it prints them, with `data.` read as `penstock.`."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from penstock.datasets.sample_data import make_titanic
from penstock.datasets.titanic import TitanicDataset, titanic_spec
from penstock.errors import ConfigError
from penstock.loaders import MLXLoaderConfig

LOADER = """
    from data.loaders.mlx_loader import MLXDataLoader, MLXLoaderConfig

    # Configure the loader
    config = MLXLoaderConfig(
        batch_size=32,
        shuffle=True,
        num_workers=4,
        prefetch_size=4,
        use_unified_memory=True,
        pin_memory=True
    )

    # Create loader
    loader = MLXDataLoader(dataset, config)

    # Iterate through batches
    for batch in loader:
        # batch contains MLX arrays
        input_ids = batch['input_ids']      # mx.array
        attention_mask = batch['attention_mask']  # mx.array
        labels = batch['labels']            # mx.array
"""

STREAMING = """
    from data.loaders.streaming import StreamingPipeline, StreamingConfig

    config = StreamingConfig(
        buffer_size=1024,
        chunk_size=256,
        num_workers=4,
        target_throughput=1000  # samples/sec
    )

    pipeline = StreamingPipeline(dataset, config)
    pipeline.start()

    for sample in pipeline:
        # Process streaming data
        pass

    pipeline.stop()
"""

MEMORY = """
    from data.loaders.memory import UnifiedMemoryManager, MemoryConfig

    config = MemoryConfig(
        pool_size_mb=512,
        enable_pooling=True,
        enable_unified_memory=True
    )

    manager = UnifiedMemoryManager(config)

    # Allocate tensors from pool
    tensor = manager.allocate_tensor(shape=(32, 512), dtype=mx.float32)

    # Cache frequently used tensors
    manager.cache_tensor("embeddings", tensor)
"""

PROFILING = """
    # Enable profiling
    loader.enable_profiling()

    # Train for a few batches
    for batch in loader:
        # ... training code ...
        pass

    # Get profiling results
    profile = loader.get_profiling_results()
    print(f"Throughput: {profile['throughput_samples_per_sec']} samples/sec")
    print(f"Avg batch time: {profile['avg_batch_time_ms']} ms")
"""

USAGE = """
    from data.datasets.titanic import TitanicDataset
    from data.loaders.mlx_loader import MLXDataLoader, MLXLoaderConfig

    # Create dataset
    dataset = TitanicDataset(spec, split="train")

    # Configure loader
    config = MLXLoaderConfig(batch_size=32)

    # Create loader
    loader = MLXDataLoader(dataset, config)

    # Train your model
    for batch in loader:
        # batch contains MLX arrays ready for training
        outputs = model(batch['input_ids'], batch['attention_mask'])
        loss = compute_loss(outputs, batch['labels'])
"""

DEBUG = """
    import logging
    logging.getLogger("data").setLevel(logging.DEBUG)
"""


def run(block: str, **names: Any) -> dict[str, Any]:
    code = textwrap.dedent(block).replace("from data.", "from penstock.").replace('"data"', '"penstock"')
    exec(compile(code, "<document 001>", "exec"), names)
    return names


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_titanic(tmp_path_factory.mktemp("titanic"))


def test_the_loader_block_makes_batches_of_mlx_arrays(home: Path) -> None:
    names = run(LOADER, dataset=TitanicDataset(titanic_spec(home), split="train"))
    for name in ("input_ids", "attention_mask", "labels"):
        assert isinstance(names[name], mx.array)
    assert names["input_ids"].shape == names["attention_mask"].shape
    assert len(names["loader"]) == -(-891 // 32)
    seen = [number for batch in names["loader"] for number in batch.metadata["row"].tolist()]
    assert sorted(seen) == list(range(891))


def test_the_streaming_block_passes_every_sample(home: Path) -> None:
    dataset = TitanicDataset(titanic_spec(home), split="train")
    names = run(
        STREAMING.replace("1000  #", "1_000_000  #").replace("pass", "seen.append(sample)"), dataset=dataset, seen=[]
    )
    assert [sample["text"] for sample in names["seen"]] == dataset.texts()


def test_the_memory_block_allocates_and_keeps() -> None:
    names = run(MEMORY, mx=mx)
    with names["manager"] as manager:
        assert names["tensor"].shape == (32, 512)
        assert names["tensor"].dtype == mx.float32
        assert manager.get_tensor("embeddings") is names["tensor"]


def test_the_profiling_block_prints_figures(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.loaders.mlx_loader import MLXDataLoader

    names = run(PROFILING, loader=MLXDataLoader(TitanicDataset(titanic_spec(home))))
    assert "samples/sec" in capsys.readouterr().out
    assert names["profile"]["throughput_samples_per_sec"] > 0
    assert names["profile"]["avg_batch_time_ms"] > 0


def test_the_usage_example_trains(home: Path) -> None:
    seen: list[float] = []

    def model(ids: mx.array, mask: mx.array) -> mx.array:
        return (ids * mask).sum(axis=1).astype(mx.float32)

    def compute_loss(outputs: mx.array, labels: mx.array) -> mx.array:
        seen.append(float(mx.mean((outputs - labels) ** 2)))
        return mx.array(seen[-1])

    run(USAGE, spec=titanic_spec(home), model=model, compute_loss=compute_loss)
    assert len(seen) == -(-891 // 32)


def test_debug_logging_is_under_the_package_name(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    from penstock.loaders.mlx_loader import MLXDataLoader

    before = logging.getLogger("penstock").level
    try:
        run(DEBUG)
        next(iter(MLXDataLoader(TitanicDataset(titanic_spec(home)))))
    finally:
        logging.getLogger("penstock").setLevel(before)
    assert any(record.name.startswith("penstock.") for record in caplog.records)


def test_debug_logging_tells_what_a_loader_reads_and_when_an_epoch_ends(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "penstock"):
        run(LOADER, dataset=TitanicDataset(titanic_spec(home), split="train"))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("penstock.loaders")]
    assert any("891 samples" in line and "4 workers" in line for line in lines)
    assert any("epoch 0 ends, 28 batches" in line for line in lines)


def test_texts_are_strings(home: Path) -> None:
    texts = TitanicDataset(titanic_spec(home), split="train").texts()
    assert all("passenger" in text for text in texts)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("mlx", {"use_unified_memory": False}, "use_unified_memory=False"),
        ("torch", {"use_unified_memory": True}, "use_unified_memory=True.*'torch'"),
        ("numpy", {"use_unified_memory": True}, "use_unified_memory=True.*'numpy'"),
        ("numpy", {"pin_memory": True}, "pin_memory=True.*'numpy'"),
        ("jax", {"pin_memory": True}, "pin_memory=True.*'jax'"),
        ("numpy", {"pin_memory": 1}, "pin_memory is True, False or None, got 1"),
    ],
)
def test_memory_that_the_arrays_cannot_have_is_refused_by_name(
    backend: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        MLXLoaderConfig(backend=backend, **options)
    MLXLoaderConfig(backend=backend)


def test_torch_batches_are_pinned_where_there_is_an_accelerator_unless_that_is_refused() -> None:
    assert [
        MLXLoaderConfig(backend="torch", pin_memory=given).options().pin_memory for given in (None, True, False)
    ] == [
        True,
        True,
        False,
    ]
    assert not MLXLoaderConfig(pin_memory=True).options().pin_memory, "MLX arrays are where the GPU reads them"
