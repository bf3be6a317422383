"""A batch of rollouts: the same in every framework, moved as a whole, cut into parts, and seen as others name it."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged
from penstock.batching.backends import BACKENDS, get_backend
from penstock.batching.collate import FIELDS
from penstock.errors import ConfigError
from penstock.rl.batch import RolloutBatch
from penstock.rl.collate import RolloutForm, SupervisedTokens, assemble
from penstock.rl.rollout import RolloutTable
from rollout_tables import make_table, tables

HOMES = {"numpy": "numpy", "torch": "torch", "mlx": "mlx.core", "jax": "jax"}
INSTALLED = [name for name in BACKENDS if importlib.util.find_spec(HOMES[name].partition(".")[0]) is not None]
LENGTHS = [(2, 4), (5, 1), (1, 6), (3, 3)]


def make_batch(table: RolloutTable, backend: str = "numpy", *, deferred: bool = False, **options: Any) -> RolloutBatch:
    """A batch of all rollouts, with everything that a loader computes."""
    chosen = get_backend(backend)
    form = RolloutForm(integer=chosen.integer, **options)
    rng = np.random.default_rng(5)
    columns = {
        name: Ragged(rng.normal(size=len(table.response_ids.values)).astype(np.float32), table.response_ids.offsets)
        for name in ("advantages", "returns")
    }
    denominators = {"denominators": np.arange(1, len(table) + 1, dtype=np.float64)}
    arrays, metadata = assemble(
        table, form, per_token=columns, per_row=denominators, num_items_in_batch=77, deferred=deferred
    )
    return RolloutBatch.from_numpy(arrays, metadata, chosen)


def host(batch: RolloutBatch) -> dict[str, Any]:
    """Everything in a batch, in NumPy, by name."""
    own, found = batch.backend, batch.to_numpy()
    for name, value in batch.metadata.items():
        found[name] = own.to_numpy(value) if hasattr(value, "shape") else value
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        exact = other.astype(one.dtype)
        return one.shape == other.shape and one.tobytes() == exact.tobytes()
    return bool(one == other)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(HOMES[request.param])
    return str(request.param)


@settings(max_examples=20, deadline=None)
@given(table=tables(max_rows=4), padding=st.sampled_from(["sides", "free"]))
def test_every_framework_holds_the_same_bits(table: RolloutTable, padding: str) -> None:
    expected = host(make_batch(table, padding=padding))
    for name in INSTALLED:
        batch = make_batch(table, name, padding=padding)
        kind = type(batch.input_ids)
        found = host(batch)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert key == "layout" or same(found[key], value), key
            assert not isinstance(value, np.ndarray) or isinstance(batch.metadata.get(key, batch.input_ids), kind)


@settings(max_examples=40, deadline=None)
@given(
    table=tables(max_rows=8),
    padding=st.sampled_from(["sides", "free"]),
    multiple=st.sampled_from([1, 4]),
    max_tokens=st.integers(24, 60),
)
def test_micro_batches_are_what_would_be_made_of_their_rows(
    table: RolloutTable, padding: str, multiple: int, max_tokens: int
) -> None:
    batch = make_batch(table, padding=padding, pad_to_multiple_of=multiple, pad_id=3)
    parts = batch.micro_batches(max_tokens)
    names = [name for part in parts for name in part.ids]
    assert sorted(names) == sorted(batch.ids)
    whole, numbers = batch.metadata, {name: row for row, name in enumerate(batch.ids)}
    for part in parts:
        rows = [numbers[name] for name in part.ids]
        smaller = table.take(rows)
        expected = host(make_batch(smaller, padding=padding, pad_to_multiple_of=multiple, pad_id=3))
        found = host(part)
        assert found.keys() == expected.keys()
        for key in found.keys() - {"advantages", "returns", "denominators", "layout"}:
            assert same(found[key], expected[key]), key
        assert found["layout"] == expected["layout"]
        assert part.input_ids.size <= max_tokens
        assert part.num_items_in_batch == 77
        assert part.num_tokens == int(smaller.lengths.sum())
        if padding == "sides":
            assert part.metadata["denominators"].tolist() == whole["denominators"][rows].tolist()
        else:
            divisors = np.repeat(np.array(rows) + 1.0, smaller.response_ids.lengths)
            learned = part.metadata["response_mask"]
            inside = np.concatenate([table.loss_mask[row] for row in rows])
            assert part.metadata["denominators"].shape == learned.shape
            assert part.metadata["denominators"][learned].tolist() == divisors[inside].tolist()
            assert part.metadata["denominators"].min() >= 1
    total = sum(float(np.abs(part.metadata["advantages"]).sum()) for part in parts)
    assert total == pytest.approx(float(np.abs(whole["advantages"]).sum()), rel=1e-5)


@pytest.mark.parametrize("padding", ["sides", "free"])
def test_micro_batches_are_of_the_same_framework(backend: str, padding: str) -> None:
    table = make_table(LENGTHS)
    expected = make_batch(table, padding=padding, pad_to_multiple_of=4, pad_id=3).micro_batches(24)
    found = make_batch(table, backend, padding=padding, pad_to_multiple_of=4, pad_id=3).micro_batches(24)
    assert len(found) > 1
    for one, other in zip(expected, found, strict=True):
        assert type(other.input_ids).__module__.partition(".")[0] in (backend, f"{backend}lib")
        left, right = host(one), host(other)
        assert all(key == "layout" or same(right[key], value) for key, value in left.items())


def test_ranks_that_need_as_many_micro_batches_as_others_get_them() -> None:
    batch = make_batch(make_table(LENGTHS))
    assert len(batch.micro_batches(1000)) == 1
    assert len(batch.micro_batches(1000, at_least=3)) == 3


@pytest.mark.parametrize("padding", ["sides", "free"])
def test_what_is_taken_of_no_rollouts_is_one_that_teaches_nothing(backend: str, padding: str) -> None:
    batch = make_batch(make_table(LENGTHS), backend, padding=padding, fields=frozenset(FIELDS))
    before = host(batch)
    parts = batch.micro_batches(1000, at_least=6)
    assert [part.num_rollouts for part in parts] == [1] * 6
    assert [bool(part.metadata.get("blank")) for part in parts] == [False] * 4 + [True] * 2
    blank, shortest = host(parts[-1]), host(batch.take([0]))
    assert not any(blank[name].any() for name in ("response_mask", "loss_mask", "advantages", "returns"))
    assert (blank["labels"] == -100).all()
    assert (blank["denominators"] == 1).all()
    assert all(same(blank[name], shortest[name]) for name in ("input_ids", "position_ids", "old_log_probs", "ids"))
    assert all(same(value, before[name]) for name, value in host(batch).items() if name != "layout")


def test_micro_batches_are_those_of_the_loader_unless_others_are_asked_for() -> None:
    batch = make_batch(make_table(LENGTHS))
    with pytest.raises(ConfigError, match="max_tokens"):
        batch.micro_batches()
    batch.metadata["micro_batches"] = [[3], [2, 0, 1]]
    parts = batch.micro_batches()
    assert [part.ids for part in parts] == [["r3"], ["r2", "r0", "r1"]]
    assert all("micro_batches" not in part.metadata for part in parts)
    assert len(batch.micro_batches(1000)) == 1


def test_moving_a_batch_moves_what_rl_computes_with() -> None:
    torch = pytest.importorskip("torch")
    batch = make_batch(make_table(LENGTHS), "torch")
    batch.metadata["note"] = np.zeros(3)  # somebody else's: stays where it is
    moved = batch.to("meta")
    assert isinstance(moved, RolloutBatch)
    tensors = {key: value for key, value in moved.metadata.items() if isinstance(value, torch.Tensor)}
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert {"advantages", "response_mask", "rewards", "denominators", "prompt_length"} < tensors.keys()
    assert moved.metadata["note"] is batch.metadata["note"]
    assert batch.metadata["advantages"].device.type == "cpu"
    assert moved.responses.device.type == "meta"


def test_pinning_pins_what_rl_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    batch = make_batch(make_table(LENGTHS), "torch")
    chosen = get_backend("torch")
    monkeypatch.setattr(chosen, "pin_memory", lambda tensor: tensor.clone())
    pinned = batch.pin_memory()
    assert pinned.advantages is not batch.advantages
    assert torch.equal(pinned.advantages, batch.advantages)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert batch.pin_memory() is batch


def test_copies_and_pickles_are_whole(backend: str) -> None:
    batch = make_batch(make_table(LENGTHS), backend)
    others = [copy.copy(batch)]
    if backend in ("numpy", "torch"):
        others.append(pickle.loads(pickle.dumps(batch)))  # noqa: S301
    for other in others:
        assert isinstance(other, RolloutBatch)
        assert all(same(value, host(other)[key]) for key, value in host(batch).items())
    assert repr(batch).startswith(f"RolloutBatch({backend}")


def test_the_mapping_is_still_the_keywords_of_a_model() -> None:
    batch = make_batch(make_table(LENGTHS))
    assert list(batch) == ["input_ids", "attention_mask", "labels", "position_ids"]
    assert [value.shape for value in batch.values()] == [batch.input_ids.shape] * 4
    assert batch.metadata["values"].shape == batch.response_mask.shape


def test_prompts_and_responses_are_the_two_sides(backend: str) -> None:
    batch = make_batch(make_table(LENGTHS), backend)
    assert tuple(batch.prompts.shape) == (4, 5)
    assert tuple(batch.responses.shape) == tuple(batch.response_mask.shape) == (4, 6)
    assert batch.num_rollouts == 4
    assert batch.num_tokens == 25
    assert batch.groups == ["g0", "g0", "g1", "g1"]
    for name in ("rewards", "denominators"):
        assert tuple(getattr(batch, name).shape) == (4,)
    for name in ("policy_versions", "prompt_length", "response_length"):
        assert tuple(batch.metadata[name].shape) == (4,)
    for name in ("advantages", "returns", "old_log_probs", "ref_log_probs"):
        assert tuple(getattr(batch, name).shape) == (4, 6)
    assert batch.token_rewards is None


def test_verl_finds_what_it_looks_for(backend: str) -> None:
    table = make_table(LENGTHS)
    batch = make_batch(table, backend)
    view, own = batch.as_verl(), batch.backend
    tokenwise = {
        "responses",
        "response_mask",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_prob",
        "values",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
    }
    assert view.keys() == {"prompts", "input_ids", "attention_mask", "position_ids", "uid", *tokenwise}
    assert {tuple(view[name].shape) for name in tokenwise} == {(4, 6)}
    assert view["uid"].dtype == object
    assert view["uid"].tolist() == table.groups.tolist()
    scores = own.to_numpy(view["token_level_scores"])
    expected = np.zeros((4, 6), np.float32)
    for row, (_, response) in enumerate(LENGTHS):
        expected[row, response - 1] = table.rewards[row]
    assert same(expected, scores)
    mask = own.to_numpy(view["response_mask"])
    assert mask.dtype == own.to_numpy(view["attention_mask"]).dtype
    assert mask[0, :4].tolist() == table.loss_mask[0].astype(int).tolist()
    whole = np.concatenate([own.to_numpy(view["prompts"]), own.to_numpy(view["responses"])], axis=1)
    assert same(own.to_numpy(view["input_ids"]), whole)


def test_verl_sees_given_and_computed_token_rewards_apart() -> None:
    table = make_table([(1, 2)], columns=["token_rewards"])
    arrays, metadata = assemble(table, RolloutForm(), per_token={"token_rewards": Ragged.of([[5.0, 6.0]], np.float32)})
    view = RolloutBatch.from_numpy(arrays, metadata, "numpy").as_verl()
    assert table.token_rewards is not None
    assert view["token_level_scores"].tolist() == [table.token_rewards[0].tolist()]
    assert view["token_level_rewards"].tolist() == [[5.0, 6.0]]
    arrays, metadata = assemble(table, RolloutForm())
    batch = RolloutBatch.from_numpy(arrays, metadata, "numpy")
    assert batch.as_verl()["token_level_rewards"] is batch.token_rewards


def test_one_advantage_a_response_is_at_each_token_for_verl_and_alone_for_trl(backend: str) -> None:
    table = make_table([(1, 2), (2, 3)], columns=())
    form = RolloutForm(integer=get_backend(backend).integer)
    arrays, metadata = assemble(table, form, per_row={"advantages": np.array([0.5, -1.5])})
    batch = RolloutBatch.from_numpy(arrays, metadata, backend)
    facts = batch.backend.to_numpy(batch.as_verl()["advantages"])
    mask = batch.backend.to_numpy(batch.response_mask)
    assert facts.tolist() == (mask * np.array([[0.5], [-1.5]])).tolist()
    assert facts.dtype == np.float32
    assert batch.backend.to_numpy(batch.as_trl()["advantages"]).tolist() == [0.5, -1.5]


def test_trl_gets_one_number_a_response_where_the_estimator_has_one(backend: str) -> None:
    table = make_table([(1, 2), (2, 3)], columns=())
    form = RolloutForm(integer=get_backend(backend).integer)
    spread = Ragged(np.repeat([0.5, -1.5], [2, 3]), table.response_ids.offsets)
    arrays, metadata = assemble(
        table, form, per_token={"advantages": spread}, per_row={"sequence_advantages": np.array([0.5, -1.5])}
    )
    batch = RolloutBatch.from_numpy(arrays, metadata, backend)
    assert batch.backend.to_numpy(batch.as_trl()["advantages"]).tolist() == [0.5, -1.5]
    assert tuple(batch.as_verl()["advantages"].shape) == (2, 3)


def test_verl_sees_no_reward_as_0(backend: str) -> None:
    table = replace(make_table([(1, 2), (2, 3)], columns=()), rewards=np.array([np.nan, 2.0]))
    arrays, metadata = assemble(table, RolloutForm(integer=get_backend(backend).integer))
    view = RolloutBatch.from_numpy(arrays, metadata, backend).as_verl()
    for name in ("token_level_scores", "token_level_rewards"):
        assert np.asarray(view[name]).tolist() == [[0, 0, 0], [0, 0, 2]]


def test_trl_finds_what_it_looks_for(backend: str) -> None:
    batch = make_batch(make_table(LENGTHS), backend)
    view, own = batch.as_trl(), batch.backend
    assert view.keys() == {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "tool_mask",
        "advantages",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "ref_per_token_logps",
        "num_items_in_batch",
    }
    assert own.to_numpy(view["prompt_mask"]).sum(1).tolist() == [2, 5, 1, 3]
    assert own.to_numpy(view["completion_mask"]).sum(1).tolist() == [4, 1, 6, 3]
    assert (own.to_numpy(view["tool_mask"]) <= own.to_numpy(view["completion_mask"])).all()
    assert int(view["num_items_in_batch"]) == 77


def test_views_that_cannot_be_say_why() -> None:
    free = make_batch(make_table(LENGTHS), padding="free")
    for name in ("as_trl", "as_verl"):
        with pytest.raises(ConfigError, match=f"{name}.*padding='sides'"):
            getattr(free, name)()
    with pytest.raises(ConfigError, match="padding='sides'"):
        _ = free.prompts
    arrays, metadata = assemble(make_table(LENGTHS), RolloutForm())
    with pytest.raises(ConfigError, match="compute_advantages=True"):
        RolloutBatch.from_numpy(arrays, metadata, "numpy").as_trl()
    arrays, metadata = assemble(make_table(LENGTHS), RolloutForm(fields=frozenset({"input_ids"})))
    with pytest.raises(ConfigError, match="attention_mask"):
        RolloutBatch.from_numpy(arrays, metadata, "numpy").as_verl()
    with pytest.raises(ConfigError, match=r"metadata\['layout'\]"):
        RolloutBatch(np.ones((1, 2))).micro_batches(10)
    free["pixel_values"] = np.ones((1, 2))
    with pytest.raises(ConfigError, match="'pixel_values'"):
        free.take([0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trls_own_loss_of_a_batch_is_that_of_its_rollouts_one_by_one(tmp_path: Path) -> None:
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(1000)}, unk_token="t0"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=1000, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model = transformers.LlamaForCausalLM(config)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            num_generations=2,
            loss_type="dapo",
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["t3"] * 4}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1"),
    )
    # With a beta from the start it would fetch a reference model.
    trainer.beta, trainer.args.use_bias_correction_kl, trainer.current_gradient_accumulation_steps = 0.1, False, 1
    table = make_table(LENGTHS)
    batch = make_batch(table, "torch", pad_id=0)
    parts = [batch, *batch.micro_batches(22)]
    losses = [trainer._compute_loss(trainer.model, part.as_trl()).item() for part in parts]

    expected = 0.0
    trainer.model.eval()
    numbers = make_batch(table, padding="free").metadata["advantages"][0]
    at = 0
    for row in range(len(table)):
        prompt, response = table.prompt_ids[row], table.response_ids[row]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        ours = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].detach().numpy()
        advantages = numbers[at + len(prompt) : at + ids.shape[1]]
        assert table.logprobs is not None
        assert table.ref_logprobs is not None
        ratio = np.exp(ours - table.logprobs[row])
        loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        apart = table.ref_logprobs[row] - ours
        expected += float(((loss + 0.1 * (np.exp(apart) - apart - 1)) * table.loss_mask[row]).sum()) / 77
        at += ids.shape[1]
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert len(losses) > 2
    assert sum(losses[1:]) == pytest.approx(expected, rel=1e-4)


DEFERRED = ("attention_mask", "position_ids", "labels", "loss_mask")


def made(batch: RolloutBatch) -> set[str]:
    return {name for name in DEFERRED if vars(batch).get(name) is not None}


@pytest.mark.parametrize("padding", ["sides", "free"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_fields_made_when_they_are_read_are_those_of_the_assembly(backend: str, padding: Any, multiple: int) -> None:
    options: Any = {"padding": padding, "pad_to_multiple_of": multiple}
    whole, late = (make_batch(make_table(LENGTHS), backend, deferred=each, **options) for each in (False, True))
    assert bool(made(late)) is (padding == "free")
    for part, other in ((late.take([2, 0]), whole.take([2, 0])), (late.take([]), whole.take([])), (late, whole)):
        mine, theirs = host(part), host(other)
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            assert name == "layout" or same(value, mine[name]), name
            assert name == "layout" or getattr(mine[name], "dtype", None) == getattr(value, "dtype", None), name


def test_moving_a_batch_and_taking_rows_makes_no_field() -> None:
    batch = make_batch(make_table(LENGTHS), "numpy", deferred=True)
    assert made(batch) == made(batch.to("cpu")) == made(batch.take([1])) == made(copy.copy(batch)) == set()
    assert batch.num_tokens == 25
    assert batch.position_ids is batch.position_ids
    assert made(batch) == {"position_ids"}
    assert batch.labels is batch.labels
    assert made(batch) == {"position_ids", "labels"}
    assert set(batch) == {"input_ids", "attention_mask", "labels", "position_ids"}


def test_a_pickled_batch_carries_its_fields_and_not_the_rollouts_of_others() -> None:
    table = make_table([(3, 4)] * 400)
    small, one = make_batch(make_table([(3, 4)]), "numpy", deferred=True), make_batch(table, "numpy", deferred=True)
    sizes = [len(pickle.dumps(batch)) for batch in (small, one.take([0]))]
    assert sizes[1] < sizes[0] + 1_000


def test_threads_that_read_a_field_at_once_get_the_same_array(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, together, make = make_batch(make_table(LENGTHS), deferred=True), Barrier(2), SupervisedTokens.make

    def made_by_both(*given: Any) -> Any:
        together.wait(10)
        return make(*given)

    monkeypatch.setattr(SupervisedTokens, "make", made_by_both)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda name: getattr(batch, name), ["labels"] * 2)
    assert first is second is batch.labels


def test_a_field_that_was_removed_or_set_is_not_made_again() -> None:
    batch = make_batch(make_table(LENGTHS), "numpy", deferred=True)
    batch.labels = None
    del batch["position_ids"]
    batch["attention_mask"] = np.zeros(batch.input_ids.shape, np.int64)
    for each in (batch, batch.to("cpu"), batch.take([0, 1, 2, 3]), pickle.loads(pickle.dumps(batch))):  # noqa: S301
        assert each.labels is None
        assert each.position_ids is None
        assert not each.attention_mask.any()
        assert each.loss_mask is not None


def test_fields_stay_those_of_the_ids_that_were_replaced() -> None:
    batch = make_batch(make_table(LENGTHS), "numpy", deferred=True)
    expected = host(make_batch(make_table(LENGTHS), "numpy"))
    batch["input_ids"] = np.zeros((1, 2), np.int32)
    for name in DEFERRED:
        assert same(expected[name], batch[name])
        assert batch[name].dtype == expected[name].dtype


@pytest.mark.parametrize("padding", ["sides", "free"])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_writes_into_a_field_or_a_column_change_no_other_field(name: str, padding: Any) -> None:
    pytest.importorskip(name)
    expected = host(make_batch(make_table(LENGTHS), name, padding=padding))
    for view in (lambda batch: batch, copy.copy, lambda batch: batch.to("cpu")):
        batch = make_batch(make_table(LENGTHS), name, padding=padding, deferred=True)
        written = view(batch)
        written.input_ids[:] = 9
        for column in ("response_mask", "prompt_length", "response_length"):
            written.metadata[column][0] = 0
        del written.metadata["layout"]
        for each in (batch, written):
            found = host(each)
            for field in {*DEFERRED} & expected.keys():
                assert same(expected[field], found[field]), field


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_fields_of_taken_rows_are_those_of_the_rows_before_the_lengths_changed(name: str) -> None:
    pytest.importorskip(name)
    whole, late = (make_batch(make_table(LENGTHS), name, deferred=each) for each in (False, True))
    for batch in (whole, late):
        batch.metadata["prompt_length"] = batch.metadata["prompt_length"].clip(0, 1)
        batch.metadata["response_length"] = batch.metadata["response_length"].clip(0, 2)
    expected, found = host(whole.take([2, 0])), host(late.take([2, 0]))
    assert found["input_ids"].shape == (2, 3)
    assert all(same(expected[field], found[field]) for field in DEFERRED)


def test_rows_are_taken_by_the_lengths_that_metadata_has_now(backend: str) -> None:
    def shortened(batch: RolloutBatch) -> RolloutBatch:
        short = np.full(4, 2, batch.backend.integer)
        batch.metadata["response_length"] = batch.backend.from_numpy(short)
        return batch

    def written(batch: RolloutBatch) -> RolloutBatch:
        batch.metadata["response_length"][:] = 2
        return batch

    changes: list[Any] = [lambda: shortened(batch), lambda: shortened(batch.to("cpu")), lambda: copy.copy(batch)]
    changes += [lambda: written(batch), lambda: written(copy.copy(batch))] if backend in ("numpy", "torch") else []
    for number, change in enumerate(changes):
        batch = make_batch(make_table(LENGTHS), backend)
        taken = change().take([0, 2])
        assert (tuple(taken.input_ids.shape), taken.num_tokens) == (((2, 8), 13) if number == 2 else ((2, 4), 7))
        assert taken.take([1]).num_tokens == (7 if number == 2 else 3)


def test_lengths_kept_for_a_device_are_not_those_of_changed_columns() -> None:
    torch = pytest.importorskip("torch")
    views: list[Any] = [copy.copy, lambda batch: batch.take([0, 1]), lambda batch: batch.to("meta")]
    with torch.inference_mode():
        unwatched = make_batch(make_table(LENGTHS), "torch").to("meta")

    def write(part: RolloutBatch) -> None:
        part.metadata["response_length"].clamp_(max=2)

    def assign(part: RolloutBatch) -> None:
        part.metadata["prompt_length"] = part.metadata["prompt_length"].clone()

    for change in (write, assign):
        for view in views:
            batch = make_batch(make_table(LENGTHS), "torch").to("meta")
            part = view(batch)
            assert part.take([0]).take([0]).num_tokens == 6
            change(part)
            with pytest.raises(NotImplementedError):  # nothing can be read from that device
                part.take([0])
            with pytest.raises(NotImplementedError):
                copy.copy(part).take([0])
    with pytest.raises(NotImplementedError):
        unwatched.take([0])


def test_fields_that_were_not_asked_for_are_none() -> None:
    batch = make_batch(make_table(LENGTHS), "numpy", deferred=True, fields=frozenset({"input_ids", "labels"}))
    assert batch.attention_mask is None
    assert batch.position_ids is None
    assert batch.labels is not None


@pytest.mark.parametrize("padding", ["sides", "free"])
def test_counts_of_a_batch_on_a_device_are_known_without_it(padding: Any) -> None:
    """Nothing can be read from torch's device "meta"."""
    pytest.importorskip("torch")
    batch = make_batch(make_table(LENGTHS), "torch", deferred=True, padding=padding).to("meta")
    assert (batch.num_tokens, batch.num_rollouts) == (25, 4)
    parts = batch.micro_batches(13)
    assert sum(part.num_tokens for part in parts) == 25
    assert all(part.labels.device.type == part.position_ids.device.type == "meta" for part in parts)
    if padding == "sides":
        assert batch.as_trl()["completion_mask"].shape == (4, 6)
        assert batch.as_verl()["token_level_scores"].shape == (4, 6)
