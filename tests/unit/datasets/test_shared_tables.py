"""Token ids of competitions in a cache that machines share."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.datasets import DatasetSpec, TabularDataset
from penstock.errors import ConfigError
from penstock.files.cache import DiskCache


def test_another_machine_finds_the_token_ids_in_a_shared_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("id,name,label\n" + "".join(f"{n},x{n},{n % 2}\n" for n in range(30)))
    about = DatasetSpec(
        competition_name="small",
        dataset_path=tmp_path / "data",
        competition_type="binary",
        target_column="label",
        id_column="id",
    )
    cache = DiskCache(tmp_path / "shared")
    expected = TabularDataset(about, tokenizer="byte", cache_dir=tmp_path / "one", cache=cache).encoded()
    with monkeypatch.context() as patch:
        patch.setattr(TabularDataset, "_make_columns", lambda self: pytest.fail("made again"))
        for home in ("two", "one"):
            found = TabularDataset(about, tokenizer="byte", cache_dir=tmp_path / home, cache=cache).encoded()
            assert found.equals(expected)
    for entry in list(cache.entries()):
        if entry.key.startswith("part-"):
            cache.put(entry.key, b"damaged")
    again = TabularDataset(about, tokenizer="byte", cache_dir=tmp_path / "three", cache=cache).encoded()
    assert again.equals(expected)
    down = TabularDataset(about, tokenizer="byte", cache="redis://127.0.0.1:1/0").encoded()  # and no directory
    assert down.equals(expected)
    assert "the shared cache cannot be used" in caplog.text
    with pytest.raises(ConfigError, match="is no cache"):
        TabularDataset(about, cache="ftp://host/x")
