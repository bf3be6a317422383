"""What every backend promises: the same values in and out, on the devices it has, and never another value."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.batching.backends import Backend, aligned_empty, backend_of, batch_dtype
from penstock.batching.backends.base import ALIGNMENT, exactly
from penstock.errors import ConfigError, DataError

# The fixture is stateless, so examples may share it.
shared = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
DTYPES = st.sampled_from([np.int32, np.int16, np.uint8, np.bool_, np.float32])


@shared
@given(data=st.data())
def test_values_types_and_shapes_come_back(backend: Backend, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(data.draw(DTYPES), data.draw(SHAPES)))
    found = backend.to_numpy(backend.from_numpy(array.copy()))
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


def only(*names: str) -> pytest.MarkDecorator:
    """For what not every backend does."""
    return pytest.mark.parametrize("backend", names, indirect=True)


def awkward_arrays() -> dict[str, npt.NDArray[np.int32]]:
    plain = np.arange(24, dtype=np.int32).reshape(4, 6)
    read_only = plain.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + plain.tobytes(), np.uint8)[1:].view(np.int32)
    return {
        "read only": read_only,
        "reversed": plain[::-1, ::-1],
        "every second": plain[:, ::2],
        "transposed": plain.T,
        "broadcast": np.broadcast_to(plain[0], (3, 6)),
        "foreign byte order": plain.astype(">i4"),
        "unaligned": unaligned,
        "empty": plain[:0],
        "a number": np.array(7, np.int32),
    }


@pytest.mark.parametrize("which", awkward_arrays())
def test_awkward_arrays_are_taken_without_a_warning(backend: Backend, which: str) -> None:
    array = awkward_arrays()[which]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = backend.to_numpy(backend.from_numpy(array))
    assert found.shape == array.shape
    assert np.array_equal(found, array)


@only("torch")
def test_a_read_only_array_is_not_written_through(backend: Backend) -> None:
    array = np.zeros(4, np.int64)
    array.flags.writeable = False
    backend.from_numpy(array)[:] = 1
    assert array.tolist() == [0, 0, 0, 0]


@only("numpy", "torch", "jax")
def test_memory_is_shared_where_the_framework_can(backend: Backend) -> None:
    array = aligned_empty((3, 5), backend.integer)
    array[:] = 0
    found = backend.from_numpy(array)
    array[1, 2] = 9
    assert int(found[1, 2]) == 9


@only("mlx")
def test_mlx_copies_so_a_reused_array_does_not_change_it(backend: Backend) -> None:
    array = np.zeros(4, np.int32)
    found = backend.from_numpy(array)
    array[:] = 9
    assert found.tolist() == [0, 0, 0, 0]


@only("jax")
def test_jax_keeps_shared_memory_alive(backend: Backend) -> None:
    def filled(value: int) -> Any:
        array = aligned_empty(4096, np.int32)
        array[:] = value
        return backend.from_numpy(array)

    found = [filled(i) for i in range(50)]
    assert [set(backend.to_numpy(one).tolist()) for one in found] == [{i} for i in range(50)]


def test_what_does_not_fit_is_refused_rather_than_changed(backend: Backend) -> None:
    for array in (np.array([[1, 2**40]]), np.array([0.1]), np.array([2**63 + 1], np.uint64)):
        try:
            found = backend.to_numpy(backend.from_numpy(array))
        except DataError:
            continue
        else:
            assert found.tobytes() == array.tobytes()


def test_64_bits_that_fit_into_32_are_taken(backend: Backend) -> None:
    for array in (np.array([-100, 2**31 - 1, -(2**31)]), np.array([0.5, np.nan, np.inf])):
        assert np.array_equal(backend.to_numpy(backend.from_numpy(array)), array, equal_nan=True)


def test_an_array_is_known_by_its_class(backend: Backend) -> None:
    assert backend_of(backend.from_numpy(np.zeros(3, np.int32))) is backend


def test_cpu_is_a_device_of_every_backend(backend: Backend) -> None:
    array = backend.from_numpy(np.arange(4, dtype=np.int32), device="cpu")
    for non_blocking in (False, True):
        there = backend.to(array, "cpu", non_blocking=non_blocking)
        assert backend.to_numpy(there).tolist() == [0, 1, 2, 3]
    assert backend.to(array, None) is array


def test_an_unknown_device_is_an_error_that_names_it(backend: Backend) -> None:
    with pytest.raises((ConfigError, RuntimeError), match="abacus"):
        backend.from_numpy(np.zeros(3, np.int32), device="abacus")


@only("jax")
def test_devices_of_jax_go_by_number_too(backend: Backend) -> None:
    array = backend.from_numpy(np.zeros(3, np.int32), device="cpu:0")
    assert [str(device.platform) for device in array.devices()] == ["cpu"]
    for wrong in ("cpu:99", "cpu:first"):
        with pytest.raises(ConfigError, match=wrong):
            backend.to(array, wrong)
    device = next(iter(array.devices()))
    assert backend.to(array, device).devices() == {device}


@only("mlx")
def test_mlx_takes_its_own_devices(backend: Backend) -> None:
    mx = pytest.importorskip("mlx.core")
    array = mx.arange(3)
    for device in (mx.cpu, mx.gpu, mx.Device(mx.cpu), "gpu"):
        assert backend.to(array, device) is array


@only("mlx")
def test_bfloat16_goes_to_numpy_as_float32(backend: Backend) -> None:
    mx = pytest.importorskip("mlx.core")
    assert backend.to_numpy(mx.array([0.5, -2.0], mx.bfloat16)).tolist() == [0.5, -2.0]


def test_pinning_without_an_accelerator_gives_the_array_itself(backend: Backend) -> None:
    if backend.name == "torch" and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is an accelerator")
    array = backend.from_numpy(np.zeros(3, np.int32))
    assert backend.pin_memory(array) is array


def test_the_types_of_a_batch(backend: Backend) -> None:
    wide = np.int64 if backend.name in ("numpy", "torch") else np.int32
    for key in ("input_ids", "labels", "position_ids", "attention_mask"):
        assert batch_dtype(key, np.dtype(np.uint16), backend) == wide
    for key in ("document_ids", "cu_seqlens"):
        assert batch_dtype(key, np.dtype(np.int64), backend) == np.int32
    kept = {np.bool_: np.bool_, np.float32: np.float32, np.uint8: np.uint8, np.float64: np.float32}
    assert {given: batch_dtype("loss_mask", np.dtype(given), backend) for given in kept} == kept


@given(
    array=hnp.arrays(st.sampled_from([np.int64, np.uint64, np.int32, np.uint16, np.bool_]), st.integers(0, 4)),
    wanted=st.sampled_from([np.int64, np.int32, np.int16, np.uint8, np.uint32]),
)
def test_a_conversion_is_exact_or_an_error(array: npt.NDArray[np.generic], wanted: type) -> None:
    values = [int(value) for value in array]
    bounds = np.iinfo(wanted)
    if all(bounds.min <= value <= bounds.max for value in values):
        found = exactly(array, wanted)
        assert found.dtype == wanted
        assert [int(value) for value in found] == values
    else:
        with pytest.raises(DataError):
            exactly(array, wanted)


def test_an_inexact_conversion_says_where() -> None:
    with pytest.raises(DataError, match=r"labels.*\bint32\b"):
        exactly(np.array([[1, 2], [2**32, 3]]), np.int32, "labels")


def test_a_conversion_to_the_same_type_is_the_array_itself() -> None:
    array = np.arange(3)
    assert exactly(array, np.int64) is array


@given(hnp.array_shapes(min_dims=0, min_side=0, max_side=9), st.sampled_from([np.int64, np.int32, np.bool_]))
def test_aligned_arrays_are_aligned_writable_and_whole(shape: tuple[int, ...], dtype: type) -> None:
    array = aligned_empty(shape, dtype)
    array[...] = 1
    assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, dtype, True)
    assert array.ctypes.data % ALIGNMENT == 0 or not array.size
    assert array.sum() == array.size
