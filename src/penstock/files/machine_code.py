"""Machine code of kernels: compiled by a process of its own, once on a machine, and kept in a file; nobody waits.

Importing numba takes half a second and compiling several, which is longer than most files take to read. What numba
makes of a function that is given addresses, allocates nothing and raises nothing needs neither numba nor Python, and is
loaded from its file in some 30 ms, by llvmlite alone.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import xxhash

from penstock._forks import renewed
from penstock._optional import package_version, require
from penstock.errors import DataError
from penstock.files.atomic import AtomicFile, open_own, remove_leftovers
from penstock.files.cache import default_cache_directory
from penstock.files.locks import FileLock

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., int]]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_FAILED = b"failed"
_WORD = struct.Struct("<Q")
"""Checksum of all that follows, and the length of the names."""
_WAIT_SECONDS = 120
"""Longest wait for another process that compiles the same."""
_COMPILE = """
import os, sys
sys.path[:] = {path!r}
getattr(os, "nice", int)(10)
try:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out, this ends, and not the trainer
except OSError:
    pass
from {own} import compile_module
compile_module({module!r})
"""
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy"}


class MachineCode:
    """Functions of a module of kernels, as soon as there is machine code of them.

    The module, which only the compiling process imports, has `SIGNATURES`: by name, a function of numba and the types
    of its arguments and its result, pointers and integers of 64 bits. Its `check` raises unless the functions do what
    they should, and is called before the code is kept. The code is kept by the content of the sources beside the module
    and by the processor, in a directory of the user's own. Code that others could have written is not loaded, nor any
    if `caller`, the file that calls the functions, is another than the one that was imported: it was made for that.
    """

    def __init__(self, module: str, caller: str | None = None) -> None:
        self._module, self._caller = module, caller
        self._stamp = _stamp(caller)
        self._guard = renewed(threading.Lock())
        self._functions: Functions | None = None
        self._is_over = False
        """True if nothing more is tried: the functions are loaded, or cannot be."""
        self._is_missing = False
        """True if there is no code yet, and nobody has asked to compile it."""
        self._compiler: threading.Thread | None = None
        """Waits for the process that compiles."""
        self._loads_in = 0
        """The process in which a thread loads. A fork of it does not: locks of LLVM may stay taken there."""

    def functions(self, *, compile_missing: bool) -> Functions | None:
        """The functions by name, loaded by the first call; None as long as they are not compiled.

        With `compile_missing` another process at a low priority begins to compile them. A call costs nothing while
        there is nothing to do.
        """
        if self._is_over or self._is_compiling() or (self._is_missing and not compile_missing):
            return self._functions
        with self._guard:  # other threads wait: their work would make the load last twice as long
            if self._loads_in not in (0, os.getpid()):
                self._is_over = True
            if not self._is_over and not self._is_compiling():
                self._loads_in = os.getpid()
                try:
                    self._load(compile_missing)
                except Exception as error:  # noqa: BLE001 - whatever it is, there is another way
                    log.info("no machine code of %s: %s", self._module, error)
                    self._is_over = True
                finally:
                    self._loads_in = 0
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
        if _stamp(self._caller) != self._stamp:
            raise RuntimeError(f"{self._caller} has changed since it was imported")
        binding = importlib.import_module("llvmlite.binding")
        file = code_file(self._module, binding)
        if file.exists():
            data = _read_own(file)
            try:
                if data != _FAILED:
                    self._functions = _linked(data, binding)
            except DataError:
                file.unlink()  # another process compiles it again
                raise
            self._is_over = True
        elif importlib.util.find_spec("numba") is None or not _is_interpreter() or self._compiler is not None:
            self._is_over = True
        elif compile_missing:
            # A daemon: the process goes on if this one ends, and the next one finds the code.
            self._compiler = threading.Thread(target=_compile_elsewhere, args=(self._module, file), daemon=True)
            self._compiler.start()
        else:
            self._is_missing = True


def _stamp(file: str | None) -> tuple[int, ...] | None:
    """Properties of a file that an upgrade changes."""
    try:
        found = Path(file).stat() if file is not None else None
    except OSError:  # in an archive
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None


def _read_own(file: Path) -> bytes:
    """Content of a file that nobody but this user, or root, can have put there: it is going to be run."""
    with open(open_own(file, os.O_RDONLY), "rb") as opened:
        for found in (file.parent.lstat(), os.fstat(opened.fileno())) if os.name != "nt" else ():
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                raise PermissionError(f"{file} may have been written by others; remove {file.parent}")
        return opened.read()


def _linked(data: bytes, binding: Any) -> Functions:
    body = memoryview(data)[_WORD.size :]
    if len(body) < _WORD.size or _WORD.pack(xxhash.xxh3_64_intdigest(body)) != data[: _WORD.size]:
        raise DataError("the code is damaged")
    begin = _WORD.size + _WORD.unpack_from(body)[0]
    arguments: dict[str, int] = json.loads(bytes(body[_WORD.size : begin]))
    machine = _target_machine(binding)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    loaded = binding.ObjectFileRef.from_data(bytes(body[begin:]))
    engine.add_object_file(loaded)
    engine.finalize_object()
    code = engine, loaded, machine
    return {name: _function(name, engine.get_function_address(name), count, code) for name, count in arguments.items()}


def _function(name: str, address: int, arguments: int, code: Any) -> Callable[..., int]:
    """A function as numba lays it out: the result goes to an address, and so does an exception, which there is not.
    `code` stays in memory as long as the function."""
    if not address:
        raise DataError(f"there is no function {name} in the code")
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * arguments)
    made: Any = kind(address)
    made.code = code

    def call(*given: int) -> int:
        result, exception = ctypes.c_int64(), ctypes.c_void_p()
        status = made(ctypes.addressof(result), ctypes.addressof(exception), *given)
        if status:
            raise RuntimeError(f"the kernel {name} ended with status {status}")
        return result.value

    return call


def kernel(function: Kernel) -> Kernel:
    """Decorator: a function that is compiled, and called by others of the module; it makes no arrays."""
    return cast(Kernel, require("numba", "fast").njit(**_OPTIONS)(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: instructions of LLVM that numba has no words for."""
    return cast(Callable[..., Any], require("numba.extending", "fast").intrinsic(function))


def compile_module(module: str) -> None:
    """Compile the kernels of a module and keep the code, unless another process has done it meanwhile."""
    binding = importlib.import_module("llvmlite.binding")
    file = code_file(module, binding)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(file.with_suffix(".lock"))
    if not lock.acquire(_WAIT_SECONDS):
        return
    try:
        if not file.exists():
            numba = importlib.import_module("numba")  # one that is broken may be mended
            try:
                data = _compiled(module, binding, numba)
                importlib.import_module(module).check(_linked(data, binding))
            except (OSError, MemoryError, ImportError):  # of now, or of an upgrade that goes on
                raise
            except Exception:
                log.info("numba does not compile %s", module, exc_info=True)
                data = _FAILED  # of this numba and NumPy, for these sources: nobody tries again
            remove_leftovers(file)
            with AtomicFile(file, durable=False) as made:
                made.temporary.chmod(0o600)
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
    named = chain(whole.functions, whole.global_variables) if whole is not None else ()
    outside = [one.name for one in named if one.is_declaration and not one.name.startswith("llvm.")]
    if outside:  # without numba there is nothing at its address
        raise NotImplementedError(f"the code refers to {outside}, which is not part of it")
    names = json.dumps(arguments).encode()
    data = _WORD.pack(len(names)) + names + bytes(_target_machine(binding).emit_object(whole))
    return _WORD.pack(xxhash.xxh3_64_intdigest(data)) + data


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
    user = f"-{os.geteuid()}" if os.name != "nt" else ""
    return kernel_home() / f"code{user}" / f"{module}-{digest}.code"


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


def _is_interpreter() -> bool:
    """True if `sys.executable` is Python: in a frozen program it is the program, which would be started again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    if not lock.acquire(_WAIT_SECONDS):
        raise TimeoutError(f"{path} was held for {_WAIT_SECONDS} s by another process")
    try:
        yield
    finally:
        lock.release()


def _compile_elsewhere(module: str, file: Path) -> None:
    """Have another process compile a module, and wait for it; nothing if a process of somebody else does it."""
    # What is kept is for every run to come: nothing that one of them wants of numba or of warnings goes into it.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHONWARNINGS"))}
    if "NUMBA_CACHE_DIR" in os.environ:
        env["NUMBA_CACHE_DIR"] = str(Path(os.environ["NUMBA_CACHE_DIR"]).absolute())
    # Python passes over whatever else than a string is there.
    path = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    code = _COMPILE.format(path=path, own=__name__, module=module)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Wait here: a process that waits takes a hundred megabytes.
        with _held(file.with_suffix(".starting")):
            with _held(file.with_suffix(".lock")):  # of one that lives longer than the process that has started it
                pass
            if file.exists():
                return
            subprocess.run(
                [sys.executable, "-c", code],
                cwd=file.parent,  # numba reads options from the working directory
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                start_new_session=True,  # Ctrl-C is for those who read
                check=False,
            )
    except (OSError, ValueError) as error:
        log.info("no machine code of %s: %s", module, error)
