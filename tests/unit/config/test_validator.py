from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config import REQUIRED, Setting, SharedConfig, load_shared_config, validate
from penstock.config.settings import KNOWN, PREPARE, SHARED, TRAIN
from penstock.errors import ConfigError

GOOD = {"dataset": "tiny", "batch_size": 4, "block_size": 8}

NANO_GPT = """
out_dir = 'out-shakespeare-char'
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
bias = False
init_from = 'scratch'
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
decay_lr = True
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
eval_only = False
backend = 'nccl'
compile = False
device = 'cpu'
"""


def problems(config: dict[str, Any], **settings: Setting) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(SharedConfig(config), settings, owner="TinyProvider")
    text = str(caught.value)
    return [line.strip() for line in text.splitlines()[1:]] if "\n" in text else [text.removeprefix("the config: ")]


def test_a_sufficient_config_gets_the_defaults_of_what_it_leaves_out() -> None:
    config = validate(GOOD)
    assert {name: config[name] for name in GOOD} == GOOD
    assert config.keys() == KNOWN.keys()
    assert (config.seed, config.backlog_bytes, config.split_proportions) == (0, 2**30, {"train": 0.9, "val": 0.1})
    assert config.data_root == Path("data")
    assert validate(config) == config


def test_the_defaults_pass_their_own_checks() -> None:
    for name, setting in KNOWN.items():
        assert setting.required or setting.accept(setting.default) == setting.default, name
    assert {name for name, setting in KNOWN.items() if setting.required} == GOOD.keys()
    assert len(KNOWN) == len(SHARED) + len(PREPARE) + len(TRAIN)


def test_a_config_of_another_trainer_is_taken_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "train.py").write_text(NANO_GPT)
    with caplog.at_level(logging.INFO, "penstock"):
        config = validate(load_shared_config(tmp_path / "train.py"))
    assert config.gradient_accumulation_steps == 1
    assert config.path == tmp_path / "train.py"
    (line,) = caplog.messages
    assert "always_save_checkpoint, wandb_log" in line
    assert "learning_rate" not in line


def test_everything_that_is_wrong_is_said_at_once() -> None:
    config = {"dataset": "../x", "batch_sise": 8, "block_size": "64", "learning_rate": -1, "n_heads": 4, "mask": 2}
    said = problems(config, mask=Setting(float, check=lambda p: 0 < p <= 1, text="a share"), noise=Setting(float))
    expected = [
        "batch_sise = 8: .*'batch_size'.*prepare and train",
        r"n_heads = 4: .*'n_head'.*\btrain\b",
        "noise: .*TinyProvider",
        r"dataset = '\.\./x': .*prepare and train",
        "block_size = '64': .*prepare and train",
        r"learning_rate = -1: .*\btrain\b",
        "mask = 2: .*a share.*TinyProvider",
    ]
    for problem, facts in zip(said, expected, strict=True):
        assert re.match(facts, problem)


def test_one_problem_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("dataset = 'a'\nbatch_size = 4\ndef block_size(): return 3\n")
    with pytest.raises(ConfigError, match=r"train\.py.*block_size"):
        validate(load_shared_config(tmp_path / "train.py"))


@pytest.mark.parametrize(
    "name", ["batch_sizes", "BATCH_SIZE", "batchsize", "bathc_size", "block_sze", "n_embed", "dropuot"]
)
def test_slips_of_the_pen_are_found_even_beside_the_right_name(name: str) -> None:
    assert name in problems({**GOOD, "n_embd": 128, "dropout": 0.1, name: 4})[0]


@pytest.mark.parametrize("name", ["beta3", "seed2", "stage_1", "lr", "min_iters", "size", "eval_batch_size", "x"])
def test_names_of_their_own_are_no_slips(name: str) -> None:
    assert validate({**GOOD, name: 4})[name] == 4


def test_a_declared_name_is_no_slip() -> None:
    assert validate({**GOOD, "batch_sizes": [1]}, {"batch_sizes": Setting(list[int])}).batch_sizes == (1,)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "a\\b", "C:", "a\0b", " a", "a\n", "a/"])
def test_a_dataset_is_the_plain_name_of_a_directory(name: str) -> None:
    assert "dataset" in problems({**GOOD, "dataset": name})[0]


@pytest.mark.parametrize("name", ["char_diffusion", "a.b", "größe", "two words", "a-b"])
def test_a_dataset_may_have_any_plain_name(name: str) -> None:
    assert validate({**GOOD, "dataset": name}).dataset == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"dataset": 3}, "dataset"),
        ({"seed": -1}, "seed"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"compression": "gzip"}, "compression"),
        ({"resume": "true"}, "resume"),
        ({"device": "tpu"}, "device"),
        ({"queue_dir": ""}, "queue_dir"),
        ({"queue_dir": "a\0"}, "queue_dir"),
        ({"backlog_bytes": "lots"}, "backlog_bytes"),
        ({"backlog_bytes": 0}, "backlog_bytes"),
        ({"split_proportions": {}}, "split_proportions"),
        ({"split_proportions": {"train": 0}}, "share"),
        ({"split_proportions": {"train": -1, "val": 2}}, "share"),
        ({"split_proportions": {"../x": 1}}, "'../x'"),
        ({"split_proportions": [0.9, 0.1]}, "mapping"),
        ({"max_batches": 0}, "max_batches"),
        ({"n_embd": 100, "n_head": 3}, "n_embd"),
        ({"min_lr": 0.1, "learning_rate": 0.01}, "min_lr"),
    ],
)
def test_bad_values_of_known_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    (problem,) = problems({**GOOD, **changes})
    assert message in problem


def test_values_take_the_form_of_their_kind() -> None:
    config = validate(
        {**GOOD, "max_iters": 5e3, "learning_rate": 1, "backlog_bytes": "2 MiB", "queue_dir": "~/q", "out_dir": "o"}
    )
    assert (config.max_iters, config.learning_rate, config.backlog_bytes) == (5000, 1.0, 2 * 2**20)
    assert type(config.max_iters) is int
    assert type(config.learning_rate) is float
    assert (config.queue_dir, config.out_dir) == (Path("~/q").expanduser(), Path("o"))


def test_what_two_declare_must_be_right_for_both() -> None:
    seed, size = Setting(int, 7, check=lambda s: s % 2 == 1, text="an odd one"), Setting(int, 64)
    assert validate(GOOD, {"seed": seed}).seed == 7
    assert re.search(r"seed = 2: .*an odd one.*TinyProvider", *problems({**GOOD, "seed": 2}, seed=seed))
    assert re.search(r"seed = -1: .*TinyProvider", *problems({**GOOD, "seed": -1}, seed=seed))
    assert problems({"dataset": "a", "batch_size": 1}, block_size=size)[0].startswith("block_size")
    [missing] = problems(GOOD, seed=Setting(int))
    assert re.search(r"seed.*TinyProvider", missing)


def test_a_check_may_return_words_or_raise() -> None:
    def even(value: int) -> str | None:
        return None if value % 2 == 0 else f"{value} is odd"

    def broken(value: int) -> bool:
        raise ZeroDivisionError("oh")

    assert validate({**GOOD, "own": 2}, {"own": Setting(int, check=even)}).own == 2
    assert re.match("own = 3: 3 is odd.*TinyProvider", *problems({**GOOD, "own": 3}, own=Setting(int, check=even)))
    assert re.match("own = 3: .*ZeroDivisionError: oh", *problems({**GOOD, "own": 3}, own=Setting(int, check=broken)))


def test_a_setting_that_cannot_be_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ConfigError, match="'object'"):
        Setting(object)
    with pytest.raises(ConfigError, match="'x'"):
        Setting(int, "x")
    with pytest.raises(ConfigError):
        Setting(Any, object())
    with pytest.raises(TypeError):
        Setting(int, 3, lambda value: True)  # type: ignore[misc]
    assert Setting(list[float], [1, 2]).default == (1.0, 2.0)
    assert repr(Setting(int).default) == repr(REQUIRED) == "REQUIRED"
    with pytest.raises(ConfigError, match=r"TinyProvider.*settings\['a'\]"):
        validate(GOOD, {"a": int}, owner="TinyProvider")  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="'a b'"):
        validate(GOOD, {"a b": Setting(int)})
