"""A training batch: the same in every framework, a mapping where one is expected, and honest when packed."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.backends import BACKENDS, get_backend
from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError, DataError, SchemaError

HOMES = {"numpy": "numpy", "torch": "torch", "mlx": "mlx.core", "jax": "jax"}
INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(HOMES[name].partition(".")[0]) is not None]
KEYWORDS = ["input_ids", "attention_mask", "labels", "position_ids"]
FLASH = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]


def packed_arrays(rows: list[list[int]], tokens: int, *, mask: bool = True) -> dict[str, Any]:
    """Rows of documents of these lengths, padded behind; token by token, as the table of fields has it."""
    count, starts = 1, [0]
    shape = (len(rows), tokens)
    found: dict[str, Any] = {key: np.zeros(shape, np.int64) for key in ("input_ids", "position_ids", "attention_mask")}
    found |= {"labels": np.full(shape, -100, np.int64), "document_ids": np.zeros(shape, np.int32)}
    for row, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths, 1):
            for place in range(length):
                found["input_ids"][row, at] = count
                found["position_ids"][row, at] = place
                found["labels"][row, at] = count if place else -100
                found["document_ids"][row, at] = number
                found["attention_mask"][row, at] = 1
                at, count = at + 1, count + 1
            starts.append(row * tokens + at)
        if at < tokens:
            found["position_ids"][row, at:] = np.arange(tokens - at)
            starts.append((row + 1) * tokens)
    found["cu_seqlens"] = np.array(starts, np.int32)
    found["max_seqlen"] = int(np.diff(starts).max())
    found["num_items_in_batch"] = int((found["labels"] != -100).sum())
    return found if mask else {key: value for key, value in found.items() if key != "attention_mask"}


def padded_arrays() -> dict[str, Any]:
    """Two rows, one document each, the second with padding."""
    found = packed_arrays([[4], [3]], 4)
    return {key: found[key] for key in KEYWORDS}


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, tokens), min_size=1)))
        rows.append([int(length) for length in np.diff([0, *cuts])])
    found = packed_arrays(rows, tokens, mask=draw(st.booleans()))
    kept = draw(st.sets(st.sampled_from(sorted(found))))
    found = {key: value for key, value in found.items() if key in kept | {"input_ids"}}
    if draw(st.booleans()):
        found["loss_mask"] = draw(st.sampled_from([np.bool_, np.float32, np.uint8]))(found["input_ids"] % 2)
    return found


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(HOMES[request.param])
    return str(request.param)


@settings(max_examples=25, deadline=None)
@given(arrays=batches())
def test_every_framework_holds_the_same_bytes(arrays: dict[str, Any]) -> None:
    for name in INSTALLED:
        batch = TrainingBatch.from_numpy({key: copy.copy(value) for key, value in arrays.items()}, backend=name)
        assert batch.backend.name == name
        found = batch.to_numpy()
        assert found.keys() == arrays.keys() | ({"max_seqlen"} if "cu_seqlens" in arrays else set())
        for key, value in arrays.items():
            if isinstance(value, int):
                assert found[key] == value
            else:
                assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
                assert found[key].tobytes() == value.tobytes()


def test_narrow_token_ids_become_what_the_framework_wants(backend: str) -> None:
    arrays = {key: value.astype(np.int16) for key, value in padded_arrays().items()}
    batch = TrainingBatch.from_numpy(arrays, backend=backend)
    wanted = "int64" if backend in ("numpy", "torch") else "int32"
    assert {str(batch[key].dtype).rpartition(".")[2] for key in KEYWORDS} == {wanted}
    assert batch.to_numpy()["labels"].tolist() == arrays["labels"].tolist()


def test_ids_too_large_for_the_framework_are_refused() -> None:
    pytest.importorskip("jax")
    with pytest.raises(DataError, match=r"input_ids.*\bint32\b"):
        TrainingBatch.from_numpy({"input_ids": np.array([[1, 2**33]])}, backend="jax")


def test_torch_shares_memory_with_the_arrays_it_was_made_of() -> None:
    pytest.importorskip("torch")
    arrays = packed_arrays([[2, 2]], 4)
    batch = TrainingBatch.from_numpy(arrays)
    for key in ("input_ids", "labels", "position_ids", "attention_mask", "document_ids", "cu_seqlens"):
        assert np.shares_memory(arrays[key], getattr(batch, key).numpy()), key


def test_the_fields_of_the_dataclass_come_in_their_promised_order() -> None:
    ids, mask, labels, loss = (np.full((1, 2), i) for i in range(4))
    batch = TrainingBatch(ids, mask, labels, loss, {"step": 3})
    assert is_dataclass(batch)
    assert (batch.input_ids, batch.attention_mask, batch.labels, batch.loss_mask) == (ids, mask, labels, loss)
    assert batch.metadata == {"step": 3}
    assert batch.position_ids is batch.cu_seqlens is batch.max_seqlen is batch.document_ids is None


def test_only_tokens_that_are_not_padding_count(backend: str) -> None:
    arrays = packed_arrays([[3, 2], [4]], 6)
    only = {"input_ids": arrays["input_ids"]}
    for key in ("attention_mask", "document_ids"):
        assert TrainingBatch.from_numpy(only | {key: arrays[key]}, backend=backend).num_tokens == 9
    assert TrainingBatch.from_numpy(only, backend=backend).num_tokens == 12
    assert TrainingBatch.from_numpy(arrays, backend=backend, num_tokens=7).to("cpu").num_tokens == 7


def test_a_known_count_is_forgotten_when_its_tokens_change() -> None:
    batch = TrainingBatch.from_numpy(padded_arrays(), backend="numpy", num_tokens=7)
    batch["attention_mask"] = np.ones((2, 4))
    assert batch.num_tokens == 8


def test_bytes_are_those_of_all_arrays(backend: str) -> None:
    arrays = packed_arrays([[3, 2], [4]], 6)
    batch = TrainingBatch.from_numpy(arrays, {"row": np.zeros(5, np.int64), "step": 1}, backend)
    wide = 8 if backend in ("numpy", "torch") else 4
    assert batch.nbytes == 12 * (4 * wide + 4) + 4 * len(arrays["cu_seqlens"]) + 40


def test_the_text_of_a_batch_is_short(backend: str) -> None:
    batch = TrainingBatch.from_numpy({"input_ids": np.zeros((8, 512), np.int32)}, {"step": 1, "row": [0]}, backend)
    wide = "int64" if backend in ("numpy", "torch") else "int32"
    assert repr(batch) == f"TrainingBatch({backend}, input_ids={wide}[8, 512], metadata=['row', 'step'])"


def test_padded_batches_give_a_model_their_mask(backend: str) -> None:
    batch = TrainingBatch.from_numpy(padded_arrays(), {"step": 0}, backend)
    assert list(batch.as_dict()) == KEYWORDS
    assert all(batch.as_dict()[key] is getattr(batch, key) for key in KEYWORDS)


@pytest.mark.parametrize("mask", [True, False])
def test_packed_batches_say_where_documents_begin_and_give_no_mask(backend: str, mask: bool) -> None:
    arrays = packed_arrays([[3, 2], [4]], 6, mask=mask)
    batch = TrainingBatch.from_numpy(arrays, {"step": 0}, backend)
    found = batch.as_dict()
    assert sorted(found) == sorted(["input_ids", "labels", "position_ids", "use_cache", *FLASH])
    assert np.array_equal(np.asarray(found["cu_seq_lens_q"]), [0, 3, 5, 6, 10, 12])
    assert found["cu_seq_lens_k"] is found["cu_seq_lens_q"]
    assert str(found["cu_seq_lens_q"].dtype).endswith("int32")
    assert (found["max_length_q"], found["max_length_k"], found["use_cache"]) == (4, 4, False)
    assert type(found["max_length_q"]) is int


def test_the_longest_document_is_found_if_nobody_said() -> None:
    arrays = packed_arrays([[3, 2], [4]], 6)
    del arrays["max_seqlen"]
    assert TrainingBatch.from_numpy(arrays, backend="numpy").max_seqlen == 4
    direct = TrainingBatch(arrays["input_ids"], cu_seqlens=arrays["cu_seqlens"])
    assert direct.as_dict()["max_length_q"] == 4


def test_the_number_to_divide_by_is_added_when_asked_for() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2]], 5), backend="numpy")
    assert "num_items_in_batch" not in batch.as_dict()
    assert batch.as_dict(num_items_in_batch=True)["num_items_in_batch"] == 3


def test_metadata_and_the_loss_mask_are_never_given_to_a_model() -> None:
    arrays = padded_arrays() | {"loss_mask": np.ones((2, 4), bool)}
    batch = TrainingBatch.from_numpy(arrays, {"row": [1]}, "numpy")
    assert not {"metadata", "loss_mask", "document_ids"} & set(batch.as_dict())
    assert batch["metadata"] == {"row": [1]}
    assert batch["loss_mask"].all()


def test_a_block_mask_takes_the_place_of_boundaries(backend: str) -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), backend=backend)
    found = batch.as_dict(block_mask="bool")
    assert sorted(found) == sorted(KEYWORDS)
    mask = np.asarray(found["attention_mask"])
    assert (mask.shape, mask.dtype) == ((2, 1, 6, 6), np.bool_)
    assert mask[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_rows_of_one_document_need_no_document_ids_for_a_block_mask() -> None:
    mask = TrainingBatch.from_numpy(padded_arrays(), backend="numpy").block_mask()
    assert mask[1, 0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]


def test_a_block_mask_without_anything_to_go_by_is_an_error() -> None:
    arrays = packed_arrays([[3, 2]], 5)
    del arrays["document_ids"]
    with pytest.raises(ConfigError, match=r"block_mask.*document_ids"):
        TrainingBatch.from_numpy(arrays, backend="numpy").block_mask()


def test_it_is_a_mapping_of_a_models_keywords() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2]], 5), {"step": 0}, "numpy")
    assert isinstance(batch, MutableMapping)
    assert list(batch) == list(batch.keys()) == list(batch.as_dict()) == list({**batch})
    assert len(batch) == len(batch.as_dict())
    assert batch.batch_size == 1
    assert "labels" in batch
    assert "rewards" not in batch
    assert batch.get("rewards", 5) == 5
    with pytest.raises(KeyError, match="rewards"):
        batch["rewards"]
    with pytest.raises(KeyError, match="loss_mask"):
        batch["loss_mask"]


def test_the_first_key_has_the_rows_of_the_batch() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), backend="numpy")
    assert next(iter(batch)) == "input_ids"


def test_keys_can_be_assigned_and_taken_away() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), backend="numpy")
    labels = batch.labels
    assert batch.pop("labels") is labels
    assert batch.labels is None
    assert "labels" not in batch
    batch["labels"] = labels
    assert batch.labels is labels
    batch["shift_labels"] = labels
    assert batch.as_dict()["shift_labels"] is labels
    del batch["shift_labels"]
    assert "shift_labels" not in batch
    with pytest.raises(KeyError, match="shift_labels"):
        del batch["shift_labels"]


def test_a_keyword_a_model_does_not_take_can_be_taken_away_alone() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), backend="numpy")
    assert batch.pop("use_cache") is False
    assert batch.pop("max_length_q") == 4
    # The mask does not come back: it would let documents see each other.
    assert not {"use_cache", "max_length_q", "attention_mask"} & set(batch)
    assert {"cu_seq_lens_q", "max_length_k"} <= set(batch)
    batch["use_cache"] = True
    assert batch.as_dict()["use_cache"] is True
    batch.clear()
    assert list(batch) == []


def test_a_mask_of_four_dimensions_is_given_although_rows_are_packed() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2]], 6), backend="numpy")
    batch["attention_mask"] = batch.block_mask()
    assert batch.as_dict()["attention_mask"] is batch.attention_mask


@pytest.mark.parametrize("form", [dict, OrderedDict, lambda items: iter(list(items))])
def test_trainers_rebuild_it_from_its_own_items(form: Any) -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"step": 1}, "numpy")
    batch["shift_labels"] = batch.labels
    again = type(batch)(form(batch.items()))
    assert list(again) == list(batch)
    assert all(again[key] is batch[key] for key in batch)
    assert (again.max_seqlen, again.cu_seqlens is batch.cu_seqlens) == (4, True)


def test_a_copy_can_be_changed_without_the_original() -> None:
    batch = TrainingBatch.from_numpy(padded_arrays(), {"step": 1}, "numpy")
    batch["extra"] = 1
    other = copy.copy(batch)
    other["extra"], other["labels"], other.metadata["step"] = 2, None, 5
    del other["position_ids"]
    assert (batch["extra"], batch.metadata, len(batch)) == (1, {"step": 1}, 5)
    assert batch.input_ids is other.input_ids


def test_batches_compare_by_identity_so_they_can_be_kept_in_lists_and_sets() -> None:
    one, other = (TrainingBatch.from_numpy(padded_arrays(), backend="numpy") for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2
    assert [one, other].index(other) == 1


def test_pickling_keeps_all_of_it() -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"sources": ["a"]}, "numpy", num_tokens=9)
    again = pickle.loads(pickle.dumps(batch))  # noqa: S301
    assert repr(again) == repr(batch)
    assert (again.num_tokens, again.metadata) == (9, {"sources": ["a"]})
    assert np.array_equal(again.labels, batch.labels)


def test_moving_leaves_metadata_and_takes_everything_else(backend: str) -> None:
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"row": np.arange(3)}, backend, num_tokens=9)
    batch["shift_labels"], batch["note"] = batch.labels, "kept"
    moved = batch.to("cpu", non_blocking=True)
    assert isinstance(moved, TrainingBatch)
    assert moved.metadata["row"] is batch.metadata["row"]
    assert (moved["note"], moved.num_tokens, moved.num_items_in_batch) == ("kept", 9, batch.num_items_in_batch)
    assert list(moved) == list(batch)
    before, after = batch.to_numpy(), moved.to_numpy()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_moving_really_moves() -> None:
    torch = pytest.importorskip("torch")
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"row": np.arange(3)})
    batch["shift_labels"] = batch.labels
    moved = batch.to(torch.device("meta"))
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.document_ids.device.type == "meta"
    assert batch.input_ids.device.type == "cpu"
    assert {t.device.type for t in TrainingBatch.from_numpy(padded_arrays(), device="meta").values()} == {"meta"}


def test_arrays_of_numpy_go_to_no_other_device() -> None:
    batch = TrainingBatch.from_numpy(padded_arrays(), backend="numpy")
    with pytest.raises(ConfigError, match=r"'cpu'.*'cuda'"):
        batch.to("cuda")


def test_pinning_is_harmless_without_an_accelerator(backend: str) -> None:
    if backend == "torch" and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is an accelerator")
    batch = TrainingBatch.from_numpy(padded_arrays(), backend=backend)
    assert batch.pin_memory() is batch


def test_pinning_pins_every_tensor_and_keeps_the_rest() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2]], 6), {"step": 1}, num_tokens=5).pin_memory()
    assert all(value.is_pinned() for value in batch.values() if isinstance(value, torch.Tensor))
    assert batch.document_ids.is_pinned()
    assert batch.pin_memory() is batch
    there = batch.to("cuda", non_blocking=True)
    assert there.input_ids.is_cuda
    assert there.to_numpy()["input_ids"].tolist() == batch.input_ids.tolist()


def test_the_functions_of_torchs_own_loader_keep_it_whole() -> None:
    pytest.importorskip("torch")
    from torch.utils.data._utils.collate import default_convert
    from torch.utils.data._utils.pin_memory import pin_memory

    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"step": 1}, "numpy")
    for changed in (default_convert(batch), pin_memory(default_convert(batch))):
        assert isinstance(changed, TrainingBatch)
        assert changed.metadata == {"step": 1}
        assert changed.backend.name == "torch"
        assert list(changed) == list(batch)
        assert changed.labels.tolist() == batch.labels.tolist()
    assert batch.backend.name == "numpy"


def test_torch_saves_it_and_loads_it() -> None:
    torch = pytest.importorskip("torch")
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"step": 1})
    kept = io.BytesIO()
    torch.save(batch, kept)
    kept.seek(0)
    again = torch.load(kept, weights_only=False)
    assert repr(again) == repr(batch)
    assert torch.equal(again.labels, batch.labels)


def test_accelerate_moves_it_and_finds_its_rows() -> None:
    pytest.importorskip("torch")
    operations = pytest.importorskip("accelerate.utils.operations")
    batch = TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6), {"step": 1})
    moved = operations.send_to_device(batch, "meta", non_blocking=True)
    assert (type(moved), moved.labels.device.type, moved.metadata) == (TrainingBatch, "meta", {"step": 1})
    assert operations.find_batch_size(batch) == 2


def tiny_model(kind: str, attention: str) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
        )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("gpt2", "eager")])
def test_a_model_sees_packed_documents_as_if_each_were_alone(kind: str, attention: str) -> None:
    torch = pytest.importorskip("torch")
    model = tiny_model(kind, attention)
    rows, tokens = [[5, 1, 3], [2, 6], [9]], 10
    batch = TrainingBatch.from_numpy(packed_arrays(rows, tokens))
    ways: list[Mapping[str, Any]] = [batch, batch.as_dict(block_mask="float32")]
    ways += [batch.as_dict(block_mask="bool")] if attention == "sdpa" else []  # eager attention adds its mask
    with torch.no_grad():
        found = [model(**way).logits for way in ways]
        for row, lengths in enumerate(rows):
            for end, length in zip(np.cumsum(lengths), lengths):
                place = slice(end - length, end)
                alone = model(input_ids=batch.input_ids[row : row + 1, place]).logits[0]
                for logits in found:
                    torch.testing.assert_close(logits[row, place], alone, rtol=1e-5, atol=1e-5)


def test_a_mask_would_let_packed_documents_see_each_other() -> None:
    """Why `as_dict` leaves it out; if this fails, transformers has learned to tell documents apart with a mask."""
    torch = pytest.importorskip("torch")
    model = tiny_model("llama", "sdpa")
    batch = TrainingBatch.from_numpy(packed_arrays([[5, 4]], 9))
    with torch.no_grad():
        apart = model(**batch).logits[0, 5:]
        mixed = model(**batch.as_dict() | {"attention_mask": batch.attention_mask}).logits[0, 5:]
    assert (apart - mixed).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": None}, SchemaError, "input_ids"),
        ({"input_ids": np.zeros(6, np.int64)}, SchemaError, "input_ids"),
        ({"labels": np.zeros((2, 5), np.int64)}, SchemaError, "labels"),
        ({"cu_seqlens": np.array([0, 3, 9], np.int32)}, SchemaError, r"\b0\b.*\b12\b"),
        ({"cu_seqlens": np.array([1, 12], np.int32)}, SchemaError, r"\b0\b.*\b12\b"),
        ({"cu_seqlens": np.zeros(0, np.int32)}, SchemaError, "cu_seqlens"),
        ({"cu_seqlens": np.zeros((2, 2), np.int32)}, SchemaError, "cu_seqlens"),
        ({"label": np.zeros((2, 6))}, ConfigError, r"'label'.*'labels'"),
    ],
)
def test_arrays_that_disagree_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingBatch.from_numpy(packed_arrays([[3, 2], [4]], 6) | change, backend="numpy")


def test_a_batch_of_collated_arrays_has_all_that_others_have() -> None:
    arrays = {"input_ids": np.ones((2, 3), np.int64), "max_seqlen": 3}
    batch = TrainingBatch.of_collated(arrays, {}, get_backend("numpy"), 6)
    assert vars(batch).keys() >= vars(TrainingBatch()).keys()
    assert batch.num_tokens == 6
    assert batch["input_ids"].shape == (2, 3)
