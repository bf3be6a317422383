"""Outputs of inference engines become rollouts: the ids and log-probs of the tokens that were generated, or an error.

The shapes are those of vLLM's `RequestOutput`, SGLang's `generate`, OpenAI-style responses with vLLM's ids, TRL's
generation, verl's `DataProto` and tau-bench's results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock import LiveBuffer, Rollout, RolloutDataLoader, RolloutQueue
from penstock.errors import ConfigError, DataError
from penstock.rl import (
    TextRule,
    read_rollouts,
    rollouts_from_openai,
    rollouts_from_sglang,
    rollouts_from_transcripts,
    rollouts_from_trl,
    rollouts_from_verl,
    rollouts_from_vllm,
)
from penstock.tokenizers.simple import ByteTokenizer

STOP = 9


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs:
    """vLLM's columns of log-probs; a sequence of dicts, too."""

    def __init__(self, positions: list[dict[int, Logprob]]) -> None:
        self.positions = positions
        self.start_indices = np.cumsum([0, *map(len, positions)])[:-1].tolist()
        self.token_ids = [token for position in positions for token in position]
        self.logprobs = [entry.logprob for position in positions for entry in position.values()]

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Any:
        return iter(self.positions)


def sample(index: int = 0, ids: tuple[int, ...] = (7, STOP), **other: Any) -> SimpleNamespace:
    """vLLM's `CompletionOutput` with `logprobs=2`: a likelier token beside each that was generated."""
    given = {
        "index": index,
        "text": "x",
        "token_ids": list(ids),
        "cumulative_logprob": -0.5 * len(ids),
        "logprobs": [{token: Logprob(-0.5, 2, "x"), 100 + at: Logprob(-0.1, 1, "y")} for at, token in enumerate(ids)],
        "finish_reason": "stop",
        "stop_reason": STOP,
    }
    return SimpleNamespace(**given | other)


def request(name: str = "4", *samples: Any, **other: Any) -> SimpleNamespace:
    given = {
        "request_id": name,
        "prompt": "say",
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": [None, {2: Logprob(-3.0)}, {3: Logprob(-4.0)}],
        "outputs": list(samples) or [sample()],
        "finished": True,
    }
    return SimpleNamespace(**given | other)


def generated(ids: tuple[int, ...] = (7, STOP), **other: Any) -> dict[str, Any]:
    """SGLang's dict, with `return_logprob=True` and `logprob_start_len=0`."""
    facts = {
        "id": "5b1e",
        "finish_reason": {"type": "stop", "matched": STOP},
        "prompt_tokens": 3,
        "weight_version": "6",
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "e2e_latency": 0.2,
        "input_token_logprobs": [[None, 1, None], [-3.0, 2, None], [-4.0, 3, None]],
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "output_top_logprobs": [[[-0.1, 100, None], [-0.5, token, None]] for token in ids],
    }
    return {"text": "x", "output_ids": list(ids), "meta_info": facts | other.pop("meta_info", {})} | other


def chat(*choices: dict[str, Any], **other: Any) -> dict[str, Any]:
    given = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": list(choices) or [answer()],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": None,
    }
    return given | other


def answer(index: int = 0, ids: tuple[int, ...] = (7, STOP), **other: Any) -> dict[str, Any]:
    content = [
        {"token": "x", "logprob": -0.5, "bytes": [1], "top_logprobs": [{"token": "y", "logprob": -0.1, "bytes": [2]}]}
        for _ in ids
    ]
    given = {
        "index": index,
        "message": {"role": "assistant", "content": "x", "tool_calls": [], "reasoning": None},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": STOP,
        "token_ids": list(ids),
    }
    return given | other


def completion(index: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **other: Any) -> dict[str, Any]:
    given = {
        "index": index,
        "text": "x",
        "logprobs": {
            "text_offset": [0, 1],
            "token_logprobs": [-0.5, -0.5],
            "tokens": ["x", ""],
            "top_logprobs": [{"y": -0.1, "x": -0.5}, {"y": -0.1, "": -0.5}],
        },
        "finish_reason": "stop",
        "stop_reason": STOP,
        "token_ids": [7, STOP],
        "prompt_token_ids": list(prompt),
    }
    return given | other


def as_object(value: Any) -> Any:
    """A dict as the object of a client: attributes instead of keys."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_object(inner) for key, inner in value.items()})
    return [as_object(inner) for inner in value] if isinstance(value, list) else value


ONE: dict[str, tuple[Callable[..., list[Rollout]], Callable[[], Any]]] = {
    "vllm": (rollouts_from_vllm, request),
    "vllm, flat": (
        rollouts_from_vllm,
        lambda: request("4", sample(logprobs=FlatLogprobs(sample().logprobs))),
    ),
    "sglang": (rollouts_from_sglang, generated),
    "chat": (rollouts_from_openai, chat),
    "chat, object": (rollouts_from_openai, lambda: as_object(chat())),
    "completion": (rollouts_from_openai, lambda: chat(completion(), object="text_completion", prompt_token_ids=None)),
}


@pytest.mark.parametrize("kind", ONE)
def test_the_generated_tokens_have_their_own_log_probs(kind: str) -> None:
    function, make = ONE[kind]
    (rollout,) = function(make(), rewards=[1.0], policy_version=6)
    table = read_rollouts([rollout])
    assert table.prompt_ids[0].tolist() == [1, 2, 3]
    assert table.response_ids[0].tolist() == [7, STOP]
    assert table.logprobs is not None
    assert table.logprobs[0].tolist() == [-0.5, -0.5]
    assert (table.rewards[0], table.versions[0], table.finish_reasons[0]) == (1.0, 6, "stop")
    assert not table.tokenized[0]


@pytest.mark.parametrize("kind", ONE)
def test_every_reader_takes_outputs_as_they_are(kind: str, tmp_path: Path) -> None:
    _, make = ONE[kind]
    expected = read_rollouts([make()], missing_rewards="zero")
    for data in (make(), [make()], (make() for _ in range(1))):
        table = read_rollouts(data, missing_rewards="zero")
        assert table.response_ids[0].tolist() == expected.response_ids[0].tolist()
    options: dict[str, Any] = {"backend": "numpy", "compute_advantages": False, "missing_rewards": "zero"}
    (batch,) = RolloutDataLoader([make()], batch_size=2, **options)
    assert batch.responses.tolist() == [[7, STOP]]
    for live in (LiveBuffer(), RolloutQueue(tmp_path / "queue", durable=False)):
        live.append(make())
        live.append([make(), make()])
        live.finish() if isinstance(live, RolloutQueue) else live.close()
        loader = RolloutDataLoader(live, rollout_batch_size=3, batch_size=4, **options)
        assert [row.tolist() for batch in loader for row in batch.responses] == [[7, STOP]] * 3
        loader.close()
        live.close()


def test_rewards_are_those_of_the_choices_as_they_are_listed() -> None:
    given = chat(answer(1, (8, STOP)), answer(0, (9, STOP)))
    found = rollouts_from_openai(given, rewards=[float(choice["token_ids"][0]) for choice in given["choices"]])
    assert [(each.response_ids[0], each.reward) for each in found] == [(8, 8.0), (9, 9.0)]  # type: ignore[index]


def test_outputs_without_rewards_are_refused_with_the_function_that_adds_them() -> None:
    with pytest.raises(DataError, match="rollouts_from_vllm"):
        RolloutDataLoader([request()], backend="numpy")
    with pytest.raises(ConfigError, match="2 rollouts"):
        rollouts_from_vllm([request(), request()], rewards=[1.0])
    with pytest.raises(ConfigError, match="list of numbers"):
        rollouts_from_vllm([request()], rewards={"4": 1.0})


def test_samples_of_one_request_are_a_group_and_requests_of_one_sample_are_grouped_by_prompt() -> None:
    several = [request("4", sample(0), sample(1)), request("5", sample(0), sample(1))]
    rollouts = rollouts_from_vllm(several, rewards=[[1.0, 0.0], [0.5, 0.25]])
    assert [(each.group, each.reward) for each in rollouts] == [("4", 1.0), ("4", 0.0), ("5", 0.5), ("5", 0.25)]
    single = rollouts_from_vllm([request(str(number)) for number in range(4)], rewards=np.arange(4.0))
    assert [each.group for each in single] == [None] * 4
    (batch,) = RolloutDataLoader(single, backend="numpy", batch_size=4)
    assert len(set(batch.groups)) == 1

    choices = [answer(1), answer(0)]
    assert [each.group for each in rollouts_from_openai(chat(*choices))] == ["chatcmpl-1"] * 2
    assert [each.metadata["sample"] for each in rollouts_from_openai(chat(*choices))] == [1, 0]
    prompts = [completion(0), completion(1, (4, 5)), completion(2), completion(3, (4, 5))]
    found = rollouts_from_openai(chat(*prompts, prompt_token_ids=None))
    assert [each.group for each in found] == ["chatcmpl-1", "chatcmpl-1/1"] * 2


def test_a_response_that_was_cut_is_marked_in_the_batch() -> None:
    cut = [
        sample(0, (7, 8), finish_reason="length", stop_reason=None),
        sample(1, (7,), finish_reason="abort", stop_reason=None),
    ]
    rollouts = rollouts_from_vllm(request("4", *cut, sample(2)), rewards=[0.0, 0.0, 1.0])
    rollouts += [
        replace(each, group="4")
        for each in rollouts_from_sglang(
            generated((7, 8), meta_info={"finish_reason": {"type": "length", "length": 2}}), rewards=[0.0]
        )
    ]
    (batch,) = RolloutDataLoader(rollouts, backend="numpy", batch_size=4)
    reasons = batch.metadata["finish_reasons"]
    assert sorted(map(str, reasons)) == ["abort", "length", "length", "stop"]
    assert batch.truncated.tolist() == [reason != "stop" for reason in reasons]


def test_sglangs_stop_token_comes_from_the_log_probs_if_the_ids_lack_it() -> None:
    (rollout,) = rollouts_from_sglang(generated(output_ids=[7]))
    assert rollout.response_ids is not None
    assert list(rollout.response_ids) == [7, STOP]
    trimmed = generated(output_ids=[7])
    del trimmed["meta_info"]["output_token_logprobs"]
    with pytest.raises(DataError, match="return_logprob"):
        rollouts_from_sglang(trimmed)


def test_prompts_that_the_engine_did_not_return_are_given_as_ids_or_text() -> None:
    bare = generated(meta_info={"input_token_logprobs": [], "weight_version": "default"}, reward=0.5, task="sum")
    for prompts in (None, [[1, 2, 3], [4]]):
        with pytest.raises((DataError, ConfigError), match="prompts"):
            rollouts_from_sglang(bare, prompts=prompts)
    (by_ids,) = rollouts_from_sglang(bare, prompts=[[1, 2, 3]])
    (by_text,) = rollouts_from_sglang(bare, prompts=["abc"])
    assert (by_ids.prompt_ids, by_ids.policy_version, by_ids.reward) == ([1, 2, 3], None, 0.5)
    assert by_ids.metadata["task"] == "sum"
    table = read_rollouts([by_text], tokenizer=ByteTokenizer())
    assert table.prompt_ids[0].tolist() == list(b"abc")
    assert table.tokenized[0]


def test_ids_that_servers_write_instead_of_tokens_are_read() -> None:
    named = answer(token_ids=None)
    for entry, token in zip(named["logprobs"]["content"], (7, STOP)):
        entry["token"] = f"token_id:{token}"
    (rollout,) = rollouts_from_openai(chat(named))
    assert rollout.response_ids is not None
    assert list(rollout.response_ids) == [7, STOP]
    with pytest.raises(DataError, match="differ"):
        rollouts_from_openai(chat(named | {"token_ids": [8, STOP]}))


def test_the_prompts_log_probs_of_an_echo_are_left_out() -> None:
    echo = completion()
    echo["logprobs"]["token_logprobs"] = [None, -3.0, -4.0, -0.5, -0.25]
    (rollout,) = rollouts_from_openai(chat(echo, prompt_token_ids=None))
    assert rollout.logprobs is not None
    assert list(rollout.logprobs) == [-0.5, -0.25]
    echo["logprobs"]["token_logprobs"][0] = -2.0
    with pytest.raises(DataError, match="prompt and response together"):
        rollouts_from_openai(chat(echo, prompt_token_ids=None))


def test_a_response_without_ids_is_text_and_has_no_log_probs() -> None:
    plain = chat(answer(token_ids=None, message={"role": "assistant", "content": "hi"}), prompt_token_ids=None)
    with pytest.raises(DataError, match="logprobs=False"):
        rollouts_from_openai(plain, prompts=["say"])
    rollouts = rollouts_from_openai(plain, prompts=["say"], rewards=[1.0], logprobs=False)
    table = read_rollouts(rollouts, tokenizer=ByteTokenizer())
    assert table.response_ids[0].tolist() == list(b"hi")
    assert table.logprobs is None
    called = answer(token_ids=None, logprobs=None, message={"content": "", "tool_calls": [{"id": "1"}]})
    with pytest.raises(DataError, match="tool_calls"):
        rollouts_from_openai(chat(called))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unfinished": (lambda: request(finished=False), "not finished"),
    "no outputs": (lambda: [request(), request("5", outputs=[])], "row 1 .*no outputs"),
    "another thing": (lambda: [request(), 5], "row 1"),
    "chosen token absent": (lambda: request("4", sample(token_ids=[8, STOP])), "token 0 .* 8"),
    "prompt's log-probs": (lambda: request("4", sample(logprobs=sample().logprobs[:1] * 5)), "prompt and response"),
    "too few log-probs": (lambda: request("4", sample(logprobs=sample().logprobs[:1])), "1 log-probs for 2"),
    "end of a stream": (lambda: request("4", sample(cumulative_logprob=-40.0)), "FINAL_ONLY"),
    "stop token absent": (lambda: request("4", sample(0, (7, 8))), "stopped at token 9"),
    "ids of another": (lambda: generated(output_ids=[1, 2, 3]), "differ"),
    "sglang, running": (lambda: generated(meta_info={"finish_reason": None}), "finish_reason"),
    "chunk of a stream": (lambda: chat({"index": 0, "delta": {"content": "x"}}), "stream"),
    "placeholder": (
        lambda: chat(completion(logprobs={"tokens": ["", ""], "token_logprobs": [-0.5, -9999.0]})),
        "placeholder",
    ),
    "no prompt": (lambda: chat(prompt_token_ids=None), "return_token_ids"),
    "above 0": (lambda: request("4", sample(logprobs=[{7: 0.7}, {9: 0.7}], cumulative_logprob=1.4)), "at most 0"),
    "none": (lambda: request("4", sample(logprobs=[{7: Logprob(float("nan"))}, {9: -0.5}])), "finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_train_on_other_tokens_is_refused_with_its_row(kind: str) -> None:
    make, fact = WRONG[kind]
    with pytest.raises(DataError, match=fact):
        read_rollouts(make(), missing_rewards="zero")


def plain_request() -> dict[str, Any]:
    """vLLM's output as JSON has it: ids are keys of the log-probs, so text."""
    logprobs = [{str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "x"}} for token in (7, STOP)]
    return vars(request(outputs=[vars(sample(logprobs=logprobs))], prompt_logprobs=None))


@pytest.mark.parametrize("make", [generated, chat, plain_request], ids=["sglang", "chat", "vllm"])
def test_a_file_of_outputs_is_read_as_the_outputs_are(make: Callable[[], Any], tmp_path: Path) -> None:
    rows = [make(), make()]
    (tmp_path / "outputs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = read_rollouts(tmp_path / "outputs.jsonl", missing_rewards="zero")
    assert table.logprobs is not None
    assert [table.response_ids[1].tolist(), table.logprobs[1].tolist()] == [[7, STOP], [-0.5, -0.5]]
    assert [table.prompt_ids[1].tolist(), len(table)] == [[1, 2, 3], 2]


def test_columns_that_are_named_are_read_by_their_names_also_of_outputs() -> None:
    row = generated(prompt_ids=[5], reward=1.0)
    table = read_rollouts([row], columns={"response_ids": "output_ids"})
    assert [table.prompt_ids[0].tolist(), table.logprobs] == [[5], None]
    own = {"prompt_ids": [5], "response_ids": [6], "reward": 1.0, "meta_info": {"finish_reason": "stop"}}
    assert read_rollouts([own]).metadata[0] == {"meta_info": {"finish_reason": "stop"}}


# -- TRL and verl ------------------------------------------------------------------------------------------------------

TRL = {"prompt_ids": [[1, 2], [3]], "completion_ids": [[7, 9], [8]]}


def test_trls_log_probs_of_likely_tokens_become_those_of_the_generated_ones() -> None:
    likely = {
        "logprobs": [[[-0.1, -0.5], [-0.2, -0.3]], [[-0.6, -0.7]]],
        "logprob_token_ids": [[[100, 7], [9, 100]], [[8, 100]]],
    }
    rollouts = rollouts_from_trl({**TRL, **likely}, rewards=[1.0, 0.0], policy_version=2)
    assert [list(each.logprobs) for each in rollouts if each.logprobs is not None] == [
        pytest.approx([-0.5, -0.2]),
        pytest.approx([-0.6]),
    ]
    assert {(each.group, each.id, each.policy_version) for each in rollouts} == {(None, None, 2)}
    rows = [{key: value[row] for key, value in {**TRL, **likely, "reward": [1.0, 0.0]}.items()} for row in range(2)]
    table = read_rollouts(rows)
    assert table.logprobs is not None
    assert table.logprobs[0].tolist() == pytest.approx([-0.5, -0.2])
    single = {**TRL, "logprobs": [[[-0.5], [-0.25]], [[-1.0]]]}
    table = read_rollouts(rollouts_from_trl(single, rewards=[0.0, 1.0]))
    assert table.logprobs is not None
    assert table.logprobs[0].tolist() == [-0.5, -0.25]
    with pytest.raises(DataError, match="logprob_token_ids"):
        rollouts_from_trl({**TRL, "logprobs": likely["logprobs"]})


def data_proto(torch: Any = None) -> Any:
    """verl's DataProto: prompts padded on the left, responses on the right; the second answer has a tool's tokens."""
    make = np.array if torch is None else torch.tensor
    batch = {
        "prompts": make([[0, 1, 2], [3, 4, 5]]),
        "responses": make([[7, 9, 0, 0], [7, 50, 51, 9]]),
        "input_ids": make([[0, 1, 2, 7, 9, 0, 0], [3, 4, 5, 7, 50, 51, 9]]),
        "attention_mask": make([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]),
        "position_ids": make([[0, 0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6]]),
        "response_mask": make([[1, 1, 0, 0], [1, 0, 0, 1]]),
        "old_log_probs": make([[-0.5, -0.5, 0, 0], [-0.5, 3.0, 3.0, -0.25]]),
        "token_level_scores": make([[0, 1.0, 0, 0], [0, 0, 0, 0.5]]),
    }
    names = np.array(["q", "q2"], object)
    return SimpleNamespace(batch=batch, non_tensor_batch={"uid": names, "data_source": names}, meta_info={})


def test_a_data_proto_loses_its_padding_and_keeps_the_tools_tokens_masked() -> None:
    rollouts = rollouts_from_verl(data_proto(), policy_version=3)
    assert [list(each.prompt_ids) for each in rollouts if each.prompt_ids is not None] == [[1, 2], [3, 4, 5]]
    assert [list(each.response_ids) for each in rollouts if each.response_ids is not None] == [[7, 9], [7, 50, 51, 9]]
    assert rollouts[1].loss_mask is not None
    assert [bool(flag) for flag in rollouts[1].loss_mask] == [True, False, False, True]
    assert rollouts[1].logprobs is not None
    assert list(rollouts[1].logprobs)[::3] == [-0.5, -0.25]
    assert [each.group for each in rollouts] == ["q", "q2"]
    loader = RolloutDataLoader(data_proto(), estimator="reward_to_go", backend="numpy", batch_size=2)
    assert sorted(next(iter(loader)).groups) == ["q", "q2"]


def test_nested_tensors_are_rows_without_padding() -> None:
    torch = pytest.importorskip("torch")

    def nested(*rows: Any) -> Any:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    table = read_rollouts(
        {"prompts": nested([1, 2], [3]), "responses": nested([7, 9], [8]), "rm_scores": nested([0.0, 1.0], [0.5])}
    )
    assert [table.prompt_ids[0].tolist(), table.response_ids[1].tolist()] == [[1, 2], [8]]


# -- transcripts -------------------------------------------------------------------------------------------------------

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"


def result(trial: int = 0, **other: Any) -> dict[str, Any]:
    """Result of a tau-bench task, with a tool call; messages of the assistant as clients dump them."""
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"id": 3}'}}
    given = {
        "task_id": 17,
        "reward": float(trial % 2),
        "info": {"source": "user", "user_cost": 0.01},
        "traj": [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "order 3?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None},
            {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "shipped"},
            {"role": "assistant", "content": "It is shipped.", "tool_calls": None, "function_call": None},
            {"role": "user", "content": "###STOP###"},
        ],
        "trial": trial,
    }
    return given | other


def test_transcripts_train_on_the_assistants_turns_and_group_the_trials_of_a_task(tmp_path: Path) -> None:
    results = [result(0), result(1)]
    (tmp_path / "results.json").write_text(json.dumps(results))
    expected = None
    for data in (results, rollouts_from_transcripts(results), tmp_path / "results.json"):
        table = read_rollouts(data, tokenizer=TOKENIZER, text=TextRule(chat_template="qwen"))
        assert table.groups.tolist() == [17, 17]
        assert table.rewards.tolist() == [0.0, 1.0]
        assert table.tokenized.all()
        mask = table.loss_mask[0]
        assert 0 < mask.sum() < len(mask)
        assert mask[-1]  # what the simulated user says last is not part of the response
        ids = (table.prompt_ids[0].tolist(), table.response_ids[0].tolist(), mask.tolist())
        assert expected is None or ids == expected
        expected = ids
    (batch,) = RolloutDataLoader(tmp_path / "results.json", TOKENIZER, template="qwen", batch_size=2, backend="numpy")
    assert sorted(batch.rewards.tolist()) == [0.0, 1.0]


def test_tools_are_part_of_a_transcripts_prompt() -> None:
    tool = {"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {}}}
    (row,) = rollouts_from_transcripts(result(), tools=[tool])
    assert (row["group"], row["trial"]) == (17, 0)
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "text": TextRule(chat_template="qwen")}
    with_tools, without = read_rollouts([row], **options), read_rollouts([result()], **options)
    assert len(with_tools.prompt_ids[0]) > len(without.prompt_ids[0])
    assert with_tools.response_ids[0].tolist() == without.response_ids[0].tolist()


def test_a_run_that_failed_has_no_messages_and_is_refused_or_skipped(caplog: pytest.LogCaptureFixture) -> None:
    failed = result(1, traj=[], info={"error": "rate limit", "traceback": "..."})
    with pytest.raises(DataError, match=r"row 1 .*rate limit"):
        rollouts_from_transcripts([result(), failed])
    assert len(rollouts_from_transcripts([result(), failed], on_error="skip")) == 1
    assert "1 of 2" in caplog.text
    with pytest.raises(ConfigError, match="on_error"):
        rollouts_from_transcripts([result()], on_error="drop")  # type: ignore[arg-type]
