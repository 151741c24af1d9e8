"""Kernels of a CPU call as small programs of their own, so that tools can run them without Python.

While a call runs, the memory that each of its kernels can reach is recorded: the block of arguments
and, from there on, each piece of the heap that a word points to. A C program loads it, puts the
new addresses in place of the old ones, marks what is secret as undefined for Valgrind, and calls
the kernel, whose machine code is linked into it.
"""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import struct
import subprocess
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu import forward
from lockstep.kernels.cpu.call import tensors, threads
from lockstep.kernels.cpu.call.arguments import HEADER
from lockstep.kernels.cpu.call.record import CALL
from lockstep.kernels.cpu.compiler import machine
from lockstep.kernels.cpu.compiler.compile import Kernel

PROGRAM = Path(__file__).with_name("replay.c")
# An integer below this is no float, nor two of them.
SMALL = 1 << 32
MOST = 1 << 26  # bytes of one piece
MOST_PIECES = 1000
# Valgrind knows no AVX-512.
CPU = {"x86_64": "haswell"}
_CODE: dict[str, bytes] = {}  # of kernels, by name
# The program in its folder.
RUN = ["./replay", "memory", "after"]


@dataclass
class Piece:
    """A stretch of memory before and after a kernel ran."""

    address: int
    before: bytes
    after: bytes = b""
    is_secret: bool = False
    is_known: bool = False  # a tensor or a table, not just some piece of the heap

    @property
    def end(self) -> int:
        return self.address + len(self.before)


@dataclass
class Recorded:
    """One run of a kernel. The first piece is the block of its arguments."""

    kernel: Kernel
    pieces: list[Piece]

    def with_secrets_of(self, other: Recorded) -> Recorded:
        """This run, on the secret tensors of another run of the same kernel.

        Raises RuntimeError where that one has tensors of other sizes, or is of another kernel.
        """
        mine, others = ([x for x in run.pieces if x.is_known] for run in (self, other))
        sizes, other_sizes = ([len(piece.before) for piece in run] for run in (mine, others))
        if self.kernel is not other.kernel or sizes != other_sizes:
            raise RuntimeError(f"{self.kernel.name} and {other.kernel.name} have other tensors")
        given = {x.address: y.before for x, y in zip(mine, others, strict=True) if x.is_secret}
        pieces = [replace(x, before=given.get(x.address, x.before)) for x in self.pieces]
        return Recorded(self.kernel, pieces)

    def links(self) -> Iterator[tuple[int, int, int, int]]:
        """Each word that points into a piece: (piece, offset, piece, offset).

        Secret tensors hold numbers: an address in one is what its memory held before.
        """
        for i, piece in enumerate(self.pieces):
            if piece.is_secret:
                continue
            words = _words(piece.before)
            for j, other in enumerate(self.pieces):
                for at in np.flatnonzero(_into(words, other)).tolist():
                    yield i, 8 * at, j, int(words[at]) - other.address


def is_available() -> bool:
    """Whether there is a C compiler, and Valgrind with its header."""
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        return False
    source = b"#include <valgrind/memcheck.h>\n"
    command = ["cc", "-E", "-x", "c", "-", "-o", "/dev/null"]
    return subprocess.run(command, input=source, capture_output=True, check=False).returncode == 0


def record(run: Callable[[], Any]) -> list[Recorded]:
    """The kernels of a call, each with the memory it reaches, on one thread."""
    run()  # The first call compiles kernels, and may leave other things in memory.
    found: list[Recorded] = []
    call = Kernel.__call__

    def recording(kernel: Kernel, block: int) -> None:
        pieces = _reachable(block)
        call(kernel, block)
        for piece in pieces:
            piece.after = ctypes.string_at(piece.address, len(piece.before))
        found.append(Recorded(kernel, pieces))

    with _one_thread(), patch.object(Kernel, "__call__", recording):
        run()
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        for module in (forward, tensors, threads):
            stack.enter_context(patch.object(module, "array", _Array))
        yield
    torch.set_num_threads(before)


class _Array:
    """Words as `array.array` has them: records and tables, whose memory is known."""

    known: ClassVar[weakref.WeakSet[_Array]] = weakref.WeakSet()

    def __init__(self, kind: str, words: Iterable[int] | bytes) -> None:
        if isinstance(words, bytes):
            self.words = np.frombuffer(words, np.int64).copy()
        else:
            self.words = np.fromiter(words, np.int64)
        self.known.add(self)

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[int]:
        return iter(self.words.tolist())

    def __getitem__(self, i: int) -> int:
        return int(self.words[i])

    def __setitem__(self, i: int, word: int) -> None:
        self.words[i] = word

    def buffer_info(self) -> tuple[int, int]:
        return self.words.ctypes.data, len(self.words)


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data[: len(data) // 8 * 8], np.int64)


def _into(words: np.ndarray, piece: Piece) -> np.ndarray:
    """Which words are addresses in a piece."""
    return (words >= piece.address) & (words < piece.end)


def _hold_addresses(words: np.ndarray, pieces: list[Piece]) -> bool:
    return any(_into(words, piece).any() for piece in pieces)


def _reachable(block: int) -> list[Piece]:
    """The block, the scratch memory it names, and all pieces of memory from there on."""
    memory = _Memory()
    pieces = list(filter(None, [memory.piece(block)]))
    scratch, stride = _words(pieces[0].before)[2:HEADER].tolist()
    if stride:
        pieces.append(Piece(scratch, bytes(stride)))
    seen = 0
    # What a kernel takes is near the block. Memory that was something else before may hold
    # addresses of anything, all objects of Python among it.
    while seen < len(pieces) < MOST_PIECES:
        if not pieces[seen].is_secret:
            words = _words(pieces[seen].before)
            if seen == 0:
                # Where there is no scratch memory, its address is that of an earlier call.
                words = np.delete(words, slice(2, HEADER))
            # In the order of their places, which is the same for all calls of a kind.
            for word in words[memory.may_hold(words)].tolist():
                if not any(piece.address <= word < piece.end for piece in pieces):
                    pieces += filter(None, [memory.piece(word)])
        seen += 1
    _mark_secrets(pieces)
    return pieces


class _Memory:
    """The memory of a call: tensors of torch, tables of words, and other pieces of glibc's heap."""

    def __init__(self) -> None:
        self.writable = _writable()
        self.known = {x.words.ctypes.data: (x.words.nbytes, False) for x in _Array.known}
        for x in _objects():
            if type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu":
                storage = x.untyped_storage()
                is_secret = x.is_floating_point()
                self.known[storage.data_ptr()] = storage.nbytes(), is_secret

    def may_hold(self, words: np.ndarray) -> np.ndarray:
        """Which words are addresses of memory that this process may write to."""
        held = np.zeros(len(words), bool)
        for begin, end in self.writable:
            held |= (words >= begin) & (words < end)
        return held

    def piece(self, address: int) -> Piece | None:
        """The piece that an address points into, or None."""
        for begin, (size, is_secret) in self.known.items():
            if begin <= address < begin + size:
                return Piece(begin, ctypes.string_at(begin, size), b"", is_secret, True)
        size = _heap_size(address, self.writable)
        return Piece(address, ctypes.string_at(address, size)) if size else None


def _objects() -> list[Any]:
    """All objects, those that the garbage collector was told to leave alone among them."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return found


def _writable() -> list[tuple[int, int]]:
    """The stretches of memory that this process may write to."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
        if mode.startswith("rw"):
            found.append((int(begin, 16), int(end, 16)))
    return found


def _heap_size(address: int, writable: list[tuple[int, int]]) -> int:
    """Bytes of the piece of glibc's heap that begins at an address; 0 if none does."""
    if address % 16:
        return 0
    for begin, end in writable:
        if begin + 16 <= address < end:
            header = struct.unpack("q", ctypes.string_at(address - 8, 8))[0]
            size = (header & ~7) - (16 if header & 2 else 8)
            return size if 0 < size <= MOST and address + size <= end else 0
    return 0


def _mark_secrets(pieces: list[Piece]) -> None:
    """Pieces of the heap that hold neither addresses nor, for the most part, small integers hold
    floats; after a table there may be a word of what was there before. Lengths may be secret."""
    known = {x.words.ctypes.data for x in _Array.known}
    for piece in pieces:
        words = _words(piece.before)
        leads_on = _hold_addresses(words, pieces)
        # A table of two words may have one more after it.
        few = max(len(words) // 4, 1)
        is_float = not leads_on and int((np.abs(words) >= SMALL).sum()) > few
        piece.is_secret |= is_float and piece.address not in known
    for record in (piece for piece in pieces if piece.address in known):
        if len(record.before) > CALL.itemsize:
            call = np.frombuffer(record.before[: CALL.itemsize], CALL)[0]
            for piece in pieces:
                if call["secret_lengths"] == 1 and piece.address == call["kv_count"]:
                    piece.is_secret = True


def build(recorded: Recorded, folder: Path) -> list[str]:
    """Writes and compiles the program; returns the command that runs it in that folder.

    Raises RuntimeError where the C compiler fails.
    """
    kernel = recorded.kernel
    if kernel.name not in _CODE:
        host = machine.host()
        cpu = CPU.get(host.architecture)
        target = host if cpu is None else machine.Target(host.triple, cpu)
        _CODE[kernel.name] = machine.generate(kernel.module(target.triple), kernel.name, target)
    (folder / "kernel.o").write_bytes(_CODE[kernel.name])
    write_memory(recorded, folder)
    program = folder / "replay"
    # The addresses of functions are looked up before the kernel runs.
    command = ["cc", "-O1", "-no-pie", "-Wl,-z,now", f'-DKERNEL="{kernel.name}"', str(PROGRAM)]
    command += [str(folder / "kernel.o"), "-lm", "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cc failed:\n{done.stderr}")
    return RUN


def write_memory(recorded: Recorded, folder: Path) -> None:
    """Writes what the program reads: counts, then pieces, then links."""
    links = list(recorded.links())
    parts = [struct.pack("qq", len(recorded.pieces), len(links))]
    for piece in recorded.pieces:
        size = len(piece.before)
        parts.append(struct.pack("qqq", size, piece.address % 4096, int(piece.is_secret)))
        parts.append(piece.before)
    parts += [struct.pack("qqqq", *link) for link in links]
    (folder / "memory").write_bytes(b"".join(parts))


def agrees(recorded: Recorded, folder: Path) -> bool:
    """Whether the program left tensors and tables as the kernel did, but for those of addresses."""
    data = (folder / "after").read_bytes()
    offset = 0
    for piece in recorded.pieces:
        size = len(piece.before)
        # Other pieces of the heap may be objects of Python, whose counts of references change.
        has_changed = piece.is_known and piece.after != piece.before
        is_output = has_changed and not _hold_addresses(_words(piece.after), recorded.pieces)
        if is_output and data[offset : offset + size] != piece.after:
            return False
        offset += size
    return True
