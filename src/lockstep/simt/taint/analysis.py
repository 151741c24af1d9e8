"""Which instructions of a kernel may let secrets show in time: a taint analysis of machine code.

Secret is what comes from memory: loads from global memory, copies into shared memory, products of
matrix units, results of atomics. Public are parameters, special registers, the state of barriers,
and loads from buffers that the caller names. A register, uniform register or predicate that derives
from a secret is secret. A secret must not reach

- a branch: the condition of a jump, an exit, a trap, or the target of a jump
- a predicated access: the condition of an access to memory, of a copy or of a barrier
- an address: of memory, of a copy, of an operand of a product
- a public buffer: what is stored there could come back as public

The trip count of a loop is the condition of its jump. Selects and predicated arithmetic are
allowed: they take the same time either way.

The analysis follows all paths to a fixed point, and errs on the side of secrecy:

- A value is secret if it may be on any path, whether or not that path can be taken.
- A value loaded from global memory is secret unless its address derives from public buffers alone.
- Shared memory of sm_90 is a cell for each constant that addresses add to: if a secret is written
  to it anywhere, all that is read from it is secret. That of sm_80, whose addresses do not tell
  buffers from indices, is one cell, and one for each address that is constant: once a secret has
  been written to a cell, all that is read from it later is secret.
- What is kept in local memory at an address that is not constant may be read at any other.

It relies on this: an address that derives from a public and from another buffer is not that of a
store to the public one; an index stays inside its buffer, so that an access does not reach the next
cell (other tests look for that); and time does not depend on the values that arithmetic has, which
holds for the GPUs that it reads the code of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

from .code import Code, Instruction, Operand, read_code
from .opcodes import BARRIERS, CONTROL, COPIES, LOADS, PRODUCTS, SILENT, STORES
from .parameters import Parameter, read_parameters
from .steps import (
    LOCAL,
    SHARED,
    access_bytes,
    chosen,
    constant_labels,
    leaders,
    local_key,
    memory_operand,
)
from .values import (
    ALL_BITS,
    NOTHING,
    SECRET,
    UNKNOWN,
    State,
    Under,
    Value,
    address_base,
    base_of,
    clear_bits,
    clear_result,
    either,
    labels_of,
    origin,
)

# Addresses of a block's shared memory begin here where there are clusters.
_SHARED_BEGIN = 0x400
# How often a base may fall where paths join before it counts as unknown.
_MOST_FALLS = 4


@dataclass(frozen=True)
class Leak:
    """An instruction that a secret reaches. `kind` is "branch", "predicated access", "address" or
    "public buffer"."""

    kind: str
    address: int
    text: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.address:#06x} {self.text} ({self.file}:{self.line})"


def find_leaks(cubin: bytes, public: Collection[int] = ()) -> list[Leak]:
    """Instructions of the kernel in a cubin that a secret may reach, in order of address.

    `public` are the parameters, by number, that point to buffers without secrets. Raises SimtError
    where there is no nvdisasm, and for machine code that the analysis does not know.

    >>> find_leaks(compiled.cubin, public={3})               # doctest: +SKIP
    """
    return analyze(read_code(cubin), read_parameters(cubin), public)


def analyze(code: Code, parameters: tuple[Parameter, ...], public: Collection[int]) -> list[Leak]:
    """`find_leaks`, of code that has been read."""
    bases: set[int] | None = None
    if code.has_bases:
        # Which cells there are is known when all addresses are.
        trial = _Analysis(code, parameters, public, None)
        trial.run()
        bases = trial.written_bases
    analysis = _Analysis(code, parameters, public, sorted(bases) if bases is not None else None)
    analysis.run()
    return analysis.leaks()


@dataclass
class _Analysis:
    code: Code
    parameters: tuple[Parameter, ...]
    public: Collection[int]
    bases: list[int] | None  # where cells of shared memory begin; None for one cell
    written_bases: set[int] = field(default_factory=set)
    cells: dict[int, Value] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    falls: dict[tuple[tuple[int, str], object], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_public = sum(origin(i) for i in set(self.public))
        self.has_cells = self.code.has_bases
        self.constants = [constant_labels(each, self.parameters) for each in self.code.instructions]
        self.leaders = leaders(self.code)

    def run(self) -> None:
        """To a fixed point; cells that all warps share are found in rounds."""
        while True:
            before = dict(self.cells)
            self.states = {0: State()}
            waiting = {0}
            while waiting:
                # In the order of the code, a block is seldom looked at before those ahead of it.
                i = min(waiting)
                waiting.remove(i)
                waiting |= self._run_block(i)
            if self.cells == before:
                return

    def _run_block(self, i: int) -> set[int]:
        """Returns the blocks behind it that know more than before."""
        state = self.states[i].copy()
        while True:
            self._step(i, state)
            follow = self.code.successors[i]
            if len(follow) == 1 and follow[0] not in self.leaders:
                i = follow[0]
                continue
            return {j for j in follow if self._join(j, state)}

    def _join(self, i: int, state: State) -> bool:
        """Whether more is known to be possible at i, where this state arrives, than before."""
        known = self.states.get(i)
        if known is None:
            self.states[i] = state.copy()
            return True
        changed = self._widen((i, ""), known, state)
        for condition, values in known.under.items():
            others = state.under.get(condition, {})
            gone = [x for x in values if x not in others]
            for register in gone:
                del values[register]
            both = {register: others[register] for register in values}
            changed = self._widen((i, condition), values, both) or changed or bool(gone)
        return changed

    def _widen(
        self, place: tuple[int, str], known: dict[object, Value], others: dict[object, Value]
    ) -> bool:
        """Makes values known that may be either; returns whether any of them changed."""
        changed = False
        for name, value in others.items():
            old = known.get(name)
            if old is value:
                continue
            new = value if old is None else either(old, value)
            if new != old:
                if old is not None and new.base < old.base:
                    # What keeps falling, round a loop, has no base.
                    self.falls[place, name] = self.falls.get((place, name), 0) + 1
                    if self.falls[place, name] > _MOST_FALLS:
                        new = Value(new.labels, UNKNOWN, False)
                known[name] = new
                changed = changed or new != old
        return changed

    def _step(self, i: int, state: State) -> None:
        """What an instruction does to registers and memory."""
        each = self.code.instructions[i]
        name = each.name
        guard = state.get(each.guard, NOTHING).labels if each.guard else 0
        seen = Under(state, each.condition) if each.guard else state
        if name in STORES or name in COPIES:
            self._store(each, state, seen, guard)
        if not each.written:
            return
        labels = labels_of(each.read, seen) | self.constants[i] | guard
        base, exact = 0, False
        if name in LOADS:
            loaded = self._load(each, state, seen)
            labels, base, exact = loaded.labels | guard, loaded.base, loaded.exact
        elif name in PRODUCTS:
            labels |= SECRET
        elif name in BARRIERS:
            labels = 0
        else:
            base, exact = base_of(each, seen)
        clear = clear_result(each, seen) if labels & SECRET else 0
        if clear == ALL_BITS and not guard & SECRET:
            labels, clear = labels & ~SECRET, 0
        value = Value(labels, base, exact, clear)
        if name == "R2P":
            self._unpack(each, state)
            return
        for operand in each.written:
            for register in operand.registers:
                new = value if register == operand.text else Value(labels)
                if register == operand.text and guard & SECRET:
                    new = chosen(each, new, seen)
                state.forget(register)
                if each.guard:
                    state[register] = either(state.get(register, NOTHING), new)
                    state.under.setdefault(each.condition, {})[register] = new
                else:
                    state[register] = new

    def _unpack(self, each: Instruction, state: State) -> None:
        """R2P: each predicate from its bit of a register."""
        text, _, part = each.read[0].text.partition(".B")
        value = state.get(text, NOTHING)
        shift = 8 * int(part) if part.isdigit() else 0
        mask = each.read[1].constant if len(each.read) > 1 else None
        guard = state.get(each.guard, NOTHING).labels if each.guard else 0
        for i in range(7):
            if mask is not None and not mask >> i & 1:
                continue
            is_secret = not clear_bits(value) >> (shift + i) & 1
            new = Value(guard | (SECRET if is_secret else 0))
            state.forget(f"P{i}")
            old = state.get(f"P{i}", new)
            state[f"P{i}"] = either(old, new) if each.guard else new

    def _load(self, each: Instruction, state: State, seen: State) -> Value:
        memory = memory_operand(each.read)
        if each.name in ("LDS", "LDSM", "ATOMS"):
            base = address_base(memory, seen)
            return self._read_shared(base, access_bytes(each), state, not memory.registers)
        if each.name == "LDL":
            return self._read_local(memory, access_bytes(each), state)
        return Value(self._loaded_labels(memory, seen))

    def _loaded_labels(self, memory: Operand, state: State) -> int:
        """0 if an address points into public buffers alone."""
        labels = labels_of((memory,), state)
        is_public = labels and not labels & ~self.is_public
        return 0 if is_public else SECRET

    def _store(self, each: Instruction, state: State, seen: State, guard: int) -> None:
        memory = memory_operand(each.read)
        if each.name == "UTMALDG" or each.name == "UBLKCP":
            register = memory.registers[0]
            self._write_shared(seen.get(register, NOTHING).base, Value(SECRET), state)
        elif each.name == "LDGSTS":
            labels = self._loaded_labels(each.read[1], seen) | guard
            base, is_constant = address_base(memory, seen), not memory.registers
            self._write_shared(base, Value(labels), state, is_constant)
        elif each.name in ("STS", "STSM", "ATOMS"):
            data = tuple(x for x in each.read if x is not memory)
            stored = seen.get(data[0].text, NOTHING) if len(data) == 1 else NOTHING
            value = stored._replace(labels=labels_of(data, seen) | guard)
            self._write_shared(address_base(memory, seen), value, state, not memory.registers)
        elif each.name == "STL":
            key = local_key(memory, state)
            for k, register in enumerate(each.read[1].registers or ("RZ",)):
                stored = seen.get(register, NOTHING)
                value = stored._replace(labels=stored.labels | guard)
                at = (LOCAL, None if key is None else key + 4 * k)
                is_certain = key is not None and not each.guard
                state[at] = value if is_certain else either(state.get(at, value), value)

    def _write_shared(
        self, base: int, value: Value, state: State, is_constant: bool = False
    ) -> None:
        self.written_bases.add(base)
        if not self.has_cells:
            at = (SHARED, base) if is_constant else SHARED
            state[at] = either(state.get(at, value), value)
        elif self.bases is not None:
            at = self._cell(base)
            self.cells[at] = either(self.cells.get(at, value), value)

    def _read_shared(self, base: int, n: int, state: State, is_constant: bool) -> Value:
        if not self.has_cells:
            return state.get((SHARED, base) if is_constant else SHARED, NOTHING)
        if self.bases is None:
            return NOTHING
        first, last = self._cell(base), self._cell(base + n - 1)
        if first < _SHARED_BEGIN:
            # Of an address that is not known: all cells.
            wanted = list(self.cells)
        else:
            wanted = [at for at in self.cells if first <= at <= last or at < _SHARED_BEGIN]
        found = [self.cells[at] for at in wanted]
        value = found[0] if found else NOTHING
        for more in found[1:]:
            value = either(value, more)
        return value

    def _cell(self, base: int) -> int:
        """Where the cell begins that an address is in; below _SHARED_BEGIN if it is not known."""
        assert self.bases is not None
        i = bisect_right(self.bases, base)
        return self.bases[i - 1] if i and base >= _SHARED_BEGIN else -1

    def _read_local(self, memory: Operand, n: int, state: State) -> Value:
        key = local_key(memory, state)
        if key is not None and (LOCAL, None) not in state:
            found = state.get((LOCAL, key), NOTHING)
            for at in range(key + 4, key + n, 4):
                # Registers behind the first get its labels and no base.
                more = state.get((LOCAL, at), NOTHING)
                found = found._replace(labels=found.labels | more.labels)
            return found
        found = NOTHING
        for name, value in state.items():
            if isinstance(name, tuple) and name[0] == LOCAL:
                found = either(found, value)
        return found

    def leaks(self) -> list[Leak]:
        """What the fixed point shows."""
        found: dict[tuple[int, str], Leak] = {}
        for start, known in self.states.items():
            state, i = known.copy(), start
            while True:
                each = self.code.instructions[i]
                for kind in self._kinds(each, state):
                    leak = Leak(kind, each.address, each.text, each.file, each.line)
                    found[each.address, kind] = leak
                self._step(i, state)
                follow = self.code.successors[i]
                if len(follow) != 1 or follow[0] in self.leaders:
                    break
                i = follow[0]
        return [found[key] for key in sorted(found)]

    def _kinds(self, each: Instruction, state: State) -> list[str]:
        name = each.name
        guard = bool(each.guard) and state.get(each.guard, NOTHING).is_secret
        state = Under(state, each.condition) if each.guard else state
        if name in CONTROL:
            reaches = guard or labels_of(each.read, state) & SECRET
            return ["branch"] if reaches else []
        touches = LOADS | STORES | COPIES | BARRIERS | SILENT | PRODUCTS
        if name not in touches and name not in ("LDC", "ULDC"):
            return []
        kinds = []
        conditions = tuple(x for x in each.read if x.text.lstrip("!").startswith(("P", "UP")))
        if name not in ("LDC", "ULDC") and (guard or labels_of(conditions, state) & SECRET):
            kinds.append("predicated access")
        addresses = tuple(x for x in each.read if "[" in x.text)
        if name == "BAR":
            addresses = each.read
        if labels_of(addresses, state) & SECRET:
            kinds.append("address")
        if name in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG"):
            to = labels_of(addresses, state)
            data = labels_of(tuple(x for x in each.read if "[" not in x.text), state)
            if data & SECRET and to & self.is_public and not to & ~self.is_public:
                kinds.append("public buffer")
        return kinds
