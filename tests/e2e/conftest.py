"""Fixtures of runs of trainers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lazy_modules import LazyModule
from tests.trainer_runs import Make, write_stores

from penstock import ConversationDataLoader, MixedDataLoader, PretrainDataLoader

torch = LazyModule("torch")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are no faster on two, and several processes run at once here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`text` has rows of tokens; `chats` knows which of them are to be learned."""
    return write_stores(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def chopped(stores: Path) -> Make:
    return lambda: PretrainDataLoader(stores / "text", chunk_size=16, batch_size=4)


@pytest.fixture
def packed(stores: Path) -> Make:
    return lambda: ConversationDataLoader(
        stores / "chats", max_length=32, packing="best_fit", padding_free=True, batch_size=3
    )


@pytest.fixture
def mixed(stores: Path) -> Make:
    return lambda: MixedDataLoader(
        {"text": stores / "text", "chats": stores / "chats"}, {"text": 0.7, "chats": 0.3}, chunk_size=16, batch_size=6
    )
