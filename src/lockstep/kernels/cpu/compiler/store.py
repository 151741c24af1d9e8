"""Machine code on disk: kernels are compiled once per machine, not once per process.

A file holds the code of one kernel behind a digest of it. Whatever is wrong with a file or its
directory, the kernel is compiled anew; where nothing can be written, each process compiles. Of
processes that need a kernel at the same time, as ranks do, one compiles it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numba
from numba.misc.appdirs import AppDirs

from lockstep.kernels.cpu.compiler import machine

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".code"
DIGEST_BYTES = hashlib.sha256().digest_size
# Seconds to wait for other processes. A kernel takes a few; a process may have been stopped.
LONGEST_WAIT = 60.0

_warned = False


def directories() -> list[Path]:
    """Where code may lie, first choice first.

    What NUMBA_CACHE_DIR names, beside this package, and the user's directory of caches.
    """
    found = [PACKAGE / "__pycache__"]
    # Several installations may share the others.
    own = f"lockstep_{hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:16]}"
    if numba.config.CACHE_DIR:
        found.insert(0, Path(numba.config.CACHE_DIR) / own)
    users = Path(AppDirs(appname="lockstep", appauthor=False).user_cache_dir)
    # Without a home directory the path starts with a tilde.
    if users.is_absolute():
        found.append(users / own)
    return found


def home() -> Path | None:
    """The directory that new code goes to, or None if none can be written to."""
    return next(filter(_can_be_written_to, directories()), None)


def _can_be_written_to(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def files() -> Iterator[Path]:
    """Everything that is stored, of this version and others."""
    for directory in directories():
        with suppress(OSError):
            yield from sorted(directory.glob(f"*{SUFFIX}"))


@lru_cache(maxsize=1)
def _key() -> tuple[str, str]:
    """(machine, sources): what code depends on, as two digests."""
    here = hashlib.sha256(machine.identity().encode()).hexdigest()[:16]
    sources = hashlib.sha256(numba.__version__.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        sources.update(path.read_bytes())
    return here, sources.hexdigest()[:16]


def _file_name(kernel: str) -> str:
    return ".".join((kernel, *_key())) + SUFFIX


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()


def read(kernel: str) -> bytes | None:
    """The code of a kernel, whole and for this machine and version; None if there is none."""
    name = _file_name(kernel)
    for directory in directories():
        with suppress(OSError):
            content = (directory / name).read_bytes()
            digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if digest == _digest(name, code):
                return code
        # A directory that is read-only now may hold code from when it was not. Code is not looked
        # for behind the first directory that can be written to: it would be there.
        if _can_be_written_to(directory):
            return None
    return None


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Waits until no other process is in this block. Where directories cannot be locked, and after
    `LONGEST_WAIT`, it goes on all the same."""
    directory = home()
    if directory is None:
        yield
        return
    lock = os.open(directory, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while not _is_locked(lock) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Locks a directory; False if another process has locked it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # of a file system without locks
    return True


def write(kernel: str, code: bytes) -> None:
    """Keep the code of a kernel for other processes; warns, once, if there is no place for it."""
    name = _file_name(kernel)
    problems = []
    for directory in directories():
        try:
            _replace(directory / name, _digest(name, code) + code)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror}")
        else:
            _remove_older(directory, kernel, name)
            return
    _warn("; ".join(problems))


def _replace(path: Path, content: bytes) -> None:
    """Other processes see the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def _remove_older(directory: Path, kernel: str, name: str) -> None:
    """Other versions of this machine's code."""
    for path in directory.glob(f"{kernel}.{_key()[0]}.*{SUFFIX}"):
        if path.name != name:
            with suppress(OSError):
                path.unlink()


def _warn(problems: str) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        "lockstep compiles its CPU kernels in memory, anew in each process: they cannot be kept "
        f"on disk ({problems}). NUMBA_CACHE_DIR may name a directory that can be written to.",
        RuntimeWarning,
        stacklevel=2,
    )
