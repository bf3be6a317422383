"""Batch of rollouts: a training batch whose metadata has the RL columns, per token and per rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import Backend, backend_of, get_backend
from penstock.batching.backends.base import Array, Device
from penstock.batching.backends.operations import ArrayOperations, operations_of
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError
from penstock.rl.collate import (
    DEFERRED_FIELDS,
    FILLS,
    LENGTH_FIELDS,
    SUPERVISED,
    RolloutLayout,
    SupervisedTokens,
    TokenLayout,
    widths,
)
from penstock.rl.minibatches import micro_batches_of
from penstock.rl.rollout import objects

Ints = npt.NDArray[np.int64]
_PER_TOKEN = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids")
_LENGTHS = ("prompt_length", "response_length")
_DOCUMENTS = ("position_ids", "document_ids", "cu_seqlens")
_GIVEN = ("old_log_probs", "ref_log_probs", "values", "token_scores")
"""Per-token metadata that does not depend on supervision."""


@dataclass(frozen=True, slots=True)
class _DeferredSource:
    """Source of the fields that are made when they are read, which nothing writes into."""

    names: frozenset[str]
    left: int
    """Columns before the responses."""
    width: int
    prompts: Ints
    responses: Ints
    supervised: SupervisedTokens | None
    """Source of labels and loss_mask; None if these are not made later."""
    integer: npt.DTypeLike

    def make(self, name: str, ids: Array) -> Array:
        """Field in the type of the ids, or of masks, on the device of the ids."""
        arrays = operations_of(ids, gradients=True)
        if name not in LENGTH_FIELDS:
            assert self.supervised is not None
            found = self.supervised.make(name, self.left, self.width, self.integer)
            place = getattr(ids, "sharding", getattr(ids, "device", None))
            made: Array = backend_of(ids).from_numpy(found, device=place)
            return made if name == "loss_mask" else arrays.like(made, ids)
        columns = arrays.count_up(self.width)[None, :]
        begin, end = (arrays.put(at[:, None]) for at in (self.left - self.prompts, self.left + self.responses))
        inside = (columns >= begin) & (columns < end)
        return arrays.like(inside if name == "attention_mask" else arrays.xp.where(inside, columns - begin, 0), ids)

    def take(self, rows: Ints, left: int, width: int) -> _DeferredSource:
        lengths = self.prompts[rows], self.responses[rows]
        supervised = None if self.supervised is None else self.supervised.take(rows)
        return _DeferredSource(self.names, left, width, *lengths, supervised, self.integer)


@dataclass(frozen=True, slots=True)
class _KnownLengths:
    """Lengths of prompts and responses in main memory, with the arrays on a device that they were read from."""

    lengths: tuple[Ints, Ints]
    columns: tuple[Array, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, lengths: tuple[Ints, Ints], metadata: Mapping[str, Any]) -> _KnownLengths | None:
        """None if the arrays have no version: writes into them would not be noticed."""
        columns = tuple(metadata.get(name) for name in _LENGTHS)
        versions = _versions(columns)
        return None if versions is None else cls(lengths, columns, versions)

    def describe(self, metadata: Mapping[str, Any]) -> bool:
        """True if metadata still has these arrays, unchanged."""
        same = all(metadata.get(name) is column for name, column in zip(_LENGTHS, self.columns))
        return same and _versions(self.columns) == self.versions


def _versions(columns: tuple[Array, ...]) -> tuple[int, ...] | None:
    """Number of writes into each array: torch counts them, except in inference mode; other arrays on a device cannot be
    written into."""
    try:
        return tuple(int(getattr(column, "_version", 0)) for column in columns)
    except RuntimeError:
        return None


class _DeferredBatch(TrainingBatch):
    """Training batch that makes some fields of padded rows when they are first read (`DEFERRED_FIELDS`)."""

    _source: _DeferredSource | None = None

    def to_numpy(self) -> dict[str, Any]:
        self._make_all()
        return super().to_numpy()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "input_ids" and vars(self).get(name) is not None:
            self._make_all()  # in the type of the ids before
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())  # with all fields made
        state.pop("_source", None)
        return state

    def _make_all(self) -> None:
        for key in DEFERRED_FIELDS:
            getattr(self, key)

    def _arrays(self) -> dict[str, Array]:
        """Arrays that are made already."""
        return self._made()

    def _derived(self, name: str) -> Array | None:
        """Field of the source; None if it was not asked for."""
        source = self._source
        if source is None or self.input_ids is None or name not in source.names:
            return None
        return source.make(name, self.input_ids)

    def _copy_removed(self, batch: _DeferredBatch) -> None:
        """Fields that were set to None are not made again."""
        for key in DEFERRED_FIELDS:
            if vars(self).get(key, ...) is None:
                setattr(batch, key, None)


class _DerivedField:
    """Field that is made when it is first read, unless it was set."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, batch: _DeferredBatch | None, kind: type) -> Any:
        if batch is None:
            return None  # the default of the field
        made = vars(batch)
        if self._name not in made and (found := batch._derived(self._name)) is not None:
            made.setdefault(self._name, found)  # another thread may have made it, or set it, meanwhile
        return made.get(self._name)

    def __set__(self, batch: _DeferredBatch, value: Any) -> None:
        made = vars(batch)
        if value is not None or "_others" in made:  # not the default, which the constructor sets
            made[self._name] = value


for _name in DEFERRED_FIELDS:
    setattr(_DeferredBatch, _name, _DerivedField(_name))


UNFINISHED = ("length", "abort", "truncated", "aborted")
"""Finish reasons of responses that were cut: those of vLLM, SGLang and OpenAI, and of slime."""


class _RowProperties(_DeferredBatch):
    """Lists of metadata, one entry a rollout, and an array of what they say."""

    @property
    def groups(self) -> list[Any]:
        return list(self.metadata["groups"])

    @property
    def ids(self) -> list[Any]:
        return list(self.metadata["ids"])

    @property
    def truncated(self) -> Array:
        """(rows,) True for responses that the engine did not finish, by their finish reason: length or abort."""
        ended = np.array([reason in UNFINISHED for reason in self.metadata["finish_reasons"]], np.bool_)
        return operations_of(self.input_ids, gradients=True).put(ended)


class RolloutBatch(_RowProperties):
    """Arrays of one step, with RL columns in `metadata` as arrays of the same framework.

        rewards, prompt_length, response_length ...   (rows,)
        response_mask, advantages, old_log_probs ...  (rows, response tokens); padding-free: shaped as input_ids
        ids, groups, finish_reasons ...               lists

    `to` and `pin_memory` include the arrays in metadata. Properties of missing columns are None. The critic's values
    are `metadata["values"]`, since a mapping has a method of that name.

    attention_mask, position_ids, labels and loss_mask of a loader's padded batch are made when they are first read, on
    the device that the batch is on, from a source of their own: a changed field or column changes no other.
    """

    _known_lengths: _KnownLengths | None = None
    """Lengths of a batch on a device."""

    @classmethod
    def from_numpy(
        cls,
        arrays: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        backend: str | Backend = "torch",
        *,
        device: Device = None,
        num_tokens: int | None = None,
    ) -> Self:
        """Batch of the arrays that `assemble` made, sharing their memory if the framework can."""
        chosen, given = get_backend(backend), dict(metadata or {})
        supervised = given.pop(SUPERVISED, None)
        lengths = None
        if "prompt_length" in given:
            lengths = given["prompt_length"].astype(np.int64), given["response_length"].astype(np.int64)
            num_tokens = int(sum(part.sum() for part in lengths)) if num_tokens is None else num_tokens
        batch = super().from_numpy(arrays, None, chosen, device=device, num_tokens=num_tokens)
        batch.metadata = {
            key: chosen.from_numpy(value, device=device)
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
            else value
            for key, value in given.items()
        }
        if lengths is not None:
            batch._known_lengths = _KnownLengths.of(lengths, batch.metadata)
            layout = given.get("layout")
            if isinstance(layout, RolloutLayout) and layout.form.padding == "sides":
                names = layout.form.fields.intersection(LENGTH_FIELDS if supervised is None else DEFERRED_FIELDS)
                left, width = layout.prompt_width, batch.input_ids.shape[1]
                batch._source = _DeferredSource(names, left, width, *lengths, supervised, layout.form.integer)
        return batch

    @property
    def layout(self) -> RolloutLayout:
        """Width of the prompts, and the names of per-token and per-row metadata."""
        found = self.metadata.get("layout")
        if not isinstance(found, RolloutLayout):
            raise ConfigError(
                "the layout of this batch is unknown: metadata['layout'] is missing; make batches with assemble() and "
                "from_numpy(), and move them with to()"
            )
        return found

    @property
    def num_rollouts(self) -> int:
        """Rollouts, in any number of rows."""
        return int(self.metadata["prompt_length"].shape[0])

    @property
    def prompts(self) -> Array:
        """(rows, prompt tokens), padded on the left."""
        return self.input_ids[:, : self._prompt_width]

    @property
    def responses(self) -> Array:
        """(rows, response tokens), padded on the right."""
        return self.input_ids[:, self._prompt_width :]

    @property
    def response_mask(self) -> Array:
        """True for supervised response tokens: those that the policy generated."""
        return self.metadata["response_mask"]

    @property
    def rewards(self) -> Array:
        """(rows,) rewards of whole responses; NaN if there is none."""
        return self.metadata["rewards"]

    @property
    def advantages(self) -> Array | None:
        return self.metadata.get("advantages")

    @property
    def returns(self) -> Array | None:
        return self.metadata.get("returns")

    @property
    def old_log_probs(self) -> Array | None:
        """Log-probabilities under the policy that generated the responses."""
        return self.metadata.get("old_log_probs")

    @property
    def ref_log_probs(self) -> Array | None:
        return self.metadata.get("ref_log_probs")

    @property
    def token_rewards(self) -> Array | None:
        """Token rewards that advantages were computed from, or as given (`metadata["token_scores"]`)."""
        return self.metadata.get("token_rewards", self.metadata.get("token_scores"))

    @property
    def denominators(self) -> Array | None:
        """Divisors of token losses, which make the loss of a step a sum. (rows,); without padding shaped as input_ids,
        and 1 outside of responses."""
        return self.metadata.get("denominators")

    def as_trl(self) -> dict[str, Any]:
        """Inputs of the loss of TRL's `GRPOTrainer`, by its names. Numbers are not changed:

            prompt_ids, prompt_mask, completion_ids, completion_mask   (rows, tokens)
            tool_mask                  0 on tokens that the policy did not generate; completion_mask is 1 there
            advantages                 (rows,), or (rows, completion tokens) from estimators with one a token
            old_per_token_logps, sampling_per_token_logps, ref_per_token_logps, importance_sampling_ratio   if known
            num_items_in_batch         supervised tokens of the global batch, an array without dimensions

        `old_per_token_logps` are those of the policy that generated; so are `sampling_per_token_logps`, unless
        `metadata["rollout_log_probs"]` has others.
        """
        mask, known = self._attention("as_trl"), self.metadata
        if self.advantages is None:
            raise ConfigError("TRL's loss needs advantages, and this batch has none; pass compute_advantages=True")
        arrays, width = operations_of(self.input_ids, gradients=True), self.layout.prompt_width
        found = {
            "prompt_ids": self.prompts,
            "prompt_mask": mask[:, :width],
            "completion_ids": self.responses,
            "completion_mask": mask[:, width:],
            "tool_mask": arrays.like(self.response_mask, mask),
            "advantages": known.get("sequence_advantages", self.advantages),
            "old_per_token_logps": self.old_log_probs,
            "sampling_per_token_logps": known.get("rollout_log_probs", self.old_log_probs),
            "ref_per_token_logps": self.ref_log_probs,
            "importance_sampling_ratio": known.get("importance_sampling_ratio"),
        }
        if self.num_items_in_batch is not None:
            found["num_items_in_batch"] = arrays.put(np.array(self.num_items_in_batch, np.int64))
        return {key: value for key, value in found.items() if value is not None}

    def as_verl(self) -> dict[str, Any]:
        """Columns of verl's `DataProto`, by its names. Numbers are not changed:

            prompts, responses, input_ids, attention_mask, position_ids
            response_mask              0 on padding and on tokens that the policy did not generate
            old_log_probs, rollout_log_probs, ref_log_prob, values, advantages, returns   if known
            token_level_scores         token rewards as given; or the reward, at the last token of the response
            token_level_rewards        the same with a KL penalty and so on
            uid                        the groups, as an array of objects for `non_tensor_batch`

        All but the ids are (rows, response tokens). Both log-probs are those of the policy that generated, unless
        `metadata["rollout_log_probs"]` has others.
        """
        mask, known = self._attention("as_verl"), self.metadata
        arrays = operations_of(self.input_ids, gradients=True)
        scores = known.get("token_scores")
        scores = self._rewards_at_end(arrays) if scores is None else scores
        found = {
            "prompts": self.prompts,
            "responses": self.responses,
            "input_ids": self.input_ids,
            "attention_mask": mask,
            "position_ids": self.position_ids,
            "response_mask": arrays.like(self.response_mask, mask),
            "old_log_probs": self.old_log_probs,
            "rollout_log_probs": known.get("rollout_log_probs", self.old_log_probs),
            "ref_log_prob": self.ref_log_probs,
            "values": known.get("values"),
            "token_level_scores": scores,
            "token_level_rewards": known.get("token_rewards", scores),
            "advantages": self._on_tokens(self.advantages, arrays),
            "returns": self._on_tokens(self.returns, arrays),
            "uid": objects(self.groups),
        }
        return {key: value for key, value in found.items() if value is not None}

    def micro_batches(self, max_tokens: int | None = None, *, at_least: int = 1) -> list[Self]:
        """Smaller batches with each rollout in one of them; the largest first.

        They have at most `max_tokens`, padding included, which is trimmed for each. None: the split of the loader
        (`metadata["micro_batches"]`), with the same number on every rank. With your own `max_tokens`, ranks that need
        the same number pass the largest of any as `at_least`; if there are fewer rollouts, the last micro-batches are
        blank, see `take`. `num_items_in_batch` and denominators stay those of the whole step, so gradients add up.
        """
        rows: Any = self.metadata.get("micro_batches")
        if max_tokens is not None:
            form = self.layout.form
            rows = micro_batches_of(*self._lengths(), max_tokens, form=form, at_least=at_least, names=self.ids)[0]
        elif rows is None:
            raise ConfigError("the loader did not split this batch; pass max_tokens, or micro_batch_tokens= to it")
        return [self.take(part) for part in rows]

    def take(self, rows: npt.ArrayLike) -> Self:
        """Batch of these rollouts, in the order given; numbers of the whole step stay.

        Without rows: the shortest rollout, blanked. Its mask and everything computed is 0, and `metadata["blank"]` is
        True, so a rank without work takes part in the same collectives as the others.
        """
        chosen, layout = np.asarray(rows, np.int64), self.layout
        if not len(chosen):
            return self.take([int(np.argmin(sum(self._lengths())))])._blanked()
        if added := [key for key in self._arrays() if key in self._others]:
            raise ConfigError(f"{added[0]!r} was assigned to this batch and has no known rows; call take() first")
        index = operations_of(self.input_ids, gradients=True).put(chosen)
        fields, per_token, left = self._free(chosen) if layout.form.padding == "free" else self._sides(chosen, index)
        metadata = self.metadata | per_token | {"layout": replace(layout, prompt_width=left)}
        metadata.pop("micro_batches", None)  # rows of the whole batch
        for name in layout.per_row:
            column = self.metadata[name]
            metadata[name] = [column[row] for row in chosen.tolist()] if isinstance(column, list) else column[index]
        batch = type(self)(metadata=metadata, num_items_in_batch=self.num_items_in_batch, **fields)
        batch._others, batch._hidden = dict(self._others), set(self._hidden)
        prompts, responses = self._lengths()
        lengths = prompts[chosen], responses[chosen]
        batch._known_lengths = _KnownLengths.of(lengths, metadata)
        batch._num_tokens = int(sum(part.sum() for part in lengths))
        if self._source is not None:
            batch._source = self._source.take(chosen, left, batch.input_ids.shape[1])
        self._copy_removed(batch)
        return batch

    def all_arrays(self) -> list[Array]:
        kind = type(self.input_ids)
        return super().all_arrays() + [value for value in self.metadata.values() if isinstance(value, kind)]

    def _sides(self, rows: Ints, index: Array) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Fields and per-token metadata of rows, with the padding they need, and the width of their prompts."""
        prompts, responses = self._lengths()
        layout, made = self.layout, self._arrays()
        left, right = widths(prompts[rows], responses[rows], layout.form)
        low, high = layout.prompt_width - left, layout.prompt_width + right
        fields = {key: made[key][:, low:high][index] for key in _PER_TOKEN if key in made}
        return fields, {key: self.metadata[key][:, :right][index] for key in layout.per_token}, left

    def _free(self, rows: Ints) -> tuple[dict[str, Any], dict[str, Any], int]:
        """The same for a padding-free batch: tokens are gathered, and document boundaries are made anew."""
        prompts, responses = self._lengths()
        form, arrays, backend = self.layout.form, operations_of(self.input_ids, gradients=True), self.backend
        at = TokenLayout.of(prompts, responses, form).at[rows]
        layout = TokenLayout.of(prompts[rows], responses[rows], form)
        used = int(layout.lengths.sum())
        where = np.zeros(layout.tokens, np.int64)
        where[:used] = np.repeat(at - layout.at, layout.lengths) + np.arange(used)
        index, real = arrays.put(where), arrays.put(np.arange(layout.tokens) < used)

        def gathered(array: Array, fill: Any) -> Array:
            found = array[:, index]
            return found if used == layout.tokens else arrays.xp.where(real, found, fill)

        fills = {"input_ids": form.pad_id, "labels": IGNORE, "loss_mask": False}
        fields = {key: gathered(getattr(self, key), fill) for key, fill in fills.items() if key in self._arrays()}
        documents = layout.documents(backend.integer)
        fields |= {key: arrays.put(documents[key]) for key in _DOCUMENTS if getattr(self, key) is not None}
        if self.max_seqlen is not None:
            fields["max_seqlen"] = documents["max_seqlen"]
        blank = {key: False if key == "response_mask" else FILLS.get(key, 0) for key in self.layout.per_token}
        return fields, {key: gathered(self.metadata[key], fill) for key, fill in blank.items()}, 0

    def _blanked(self) -> Self:
        """This batch, changed in place so that nothing is learned from it."""
        xp, metadata = operations_of(self.input_ids, gradients=True).xp, self.metadata
        computed = [name for name in self.layout.per_token if name not in _GIVEN]
        per_row = [name for name in ("denominators", "sequence_advantages") if name in self.layout.per_row]
        for name in (*computed, *per_row):
            zeros = xp.zeros_like(metadata[name])
            metadata[name] = zeros + FILLS[name] if name in FILLS else zeros
        if self.labels is not None:
            self.labels = xp.zeros_like(self.labels) + IGNORE
        if self.loss_mask is not None:
            self.loss_mask = xp.zeros_like(self.loss_mask)
        metadata["blank"] = True
        return self

    @property
    def _prompt_width(self) -> int:
        if self.layout.form.padding == "free":
            raise ConfigError(
                "prompts and responses of a padding-free batch share one row; use padding='sides', or response_mask, "
                "prompt_length and response_length of the metadata"
            )
        return self.layout.prompt_width

    def _lengths(self) -> tuple[Ints, Ints]:
        found = self._lengths_at_hand()
        return self._read_lengths() if found is None else found

    def _lengths_at_hand(self) -> tuple[Ints, Ints] | None:
        """Lengths as metadata has them; None if a device would have to be waited for."""
        columns = [self.metadata.get(name) for name in _LENGTHS]
        if any(column is None for column in columns):
            return None
        if all(operations_of(column, gradients=True).check for column in columns):
            return self._read_lengths()
        known = self._known_lengths
        return known.lengths if known is not None and known.describe(self.metadata) else None

    def _read_lengths(self) -> tuple[Ints, Ints]:
        prompts, responses = (self.backend.to_numpy(self.metadata[name]) for name in _LENGTHS)
        return prompts.astype(np.int64), responses.astype(np.int64)

    def _attention(self, view: str) -> Array:
        if self.layout.form.padding == "free":
            raise ConfigError(f"{view}() needs prompts and responses in columns of their own; use padding='sides'")
        if self.attention_mask is None:
            raise ConfigError(f"{view}() needs attention_mask, which this batch does not have; add it to fields=")
        return self.attention_mask

    def _rewards_at_end(self, arrays: ArrayOperations) -> Array:
        """Reward of each response at its last token, 0 elsewhere and for NaN."""
        rewards = arrays.floats(self.rewards)
        rewards = arrays.xp.where(arrays.xp.isnan(rewards), 0.0, rewards)
        ends = self.metadata["response_length"][:, None] - 1
        here = arrays.put(np.arange(self.response_mask.shape[1]))[None, :] == ends
        return arrays.xp.where(here, rewards[:, None], 0.0)

    def _on_tokens(self, column: Array | None, arrays: ArrayOperations) -> Array | None:
        """Column with one number a response, on its supervised tokens."""
        if column is None or len(column.shape) == 2:
            return column
        return arrays.xp.where(self.response_mask, column[:, None], 0.0)

    def _with(self, change: Any) -> Self:
        batch, kind, lengths = super()._with(change), type(self.input_ids), self._lengths_at_hand()
        batch.metadata = {
            key: change(value) if isinstance(value, kind) else value for key, value in batch.metadata.items()
        }
        batch._known_lengths = None if lengths is None else _KnownLengths.of(lengths, batch.metadata)
        batch._source = self._source
        self._copy_removed(batch)
        return batch

    def __repr__(self) -> str:
        return super().__repr__().replace("TrainingBatch", "RolloutBatch", 1)
