"""Positions in a mesh: data, context, tensor and pipeline parallelism, from sizes and from meshes of frameworks."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import MLXDataLoader, PretrainDataLoader
from penstock.distributed import MeshPosition, Rank, find_position, read_mesh
from penstock.errors import ConfigError, ResumeError
from penstock.integrations.loader_facts import check_world_size
from penstock.loaders import Shard, load_config
from token_stores import make_rows, make_store

SIZES = st.fixed_dictionaries({name: st.integers(1, 3) for name in ("pp", "dp", "cp", "tp")})


class TorchMesh:
    """What a torch DeviceMesh shows of itself, for one of its ranks; real ones are in test_mesh_ranks.py."""

    def __init__(self, sizes: dict[str, int] | None, coordinate: tuple[int, ...] | None) -> None:
        self.mesh_dim_names = None if sizes is None else tuple(sizes)
        self.shape = tuple((sizes or {}).values())
        self._coordinate = coordinate

    def get_coordinate(self) -> list[int] | None:
        return None if self._coordinate is None else list(self._coordinate)

    def __repr__(self) -> str:
        return f"DeviceMesh({self.mesh_dim_names})"


def jax_mesh(names: tuple[str, ...], processes: Any, here: int) -> Any:
    """A mesh of JAX whose devices belong to these processes."""
    owners = np.asarray(processes)
    devices = np.array(
        [SimpleNamespace(id=number, process_index=int(owner)) for number, owner in enumerate(owners.flat)]
    ).reshape(owners.shape)
    local = [device for device in devices.flat if device.process_index == here]
    return SimpleNamespace(axis_names=names, devices=devices, local_devices=local)


@given(sizes=SIZES)
def test_ranks_are_numbered_as_megatron_and_torchtitan_do(sizes: dict[str, int]) -> None:
    places = itertools.product(*(range(sizes[name]) for name in ("pp", "dp", "cp", "tp")))
    for rank, (pp, dp, cp, tp) in enumerate(places):
        place = find_position(rank, **sizes)  # type: ignore[arg-type]
        wanted = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        assert place == MeshPosition(**{name: Rank(wanted[name], sizes[name]) for name in wanted})
        assert place.rank == rank


@given(
    sizes=SIZES, order=st.permutations(["pp", "dp", "cp", "tp"]), missing=st.sets(st.sampled_from(["pp", "cp", "tp"]))
)
def test_a_mesh_has_any_of_the_dimensions_in_any_order(
    sizes: dict[str, int], order: list[str], missing: set[str]
) -> None:
    present = {name: sizes[name] for name in order if name not in missing}
    for coordinate in itertools.product(*map(range, present.values())):
        place = read_mesh(TorchMesh(present, coordinate))
        for name, size, here in zip(present, present.values(), coordinate):
            assert getattr(place, name) == Rank(here, size)
        assert all(getattr(place, name) == Rank() for name in missing)
        shard = Shard.from_mesh(TorchMesh(present, coordinate), context="zigzag")
        assert shard.find_position() == place
        assert shard.find_rank() == place.dp
        assert shard.context_slice is not None
        assert shard.context_slice.rank == place.cp


@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard", "cp", "tp"), ("replicate", "fsdp", "sp", "model")])
def test_several_data_dimensions_count_as_one_in_their_order(names: tuple[str, ...]) -> None:
    mesh = TorchMesh(dict(zip(names, (2, 3, 2, 1))), (1, 2, 1, 0))
    place = read_mesh(mesh)
    assert (place.dp, place.cp, place.tp) == (Rank(5, 6), Rank(1, 2), Rank(0, 1))


def test_processes_of_jax_have_the_data_of_their_devices() -> None:
    hosts = [[0, 0], [0, 0], [1, 1], [1, 1]]  # two hosts of four devices, (dp=4, tp=2)
    assert read_mesh(jax_mesh(("dp", "tp"), hosts, 1)).dp == Rank(1, 2)
    assert read_mesh(jax_mesh(("data", "model"), hosts, 0)).tp == Rank(0, 1)
    # cp over hosts: they share samples.
    place = read_mesh(jax_mesh(("cp", "dp"), [[0, 0], [1, 1]], 1))
    assert (place.dp, place.cp) == (Rank(0, 1), Rank(1, 2))
    with pytest.raises(ConfigError, match=r"\(0, 2\).*neighbours"):
        read_mesh(jax_mesh(("dp",), [0, 1, 0, 1], 0))
    with pytest.raises(ConfigError, match="no device"):
        read_mesh(jax_mesh(("dp",), [0, 1], 7))


def test_a_real_mesh_of_jax_is_understood() -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    assert read_mesh(mesh) == MeshPosition()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (TorchMesh({"dp": 2, "ep": 2}, (0, 0)), r"'ep'.*known names are.*mesh_dim_names"),
        (TorchMesh({"dp": 2, "ctx": 2}, (0, 0)), r"'ctx'"),
        (TorchMesh({"dp_shar": 2}, (0,)), r"did you mean 'dp_shard'"),
        (TorchMesh({}, ()), r"no dimension"),
        (TorchMesh(None, (0,)), r"no names.*mesh_dim_names"),
        (TorchMesh({"dp": 2}, None), r"not part of the mesh"),
        ({"dp": 2}, r"expected a torch DeviceMesh or a jax Mesh.*dp="),
        (None, r"expected a torch DeviceMesh"),
    ],
)
def test_a_mesh_that_is_not_understood_is_refused(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard.from_mesh(mesh)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rank": 0, "world_size": 6, "cp": 4}, r"6 processes.*cp=4 x tp=1|6 processes.*= 4"),
        ({"rank": 0, "world_size": 8, "dp": 3, "cp": 2}, r"dp=3.*mesh of 6 processes.*rank 0 of 8.*rank=0 to 5"),
        ({"dp": 2, "cp": 2}, r"mesh of 4 processes, and this is rank 0 of 1"),
        ({"rank": 8, "dp": 2, "cp": 4}, r"rank 8.*0 to 7"),
        ({"rank": 0, "cp": 2}, r"world_size"),
        ({"rank": 0, "dp": 2, "tp": 0}, r"tp.*0"),
        ({"rank": 0, "dp": 1.5}, r"dp.*1\.5"),
        ({"rank": 0, "dp": 2, "cp": 2, "model_parallel_size": 2}, r"model_parallel_size=2.*pass one"),
        ({"dp": 2, "cp": 2, "group": object()}, r"group=.*pass one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    sizes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        Shard(**sizes).find_rank()


def test_a_whole_mesh_is_no_data_parallel_group() -> None:
    with pytest.raises(ConfigError, match=r"'tp'.*from_mesh.*mesh\['dp'\]"):
        Shard(group=TorchMesh({"dp": 2, "tp": 2}, (1, 1))).find_rank()
    assert Shard(group=TorchMesh({"replicate": 2, "other": 2}, (1, 0))).find_rank() == Rank(2, 4)


def test_sizes_go_with_the_rank_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    place = Shard(cp=2, tp=2).find_position()
    assert (place.dp, place.cp, place.tp) == (Rank(1, 2), Rank(0, 2), Rank(1, 2))
    assert Shard(dp=4, pp=2).find_rank() == Rank(1, 4)


# Loaders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("mesh") / "store", make_rows(50, 20))


def make(store: Path, **more: Any) -> PretrainDataLoader:
    return PretrainDataLoader(store, chunk_size=16, backend="numpy", **{"batch_size": 2, **more})


def test_ranks_that_share_samples_get_identical_batches_and_states(store: Path) -> None:
    sizes: Any = {"dp": 2, "cp": 2, "tp": 2, "pp": 2}
    wanted = {rank: [batch.input_ids.tolist() for batch in make(store, rank=rank, world_size=2)] for rank in range(2)}
    states = []
    for rank in range(16):
        with make(store, shard=Shard(rank=rank, **sizes)) as loader:
            assert [batch.input_ids.tolist() for batch in loader] == wanted[rank // 4 % 2]
            states.append(loader.state_dict())
    assert all(state == states[0] for state in states)


def test_a_state_loads_on_any_mesh_with_the_same_global_batch(store: Path) -> None:
    with make(store, shard=Shard(dp=4, cp=2, rank=5, context="zigzag"), batch_size=1) as loader:
        loader.get_batch()
        state = loader.state_dict()
    with (
        make(store, shard=Shard(dp=2, tp=4, rank=7)) as other,
        make(store, batch_size=4, rank=0, world_size=1) as alone,
    ):
        for each in (other, alone):
            each.load_state_dict(state)
        whole = alone.get_batch().input_ids.tolist()
        assert other.get_batch().input_ids.tolist() == whole[2:]
    with make(store, shard=Shard(dp=3, rank=0)) as loader, pytest.raises(ResumeError, match=r"\b6\b"):
        loader.load_state_dict(state)


def test_every_loader_takes_the_shard_of_a_mesh() -> None:
    samples = [{"input_ids": [number, number]} for number in range(8)]
    shard = Shard.from_mesh(TorchMesh({"dp": 2, "cp": 2}, (1, 0)))
    with MLXDataLoader(samples, batch_size=2, backend="numpy", shuffle=False, shard=shard) as loader:
        assert loader.rank == Rank(1, 2)
    with pytest.raises(ConfigError, match="context"):
        MLXDataLoader(samples, backend="numpy", shard=Shard(dp=1, rank=0, context="zigzag"))


def test_trainers_count_all_ranks_of_a_mesh(store: Path) -> None:
    with make(store, shard=Shard(dp=2, cp=2, tp=2, rank=3)) as loader:
        check_world_size(loader, 8)
        with pytest.raises(ConfigError, match=r"2 ranks with cp=2 tp=2.*trainer has 4"):
            check_world_size(loader, 4)


def test_a_file_has_sizes_of_a_mesh(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.yaml"
    text = f"loader: pretrain\npath: {store}\nchunk_size: 16\nbatch_size: 1\nbackend: numpy\n"
    file.write_text(text + "dp: 2\ncp: 2\ncontext: contiguous\n")
    with load_config(file).open(rank=3) as loader:
        assert loader.rank == Rank(1, 2)
        assert loader.get_batch().input_ids.shape == (1, 8)
    file.write_text(text + "world_size: 2\n")
    mesh = TorchMesh({"cp": 2, "dp": 2}, (1, 0))
    with load_config(file).open(shard=Shard.from_mesh(mesh, context="zigzag")) as loader:
        assert loader.rank == Rank(0, 2)
        assert loader.get_batch().metadata["context"]["rank"] == 1
    with pytest.raises(ConfigError, match=r"world_size=2.*rank 1 of 4"):
        load_config(file).open(shard=Shard(dp=4, tp=2, rank=2))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    file.write_text(text + "cp: 2\n")
    with load_config(file).open() as loader:
        assert loader.rank == Rank(0, 2)


def test_world_size_of_a_file_is_the_number_of_its_data_ranks(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.yaml"
    text = f"loader: pretrain\npath: {store}\nchunk_size: 16\nbatch_size: 1\nbackend: numpy\ncp: 2\n"
    file.write_text(text + "dp: 4\nworld_size: 8\n")
    with pytest.raises(ConfigError, match=r"world_size: 8 contradicts dp=4: world_size is the number of data ranks, 4"):
        load_config(file)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with load_config(file, ["world_size=4"]).open() as loader:
        assert loader.rank == Rank(1, 4)
    file.write_text(text + "world_size: 8\n")
    with pytest.raises(ConfigError, match=r"world_size=8, and this is rank 1 of 4 \(world_size is the number of data"):
        load_config(file).open()


def test_a_rank_that_is_passed_is_that_of_the_process(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"loader: pretrain\npath: {store}\nchunk_size: 16\nbackend: numpy\ncp: 2\ncontext: contiguous\n")
    with load_config(file).open(rank=3, world_size=4) as loader:
        assert loader.rank == Rank(1, 2)
        assert loader.get_batch().metadata["context"]["rank"] == 1
    with load_config(file, ["world_size=2"]).open(rank=3) as loader:
        assert loader.rank == Rank(1, 2)
