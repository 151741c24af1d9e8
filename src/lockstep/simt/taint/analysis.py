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
- Shared memory of sm_90 is a cell for each constant that addresses add to. That of sm_80, whose
  addresses do not tell buffers from indices, is one cell, and one for each address that is
  constant. Once a secret has been written to a cell, all that is read from it later is secret;
  where warps go different ways, all that is read from it anywhere.
- What is kept in local memory at an address that is not constant may be read at any other.

It relies on this: an address that derives from a public and from another buffer is not that of a
store to the public one; an index stays inside its buffer, so that an access does not reach the next
cell (other tests look for that); and time does not depend on the values that arithmetic has, which
holds for the GPUs that it reads the code of.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import reduce

from .calls import inlined
from .code import Code, Instruction, Operand, read_code
from .opcodes import BARRIERS, COPIES, LOADS, PRODUCTS, SHARED_LOADS, STORES
from .parameters import Parameter, read_parameters
from .shared import SharedMemory
from .steps import (
    LOCAL,
    access_bytes,
    blocks_of,
    chosen,
    constant_labels,
    kinds_of,
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
    negated,
    origin,
)

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
    code = inlined(code)
    bases: list[int] | None = None
    if code.has_bases:
        # Which cells there are is known when all addresses are.
        trial = _Analysis(code, parameters, public, SharedMemory(code, None))
        trial.run()
        bases = sorted(trial.shared.written_bases)
    analysis = _Analysis(code, parameters, public, SharedMemory(code, bases))
    analysis.run()
    return analysis.leaks()


@dataclass
class _Analysis:
    code: Code
    parameters: tuple[Parameter, ...]
    public: Collection[int]
    shared: SharedMemory
    states: dict[int, State] = field(default_factory=dict)
    falls: dict[tuple[tuple[int, str], object], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_public = sum(origin(i) for i in set(self.public))
        self.constants = [constant_labels(each, self.parameters) for each in self.code.instructions]
        self.reads = [
            frozenset(name for operand in each.read for name in operand.registers)
            for each in self.code.instructions
        ]
        self.blocks = blocks_of(self.code)

    def run(self) -> None:
        """Run the analysis to a fixed point. Cells that all warps share are found in rounds: where
        one has found more of them, blocks that read cells are run again."""
        self.states = {0: State()}
        waiting = {0}
        while waiting:
            before = dict(self.shared.cells)
            while waiting:
                # In the order of the code, a block is seldom looked at before those ahead of it.
                i = min(waiting)
                waiting.remove(i)
                waiting |= self._run_block(i)
            if self.shared.cells != before:
                waiting = {i for i in self.states if self._reads_shared(i)}

    def _reads_shared(self, i: int) -> bool:
        """Whether an instruction of the block that begins at i reads shared memory."""
        return any(self.code.instructions[j].name in SHARED_LOADS for j in self.blocks[i])

    def _run_block(self, i: int) -> set[int]:
        """Returns the blocks after it that know more than before."""
        state = self.states[i].copy()
        for j in self.blocks[i]:
            self._step(j, state)
        last = self.blocks[i][-1]
        each = self.code.instructions[last]
        # Lanes that go one way may all be without it.
        state.elected.discard(each.guard or "")
        follow = self.code.successors[last]
        if each.name == "BRA" and each.guard and not each.read and len(follow) == 2:
            # Lanes that jump have the condition, others do not.
            by_way = zip(follow, (negated(each.condition), each.condition), strict=True)
            return {j for j, condition in by_way if self._join(j, state.where(condition))}
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
        for mine, other in ((known.votes, state.votes), (known.twins, state.twins)):
            for name in [x for x in mine if mine[x] != other.get(x)]:
                del mine[name]
                changed = True
        changed = changed or not known.elected <= state.elected
        known.elected &= state.elected
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
        """Apply an instruction to registers and memory."""
        each = self.code.instructions[i]
        guard = state.get(each.guard, NOTHING).labels if each.guard else 0
        seen = Under(state, each.condition) if each.guard else state
        if each.name in STORES or each.name in COPIES:
            self._store(each, state, seen, guard)
        elif each.name == "SYNCS" and self.code.is_specialized:
            # A barrier: what lies before it ends there. Other code may use its memory again.
            self.shared.written_bases.add(address_base(memory_operand(each.read), seen))
        if not each.written:
            return
        if each.name == "R2P":
            self._unpack(each, state)
            return
        value = self._result(i, state, seen, guard)
        # One lane writes a register that all have in common.
        is_certain = not each.guard or (each.name == "R2UR" and each.condition in state.elected)
        known = {} if each.guard or each.name in LOADS else self._known_results(i, state)
        for operand in each.written:
            for k, register in enumerate(operand.registers):
                new = value if register == operand.text else self._behind(each, k, value, state)
                if register == operand.text and guard & SECRET:
                    new = chosen(each, new, seen)
                state.forget(register)
                if is_certain:
                    state[register] = new
                else:
                    state[register] = either(state.get(register, NOTHING), new)
                    for condition in self._meant(each, state):
                        state.under.setdefault(condition, {})[register] = new
                for condition, found in known.items():
                    new = found if register == operand.text else Value(found.labels)
                    state.under.setdefault(condition, {})[register] = new
        if not each.guard:
            state.relate(each)

    def _meant(self, each: Instruction, state: State) -> list[str]:
        """The conditions under which an instruction that has one writes its registers. A register
        that all lanes have in common is written if any lane's condition holds."""
        votes = state.votes.items() if each.name == "R2UR" else ()
        voted = [vote for vote, on in votes if on == each.condition]
        return [state.meant(each.condition), *voted]

    def _known_results(self, i: int, state: State) -> dict[str, Value]:
        """The results of an instruction by a condition that all lanes share: under it, more may be
        known of what the instruction reads. Compilers compute with what is only set under a
        condition, and use the result under the same one."""
        written = {x for operand in self.code.instructions[i].written for x in operand.registers}
        return {
            condition: self._result(i, state, Under(state, condition), 0)
            for condition, values in state.under.items()
            if "U" in condition
            and condition.lstrip("!") not in written
            and not self.reads[i].isdisjoint(values)
        }

    def _result(self, i: int, state: State, seen: State, guard: int) -> Value:
        """The value that an instruction writes to its first register, if what it reads is as
        `seen`."""
        each = self.code.instructions[i]
        labels = labels_of(each.read, seen) | self.constants[i] | guard
        if each.name in LOADS:
            loaded = self._load(each, state, seen)
            # Registers are kept in local memory, predicates packed in them.
            clear = loaded.clear if each.name == "LDL" else 0
            return loaded._replace(labels=loaded.labels | guard, clear=clear)
        if each.name in PRODUCTS:
            return Value(labels | SECRET)
        if each.name in BARRIERS:
            return NOTHING
        base, exact = base_of(each, seen)
        clear = clear_result(each, seen) if labels & SECRET else 0
        if clear == ALL_BITS and not guard & SECRET:
            labels, clear = labels & ~SECRET, 0
        return Value(labels, base, exact, clear)

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
        if each.name in SHARED_LOADS:
            base = address_base(memory, seen)
            return self.shared.read(base, access_bytes(each), state, not memory.registers)
        if each.name == "LDL":
            return self._read_local(memory, state)
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
            self.shared.write(seen.get(register, NOTHING).base, Value(SECRET), state)
        elif each.name == "LDGSTS":
            labels = self._loaded_labels(each.read[1], seen) | guard
            base, is_constant = address_base(memory, seen), not memory.registers
            self.shared.write(base, Value(labels), state, is_constant)
        elif each.name in ("STS", "STSM", "ATOMS"):
            data = tuple(x for x in each.read if x is not memory)
            stored = seen.get(data[0].text, NOTHING) if len(data) == 1 else NOTHING
            value = stored._replace(labels=labels_of(data, seen) | guard)
            self.shared.write(address_base(memory, seen), value, state, not memory.registers)
        elif each.name == "STL":
            key = local_key(memory, state)
            for k, register in enumerate(each.read[1].registers or ("RZ",)):
                stored = seen.get(register, NOTHING)
                clear = 0 if guard & SECRET else stored.clear
                value = stored._replace(labels=stored.labels | guard, clear=clear)
                at = (LOCAL, None if key is None else key + 4 * k)
                is_certain = key is not None and not each.guard
                state[at] = value if is_certain else either(state.get(at, value), value)

    def _read_local(self, memory: Operand, state: State, word: int = 0) -> Value:
        key = local_key(memory, state)
        if key is not None and (LOCAL, None) not in state:
            return state.get((LOCAL, key + 4 * word), NOTHING)
        kept = (x for name, x in state.items() if isinstance(name, tuple) and name[0] == LOCAL)
        return reduce(either, kept, NOTHING)

    def _behind(self, each: Instruction, k: int, value: Value, state: State) -> Value:
        """The value that is written to the k-th register: one that was kept beside a secret need
        not be one."""
        if each.name != "LDL":
            return Value(value.labels)
        own = self._read_local(memory_operand(each.read), state, k).labels
        return Value(own | value.labels if each.guard else own)

    def leaks(self) -> list[Leak]:
        """The leaks that the fixed point shows."""
        found: dict[tuple[int, str], Leak] = {}
        for start, known in self.states.items():
            state = known.copy()
            for i in self.blocks[start]:
                each = self.code.instructions[i]
                for kind in kinds_of(each, state, self.is_public):
                    leak = Leak(kind, each.address, each.text, each.file, each.line)
                    found[each.address, kind] = leak
                self._step(i, state)
        return [found[key] for key in sorted(found)]
