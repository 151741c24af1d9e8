"""Warps of a Hopper kernel as Python threads, in random order, on barriers that count as the GPU's
do: the kernel's own functions run here, and a warp that would wait forever is found."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

from triton.runtime.jit import JITFunction


class Crew:
    """Threads of which one runs at a time; at each barrier another one is chosen by lot."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.waiting: dict = {}  # what each thread waits for
        self.turns: dict = {}
        self.failure: BaseException | None = None

    def pause(self, holds=lambda: True) -> None:
        me = threading.get_ident()
        self.waiting[me] = holds
        self.pass_on()
        self.turns[me].acquire()
        if self.failure is not None:
            raise RuntimeError("stopped")

    def pass_on(self) -> None:
        able = [i for i, holds in self.waiting.items() if self.failure is not None or holds()]
        if self.waiting and not able:
            self.failure = AssertionError("all warps wait")
            able = list(self.waiting)
        if able:
            chosen = self.draws.choice(able)
            del self.waiting[chosen]
            self.turns[chosen].release()

    def run(self, *warps) -> None:
        started = threading.Barrier(len(warps) + 1)

        def body(warp) -> None:
            me = threading.get_ident()
            self.turns[me] = threading.Semaphore(0)
            self.waiting[me] = lambda: True
            started.wait()
            self.turns[me].acquire()
            try:
                warp()
            except BaseException as error:
                self.failure = self.failure or error
            self.pass_on()

        threads = [threading.Thread(target=body, args=(warp,)) for warp in warps]
        for thread in threads:
            thread.start()
        started.wait()
        self.pass_on()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def mbarrier(self) -> SimpleNamespace:
        """Gluon's, of `Barrier`s."""

        def wait(barrier, phase, pred=True):
            self.pause(lambda: not pred or barrier.phase & 1 != phase)

        def arrive(barrier, count, pred=True):
            if pred:
                barrier.change(count, 0)

        def expect(barrier, nbytes):
            barrier.change(1, nbytes)

        return SimpleNamespace(wait=wait, arrive=arrive, expect=expect)


def make_plain(monkeypatch, modules, plain) -> None:
    """Have the functions of these modules run as Python, with other things in place of some."""
    for module in modules:
        for name, value in vars(module).copy().items():
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, value.fn)
            if name in plain:
                monkeypatch.setattr(module, name, plain[name])


def as_plain(aggregate: type) -> type:
    """An aggregate of Gluon as a class of Python, with what its functions find in their modules."""
    members = {
        name: staticmethod(member.fn) if name == "create" else member.fn
        for name, member in vars(aggregate).items()
        if isinstance(member, JITFunction)
    }
    return type(aggregate.__name__, (), {**members, "__init__": aggregate.hash_attrs[0].fn})


class Barrier:
    """Completes a phase when all have arrived and all bytes have landed."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def change(self, arrivals: int, nbytes: int) -> None:
        self.missing -= arrivals
        self.bytes += nbytes
        assert self.missing >= 0
        if self.missing == 0 and self.bytes == 0:
            self.missing = self.count
            self.phase += 1


class Slots(list):
    """Shared memory by its first dim."""

    dtype = None

    def index(self, i):
        return self[i]


class Anything:
    """Stands for every value that no warp waits for."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **more):
        return self

    __add__ = __sub__ = __mul__ = __lt__ = __floordiv__ = __getitem__ = __radd__ = __call__


class PlainGluon(Anything):
    constexpr = staticmethod(lambda x: x)
    maximum = staticmethod(max)
    minimum = staticmethod(min)
    static_range = range

    @staticmethod
    def where(condition, a, b):
        return a if condition else b
