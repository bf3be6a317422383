"""Outputs of inference engines as rollouts: vLLM, SGLang, and OpenAI-style servers. Recognised by shape.

    vLLM      RequestOutput: prompt_token_ids, outputs[].token_ids, outputs[].logprobs (a dict for each position)
    SGLang    {"text", "output_ids", "meta_info": {"output_token_logprobs": [(log-prob, id, text), ...]}}
    OpenAI    chat.completion and text_completion, with the ids that vLLM adds for return_token_ids

Nothing here imports an engine: objects and dicts with these fields are read alike. Ids are not changed. What would
train on other tokens than the policy generated is refused with its row: a response without its stop token, log-probs of
other tokens, log-probs without ids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.rl.rollout import Rollout

Floats = npt.NDArray[np.float32]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_ROLLOUT_FIELDS = {each.name for each in fields(Rollout)}
_SGLANG_KEYS = {"text", "output_ids", "meta_info", "index", "prompt_token_ids", "input_ids"}
_RESPONSE_COLUMNS = {"response_ids", "completion_ids", "responses", "response", "completion", "messages", "turns"}
"""Columns of rollouts in other forms, whose `meta_info` or `choices` are metadata."""
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_PLACEHOLDER = -9999.0
"""Log-prob that OpenAI-style servers give for tokens whose log-prob they do not have."""
_SUM_ROUNDING = 1e-3


def engine_rollouts(data: Any) -> list[Rollout] | None:
    """Rollouts of an output of an engine, or of a list of them; None for other data."""
    items = [data] if _reader(data) is not None else data
    if not isinstance(items, list | tuple) or not items or (read := _reader(items[0])) is None:
        return None
    return read(items)  # type: ignore[no-any-return]


def has_engine_columns(names: Collection[str]) -> bool:
    """True for the columns of a file of outputs, one a row."""
    return any(mark <= set(names) for mark in ({"meta_info"}, {"choices"}, {"outputs", "prompt_token_ids"}))


def vllm_rollouts(outputs: Iterable[Any]) -> list[Rollout]:
    """Rollouts of `RequestOutput`s, in the order of requests and samples.

    Samples of one request are a group if any request has several. Otherwise no group is named: the loader groups equal
    prompts, as for requests that were repeated instead.
    """
    items = list(outputs)
    several = any(len(_get(item, "outputs") or ()) > 1 for item in items)
    found: list[Rollout] = []
    for number, item in enumerate(items):
        at = _Place(number, f"request {_get(item, 'request_id')!r}")
        samples = _get(item, "outputs")
        if not _is_vllm(item):
            raise at.error(f"expected a RequestOutput of vLLM, got {item!r:.60}")
        if _get(item, "finished") is False:
            raise at.error("it is not finished; give the last output of its stream")
        if not samples:
            raise at.error("it has no outputs")
        prompt = _get(item, "prompt_token_ids")
        for sample in samples:
            of = at.sample(_get(sample, "index"))
            ids = _ids(_get(sample, "token_ids"), of, "token_ids")
            _check_stop(ids, _get(sample, "stop_reason"), of)
            logprobs = _get(sample, "logprobs")
            if logprobs is not None:
                logprobs = _of_chosen(ids, logprobs, 0 if prompt is None else len(prompt), of)
                _check_sum(logprobs, _get(sample, "cumulative_logprob"), of)
            found.append(
                Rollout(
                    prompt_ids=prompt,
                    prompt=_get(item, "prompt") if prompt is None else None,
                    response_ids=ids,
                    logprobs=logprobs,
                    group=f"{_get(item, 'request_id')}" if several else None,
                    finish_reason=_get(sample, "finish_reason"),
                    metadata={"request_id": _get(item, "request_id"), "sample": _get(sample, "index")},
                )
            )
    return found


def sglang_rollouts(outputs: Iterable[Any], prompts: Sequence[Prompt] | None = None) -> list[Rollout]:
    """Rollouts of dicts of SGLang's `generate`. `prompts` has one for each, unless the outputs have their ids.

    Keys that SGLang does not write, such as `reward` and `group`, are those of a rollout; others are metadata.
    """
    items = list(outputs)
    _check_count(prompts, len(items), "outputs; repeat the prompt of several samples")
    found = []
    for number, item in enumerate(items):
        facts = _get(item, "meta_info") or {}
        at = _Place(number, f"output {facts.get('id')!r}")
        if not _is_sglang(item):
            raise at.error(f"expected a dict of SGLang with meta_info, got {item!r:.60}")
        entries = facts.get("output_token_logprobs")
        listed = item.get("output_ids")
        ids = _ids([int(entry[1]) for entry in entries] if entries is not None else listed, at, "output_ids")
        if entries is not None and listed is not None:
            given = _ids(listed, at, "output_ids")
            # The list may lack the token that the engine stopped at; the log-probs have it.
            if not np.array_equal(given, ids) and not np.array_equal(given, ids[:-1]):
                raise at.error("output_ids differ from the ids of output_token_logprobs; give those of one generation")
        reason = facts.get("finish_reason")
        if reason is None:
            raise at.error("it has no finish_reason; give the last output of its stream")
        if isinstance(reason, Mapping) and reason.get("type") == "stop":
            _check_stop(ids, reason.get("matched"), at, "request return_logprob=True, whose ids include it")
        own = {key: value for key, value in item.items() if key in _ROLLOUT_FIELDS}
        version = str(facts.get("weight_version", ""))
        row: dict[str, Any] = {
            "response_ids": ids,
            "logprobs": None if entries is None else _floats([entry[0] for entry in entries]),
            "finish_reason": reason["type"] if isinstance(reason, Mapping) else reason,
            "policy_version": int(version) if version.isdecimal() else None,
            **own,
            "metadata": {key: item[key] for key in item.keys() - own.keys() - _SGLANG_KEYS}
            | {"request_id": facts.get("id")}
            | dict(own.get("metadata") or {}),
        }
        if not {"prompt", "prompt_ids"} & own.keys():
            row |= _prompt(_sglang_prompt(item, facts), prompts, number, at, "request logprob_start_len=0")
        found.append(Rollout(**row))
    return found


def openai_rollouts(
    responses: Iterable[Any], prompts: Sequence[Prompt] | None = None, *, logprobs: bool = True
) -> list[Rollout]:
    """Rollouts of the choices of responses, objects or dicts. `prompts` has one for each response without prompt ids.

    Choices with one prompt are a group if any response has several choices. A response without token ids is text, which
    readers tokenize; its log-probs are of other tokens, so they are refused unless `logprobs` is False.
    """
    items = list(responses)
    _check_count(prompts, len(items), "responses")
    several = any(len(_get(item, "choices") or ()) > 1 for item in items)
    found = []
    for number, item in enumerate(items):
        at = _Place(number, f"response {_get(item, 'id')!r}")
        if not _is_openai(item):
            raise at.error(f"expected a response with choices, got {item!r:.60}")
        seen: dict[bytes, int] = {}
        for choice in _get(item, "choices"):  # as they are listed: rewards are in that order
            of = at.sample(_get(choice, "index"))
            ids = _get(choice, "prompt_token_ids")
            ids = _get(item, "prompt_token_ids") if ids is None else ids
            prompt = _prompt(ids, prompts, number, of, "request return_token_ids=True")
            part = seen.setdefault(np.asarray(ids if ids is not None else [], np.int64).tobytes(), len(seen))
            found.append(
                Rollout(
                    **prompt,
                    **_response(choice, len(ids) if ids is not None else None, of, logprobs=logprobs),
                    group=f"{_get(item, 'id')}" + (f"/{part}" if part else "") if several else None,
                    finish_reason=_get(choice, "finish_reason"),
                    metadata={"request_id": _get(item, "id"), "sample": _get(choice, "index")},
                )
            )
    return found


def with_chosen_logprobs(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of TRL with the log-prob of each generated token, where they have those of the most likely tokens.

    TRL's generation returns `logprobs` and `logprob_token_ids` of shape (rollouts, tokens, most likely).
    """
    cells, ids = columns.get("logprobs"), columns.get("completion_ids")
    if cells is None or ids is None or isinstance(cells, pa.ChunkedArray) or not any(map(_is_nested, cells)):
        return columns
    tokens = columns.get("logprob_token_ids")
    found: list[Any] = []
    for row, cell in enumerate(cells):
        at = _Place(row, "of TRL")
        if not _is_nested(cell):
            found.append(cell)
            continue
        response = np.asarray(ids[row])
        _check_length(cell, response, 0, at)
        if tokens is not None:
            candidates = [dict(zip(map(int, names), values)) for names, values in zip(tokens[row], cell)]
            found.append(_of_chosen(response, candidates, 0, at))
        elif all(len(position) == 1 for position in cell):
            found.append(_floats(position[0] for position in cell))
        else:
            raise at.error(
                "logprobs have several numbers for a token, and there are no logprob_token_ids to tell which is that "
                "of the generated one; give them, or one number for each token"
            )
    return {name: column for name, column in columns.items() if name != "logprob_token_ids"} | {"logprobs": found}


def _is_nested(cell: Any) -> bool:
    return cell is not None and len(cell) > 0 and hasattr(cell[0], "__len__")


# -- shapes ------------------------------------------------------------------------------------------------------------


def _reader(item: Any) -> Any:
    """Function for outputs like this one; None if it is none."""
    if _is_vllm(item):
        return vllm_rollouts
    if _is_sglang(item):
        return sglang_rollouts
    return openai_rollouts if _is_openai(item) else None


def _is_vllm(item: Any) -> bool:
    return isinstance(_get(item, "outputs"), list) and _has(item, "prompt_token_ids")


def _is_sglang(item: Any) -> bool:
    facts = item.get("meta_info") if isinstance(item, Mapping) and not _RESPONSE_COLUMNS & item.keys() else None
    return isinstance(facts, Mapping) and ("finish_reason" in facts or "output_token_logprobs" in facts)


def _is_openai(item: Any) -> bool:
    choices = _get(item, "choices")
    if not isinstance(choices, list) or not choices or (isinstance(item, Mapping) and _RESPONSE_COLUMNS & item.keys()):
        return False
    return any(_has(choices[0], key) for key in ("message", "text", "delta"))


def _get(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _has(item: Any, name: str) -> bool:
    return name in item if isinstance(item, Mapping) else hasattr(item, name)


class _Place:
    """Output that is read, for messages."""

    def __init__(self, row: int, name: str) -> None:
        self.row, self.name = row, name

    def sample(self, index: Any) -> _Place:
        return self if index is None else _Place(self.row, f"{self.name}, sample {index}")

    def error(self, text: str) -> DataError:
        return DataError(f"row {self.row} ({self.name}): {text}", row=self.row)


def _check_count(prompts: Sequence[Prompt] | None, count: int, of: str) -> None:
    if prompts is not None and (isinstance(prompts, str) or len(prompts) != count):
        given = "a text" if isinstance(prompts, str) else f"{len(prompts)}"
        raise ConfigError(f"prompts must have one entry for each of the {count} {of}, got {given}")


# -- prompts and responses ---------------------------------------------------------------------------------------------


def _prompt(ids: Any, prompts: Sequence[Prompt] | None, number: int, at: _Place, remedy: str) -> dict[str, Any]:
    """Prompt of a rollout: the ids that the engine returned, else the one that was given."""
    if ids is not None:
        return {"prompt_ids": ids}
    if prompts is None:
        raise at.error(f"it has no ids of its prompt; {remedy} from the engine, or pass prompts=, ids or text")
    given = prompts[number]
    if isinstance(given, str) or (len(given) and isinstance(given[0], Mapping)):
        return {"prompt": given}
    return {"prompt_ids": given}


def _sglang_prompt(item: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """Ids of the prompt: those that were returned, or those of the log-probs if they cover all of it."""
    for name in ("prompt_token_ids", "input_ids"):
        for part in (item, facts):
            if part.get(name) is not None:
                return part[name]
    entries = facts.get("input_token_logprobs")
    return [int(entry[1]) for entry in entries] if entries and len(entries) == facts.get("prompt_tokens") else None


def _response(choice: Any, prompt_length: int | None, at: _Place, *, logprobs: bool) -> dict[str, Any]:
    """Ids and log-probs of a choice; text if it has no ids."""
    message = _get(choice, "message")
    if message is None and _get(choice, "text") is None:
        raise at.error("it is a part of a stream; join the stream, or request stream=False")
    names, values = _logprob_entries(_get(choice, "logprobs"))
    given = _get(choice, "token_ids")
    echoed = values is not None and values[:1] == [None] and prompt_length is not None
    if names is not None and len(names) and all(map(_TOKEN_ID.fullmatch, names)):
        listed = [int(name.removeprefix("token_id:")) for name in names]
        own = listed[prompt_length:] if echoed else listed
        if given is not None and list(given) != own:
            raise at.error("token_ids differ from the ids of logprobs; give those of one generation")
        given = own if given is None else given
    if given is None:
        return _text(choice, message, bool(values) and logprobs, at)
    ids = _ids(given, at, "token_ids")
    _check_stop(ids, _get(choice, "stop_reason"), at)
    if not values or not logprobs:
        return {"response_ids": ids}
    if echoed and len(values) == (prompt_length or 0) + len(ids):
        values = values[prompt_length:]  # echo=True: those of the prompt come first
    found = _floats(values)
    _check_length(found, ids, prompt_length or 0, at)
    if len(found) and found.min() <= _PLACEHOLDER:
        token = int(found.argmin())
        raise at.error(
            f"the log-prob of token {token} is {found[token]:g}, the server's placeholder for one that it does not "
            "have; request logprobs of the generated tokens"
        )
    return {"response_ids": ids, "logprobs": found}


def _logprob_entries(logprobs: Any) -> tuple[list[str] | None, list[Any] | None]:
    """Tokens and log-probs of a choice, of chat responses or of completions."""
    if logprobs is None:
        return None, None
    content = _get(logprobs, "content")
    if content is not None:
        return [_get(entry, "token") for entry in content], [_get(entry, "logprob") for entry in content]
    return _get(logprobs, "tokens"), _get(logprobs, "token_logprobs")


def _text(choice: Any, message: Any, has_logprobs: bool, at: _Place) -> dict[str, Any]:
    remedy = "request return_token_ids=True"
    if has_logprobs:
        raise at.error(
            "it has log-probs and no token ids, and text that is tokenized again may have other tokens; "
            f"{remedy}, or leave them out: rollouts_from_openai(..., logprobs=False)"
        )
    lost = [key for key in ("tool_calls", "reasoning", "reasoning_content") if _get(message, key)]
    if lost:
        raise at.error(f"it has no token ids, and its text lacks its {lost[0]}; {remedy}")
    return {"response": _get(choice, "text") if message is None else _get(message, "content") or ""}


# -- numbers -----------------------------------------------------------------------------------------------------------


def _ids(values: Any, at: _Place, name: str) -> npt.NDArray[Any]:
    """Ids as an array; readers check them."""
    if values is None:
        raise at.error(f"it has no {name}; request token ids from the engine")
    array = np.asarray(values)
    return array if array.size else np.empty(0, np.int64)


def _floats(values: Iterable[Any]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def _of_chosen(ids: npt.NDArray[Any], positions: Any, prompt_length: int, at: _Place) -> Floats:
    """Log-probs of the generated tokens among those of the most likely tokens of each position."""
    _check_length(positions, ids, prompt_length, at)
    flat = [getattr(positions, name, None) for name in ("start_indices", "token_ids", "logprobs")]
    if len(ids) and all(column is not None for column in flat):  # vLLM's FlatLogprobs: the generated token comes first
        starts, tokens, values = map(np.asarray, flat)
        if np.array_equal(tokens[starts], ids):
            return np.asarray(values[starts], np.float32)
    found = []
    for token, (value, position) in enumerate(zip(ids.tolist(), positions)):
        key = next((key for key in (value, str(value)) if position is not None and key in position), None)
        if key is None:
            raise at.error(
                f"logprobs of token {token} have no entry for {value}, the id that was generated; give those that "
                "vLLM returned with it"
            )
        entry = position[key]
        found.append(entry if isinstance(entry, int | float | None) else _get(entry, "logprob"))
    return _floats(found)


def _check_length(values: Any, ids: npt.NDArray[Any], prompt_length: int, at: _Place) -> None:
    if len(values) != len(ids):
        whole = len(values) == len(ids) + prompt_length
        cause = "; they are those of prompt and response together, give those of the response" if whole else ""
        raise at.error(f"there are {len(values)} log-probs for {len(ids)} tokens of the response{cause}")


def _check_sum(values: Floats, total: Any, at: _Place) -> None:
    """Refuse log-probs of a part of the response: the last output of a stream of differences."""
    if total is None or not np.isfinite(values).all():
        return
    found = float(values.sum(dtype=np.float64))
    if abs(found - total) > _SUM_ROUNDING * max(1.0, abs(total)):
        raise at.error(
            f"its log-probs add up to {found:g}, and cumulative_logprob is {total:g}: tokens are missing, as in the "
            "last part of a stream; request output_kind=FINAL_ONLY"
        )


def _check_stop(ids: npt.NDArray[Any], stop: Any, at: _Place, remedy: str = "give the ids that it generated") -> None:
    """Refuse a response without the token that ended it: the policy would not learn to stop."""
    if isinstance(stop, int) and not isinstance(stop, bool) and (not len(ids) or ids[-1] != stop):
        last = f"the last id is {ids[-1]}" if len(ids) else "there are no ids"
        raise at.error(f"the engine stopped at token {stop}, and {last}; {remedy}")
