from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.distributed import Rank, find_rank, worker_rank
from penstock.errors import ConfigError

LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, and no torch that another test imported."""
    for name in LAUNCHER_NAMES:
        monkeypatch.delenv(name, raising=False)
    for module in ("torch.distributed", "torch.utils.data"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def start_torch(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, *, started: bool = True) -> None:
    module: Any = ModuleType("torch.distributed")
    module.is_available = lambda: True
    module.is_initialized = lambda: started
    module.get_rank = lambda: rank
    module.get_world_size = lambda: world
    monkeypatch.setitem(sys.modules, "torch.distributed", module)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 4\b"):
        Rank(4, 4)
    with pytest.raises(ConfigError, match=r"rank -1\b"):
        Rank(-1, 2)
    with pytest.raises(ConfigError, match=r"world_size.*\b0\b"):
        Rank(0, 0)
    for wrong in (1.0, "1", True, None):
        with pytest.raises(ConfigError, match=r"\brank\b"):
            Rank(wrong, 4)  # type: ignore[arg-type]


def test_whole_numbers_of_numpy_are_ranks_too() -> None:
    rank = Rank(np.int64(2), np.int32(4))  # type: ignore[arg-type]
    assert (rank, str(rank), type(rank.rank)) == (Rank(2, 4), "rank 2 of 4", int)


def test_a_lone_process_is_rank_0_of_1() -> None:
    assert find_rank() == Rank(0, 1)
    assert worker_rank() == Rank(0, 1)


def test_arguments_come_before_torch_and_torch_before_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert find_rank() == Rank(1, 2)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert find_rank() == Rank(2, 3)
    start_torch(monkeypatch, 5, 8, started=False)
    assert find_rank() == Rank(2, 3)
    start_torch(monkeypatch, 5, 8)
    assert find_rank() == Rank(5, 8)
    assert find_rank(0, 4) == Rank(0, 4)


def test_an_interactive_slurm_shell_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert find_rank() == Rank(0, 1)


def test_half_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rank=1.*world_size"):
        find_rank(1)
    with pytest.raises(ConfigError, match="world_size=4"):
        find_rank(world_size=4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE.*'4'"):
        find_rank()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_rank() == Rank(0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"'0'.*WORLD_SIZE"):
        find_rank()
    assert find_rank(1, 2) == Rank(1, 2)


@pytest.mark.parametrize(("rank", "world"), [("x", "4"), ("4", "4"), ("", "1"), ("0", "0")])
def test_a_launcher_that_names_no_rank_is_an_error(rank: str, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match=rf"'{rank}'.*WORLD_SIZE"):
        find_rank()


def test_model_parallel_neighbours_share_a_data_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [find_rank(rank, 8, model_parallel_size=4) for rank in range(8)] == [Rank(0, 2)] * 4 + [Rank(1, 2)] * 4
    start_torch(monkeypatch, 5, 6)
    assert find_rank(model_parallel_size=2) == Rank(2, 3)
    with pytest.raises(ConfigError, match="model_parallel_size=4"):
        find_rank(model_parallel_size=4)
    with pytest.raises(ConfigError, match="model_parallel_size"):
        find_rank(model_parallel_size=0)


def test_a_group_says_the_data_rank_itself() -> None:
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
    assert find_rank(group=group) == Rank(1, 3)
    mesh = SimpleNamespace(get_coordinate=lambda: [1, 2], shape=(2, 3))
    assert find_rank(group=mesh) == Rank(5, 6)
    with pytest.raises(ConfigError, match=r"shape=\(2,\)"):
        find_rank(group=SimpleNamespace(get_coordinate=lambda: None, shape=(2,)))
    with pytest.raises(ConfigError, match="DeviceMesh"):
        find_rank(group=-100)
    with pytest.raises(ConfigError, match=r"rank=0.*\bgroup\b"):
        find_rank(0, 2, group=group)
    with pytest.raises(ConfigError, match=r"model_parallel_size=2.*\bgroup\b"):
        find_rank(group=group, model_parallel_size=2)


def test_a_worker_of_a_torch_loader_knows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch.utils.data")
    module.get_worker_info = lambda: None
    monkeypatch.setitem(sys.modules, "torch.utils.data", module)
    assert worker_rank() == Rank(0, 1)
    module.get_worker_info = lambda: SimpleNamespace(id=2, num_workers=3)
    assert worker_rank() == Rank(2, 3)


def test_looking_for_torch_does_not_import_it() -> None:
    program = (
        "import sys; from penstock.distributed import find_rank, worker_rank; find_rank(0, 1); find_rank(); "
        "worker_rank(); assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
