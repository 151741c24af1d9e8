"""The cases of `lockstep bench gpu`: what each table holds, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TOKENS = 16384
BACKWARD_FLOPS = 2.5  # forwards
UNITS = {
    "forward": "TFLOP/s",
    "small": "µs",
    "backward": "TFLOP/s",
    "decode": "GB/s",
    "varlen": "TFLOP/s",
    "host": "µs",
    "host_decode": "µs",
}


@dataclass(frozen=True)
class Case:
    """One row of a table. `S` is the length of each sequence, or of all packed ones together."""

    table: str
    S: int
    D: int
    Hq: int
    Hkv: int
    B: int = 1
    causal: bool = False

    @property
    def tokens(self) -> int:
        return self.S if self.table == "varlen" else self.B * self.S

    @property
    def name(self) -> str:
        if self.table in ("decode", "host_decode"):
            return f"B {self.B}, {_thousands(self.S)} keys"
        how = ", causal" if self.causal else ""
        if self.table == "varlen":
            return f"{self.B} sequences, {_thousands(self.S)} tokens, D {self.D}{how}"
        if self.table in ("small", "host"):
            return f"B {self.B}, H {self.Hq}, S {self.S}, D {self.D}{how}"
        return f"D {self.D}, S {_thousands(self.S)}{how}"


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _prefill(table: str, dims: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Case]:
    for D in dims:
        for S in lengths:
            for causal in (False, True):
                yield Case(table, S, D, 2048 // D, 2048 // D, TOKENS // S, causal)


# In the order in which they run, so that a run that is cut off has what matters most.
CASES: tuple[Case, ...] = (
    *_prefill("forward", (64, 128), (16384, 4096, 1024)),
    Case("small", 1024, 64, 16, 16, B=4, causal=True),
    *(Case("decode", S, 128, 32, 8, B, True) for B in (1, 8, 64) for S in (4096, 16384, 65536)),
    *_prefill("backward", (64, 128), (16384, 4096)),
    *_prefill("forward", (256,), (16384,)),
    *(Case("varlen", 2 * TOKENS, D, 2048 // D, 2048 // D, 64, causal=True) for D in (64, 128)),
    Case("small", 1024, 32, 16, 16, B=2),
    Case("host", 64, 64, 8, 8, causal=True),
    Case("host_decode", 2048, 64, 8, 2, causal=True),
    *_prefill("backward", (256,), (16384, 4096)),
    *_prefill("backward", (64, 128), (1024,)),
)
