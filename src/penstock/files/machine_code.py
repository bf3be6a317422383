"""Machine code of kernels: compiled by a process of its own, once on a machine, and kept in a file; nobody waits.

Importing numba takes half a second and compiling several, which is longer than most files take to read. What numba
makes of a function that is given addresses, allocates nothing and raises nothing needs neither numba nor Python, and is
loaded from its file in some 30 ms, by llvmlite alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from penstock._forks import renewed
from penstock._optional import package_version
from penstock.errors import DataError
from penstock.files.atomic import AtomicFile
from penstock.files.cache import default_cache_directory
from penstock.files.locks import FileLock

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., int]]

_FAILED = b"failed"
_HEAD = "<QQ"
"""Checksum of what follows, and the length of the names."""
_WAIT_SECONDS = 120
"""Longest wait for another process that compiles the same."""
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy"}


class MachineCode:
    """Functions of a module of kernels, as soon as there is machine code of them.

    The module, which only the compiling process imports, has `SIGNATURES`: by name, a function of numba and the types
    of its arguments and its result, pointers and integers of 64 bits. The code is kept by the content of the sources
    beside the module and by the processor.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._guard = renewed(threading.Lock())
        self._functions: Functions | None = None
        self._is_over = False
        """True if nothing more is tried: the functions are loaded, or cannot be."""
        self._is_missing = False
        """True if there is no code yet, and nobody has asked to compile it."""
        self._compiler: threading.Thread | None = None
        """Waits for the process that compiles."""
        self._loaded: list[Any] = []
        """What keeps the code in memory."""

    def functions(self, *, compile_missing: bool) -> Functions | None:
        """The functions by name, loaded by the first call; None as long as they are not compiled.

        With `compile_missing` another process at a low priority begins to compile them. A call costs nothing while
        there is nothing to do.
        """
        if self._is_over or self._is_compiling() or (self._is_missing and not compile_missing):
            return self._functions
        with self._guard:  # other threads wait: their work would make the load last twice as long
            if not self._is_over and not self._is_compiling():
                try:
                    self._load(compile_missing)
                except Exception as error:  # noqa: BLE001 - whatever it is, there is another way
                    log.info("no machine code of %s: %s", self._module, error)
                    self._is_over = True
        return self._functions

    @property
    def loaded(self) -> Functions | None:
        """The functions, if `functions` has loaded them."""
        return self._functions

    def wait(self) -> Functions | None:
        """The functions, compiled first if need be; None where they cannot be."""
        self.functions(compile_missing=True)
        if self._compiler is not None:
            self._compiler.join()
        return self.functions(compile_missing=True)

    def _is_compiling(self) -> bool:
        return self._compiler is not None and self._compiler.is_alive()

    def _load(self, compile_missing: bool) -> None:
        if sys.byteorder != "little" or sys.maxsize < 1 << 32:
            raise NotImplementedError("kernels are for processors with 64 bits, the lowest byte first")
        binding = importlib.import_module("llvmlite.binding")
        file = code_file(self._module, binding)
        if file.exists():
            self._is_over = True
            data = file.read_bytes()
            try:
                self._functions = self._linked(data, binding) if data != _FAILED else None
            except (DataError, struct.error):
                file.unlink()  # another process compiles it again
                raise
        elif importlib.util.find_spec("numba") is None or self._compiler is not None:
            self._is_over = True
        elif compile_missing:
            # A daemon: the process goes on if this one ends, and the next one finds the code.
            self._compiler = threading.Thread(target=_compile_elsewhere, args=(self._module,), daemon=True)
            self._compiler.start()
        else:
            self._is_missing = True

    def _linked(self, data: bytes, binding: Any) -> Functions:
        digest, size = struct.unpack_from(_HEAD, data)
        data = data[struct.calcsize(_HEAD) :]
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise DataError("the code is damaged")
        arguments: dict[str, int] = json.loads(data[:size])
        machine = _target_machine(binding)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        code = binding.ObjectFileRef.from_data(data[size:])
        engine.add_object_file(code)
        engine.finalize_object()
        self._loaded += [engine, code, machine]
        return {name: _function(engine.get_function_address(name), count) for name, count in arguments.items()}


def _function(address: int, arguments: int) -> Callable[..., int]:
    """A function as numba lays it out: the result goes to an address, and so does an exception, which there is not."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * arguments)
    made = kind(address)

    def call(*given: int) -> int:
        result, exception = ctypes.c_int64(), ctypes.c_void_p()
        made(ctypes.addressof(result), ctypes.addressof(exception), *given)
        return result.value

    return call


def compile_module(module: str) -> None:
    """Compile the kernels of a module and keep the code, unless another process has done it meanwhile."""
    binding = importlib.import_module("llvmlite.binding")
    file = code_file(module, binding)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file.with_suffix(".lock"))
    if not lock.acquire(_WAIT_SECONDS):
        return
    try:
        if not file.exists():
            numba = importlib.import_module("numba")  # one that is broken may be mended
            try:
                data = _compiled(module, binding, numba)
            except (OSError, MemoryError):
                raise
            except Exception:
                log.info("numba does not compile %s", module, exc_info=True)
                data = _FAILED  # of this numba and NumPy, for these sources: nobody tries again
            with AtomicFile(file, durable=False) as made:
                made.file.write(data)
    finally:
        lock.release()


def _compiled(module: str, binding: Any, numba: Any) -> bytes:
    arguments, whole = {}, None
    for name, (function, signature) in importlib.import_module(module).SIGNATURES.items():
        made = numba.njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function.py_func)
        made.compile(signature)
        found = made.overloads[signature.args]
        text = found.library.get_llvm_str().replace(found.fndesc.llvm_func_name, name)
        part = binding.parse_assembly(text)
        if whole is None:
            whole = part
        else:
            whole.link_in(part)
        arguments[name] = len(signature.args)
    names = json.dumps(arguments).encode()
    data = names + bytes(_target_machine(binding).emit_object(whole))
    return struct.pack(_HEAD, xxhash.xxh3_64_intdigest(data), len(names)) + data


def _target_machine(binding: Any) -> Any:
    """Target of this process, as numba sets it up for code that is run where it is compiled."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def code_file(module: str, binding: Any) -> Path:
    """File of the machine code of a module's kernels on this processor."""
    features = binding.get_host_cpu_features().flatten()
    host = f"{binding.get_process_triple()} {binding.get_host_cpu_name()} {features}"
    versions = [package_version(name) or "" for name in ("llvmlite", "numba", "numpy")]
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    digest = source_digest((Path(__file__), *sorted(Path(found.origin).parent.glob("*.py"))), host, *versions)
    return kernel_home() / f"{module}-{digest}.code"


def kernel_home() -> Path:
    """Directory of machine code; `NUMBA_CACHE_DIR` moves it."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given) / "penstock" if given else default_cache_directory() / "kernels"


def source_digest(files: Iterable[Path], *facts: str) -> str:
    """Hash of the content of sources, and of what else decides on their machine code."""
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(file.read_bytes())
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _compile_elsewhere(module: str) -> None:
    """Have another process compile a module, and wait for it."""
    code = f"import os, sys; sys.path[:] = {sys.path!r}; getattr(os, 'nice', int)(10); "
    code += f"from {__name__} import compile_module; compile_module({module!r})"
    try:
        subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NUMBA_DISABLE_JIT": "0"},
            start_new_session=True,  # Ctrl-C is for those who read
            check=False,
        )
    except (OSError, ValueError) as error:
        log.info("no machine code of %s: %s", module, error)
