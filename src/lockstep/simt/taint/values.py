"""The knowledge about a value: whether it may be secret, which buffers it may point into, and, for
an address in shared memory, which constant it adds to.

`labels` is a set of bits: SECRET, and one for each parameter that the value derives from as a
pointer does. `clear` has the bits of a secret value that are public even so: compilers keep
predicates as bits of registers. `base` is a number that the value is not below, as sums of
addresses have it: the offset of a buffer, whatever index comes on top. If `exact`, the value is
that number.
"""

from __future__ import annotations

from typing import NamedTuple

from .code import Instruction, Operand

SECRET = 1
_SUMS = frozenset(["IADD3", "UIADD3", "VIADD", "IADD"])
_MOVES = frozenset(["MOV", "UMOV", "R2UR"])
ALL_BITS = (1 << 32) - 1
# A base that is not known.
UNKNOWN = -(1 << 40)
_AND, _SIGN, _WORD = 0xC0, 1 << 31, 1 << 32


class Value(NamedTuple):
    labels: int = 0
    base: int = 0
    exact: bool = False
    clear: int = 0

    @property
    def is_secret(self) -> bool:
        return bool(self.labels & SECRET)


NOTHING = Value()
_PREDICATES = frozenset(f"{u}P{i}" for u in ("", "U") for i in range(7))
# Tables of PLOP3 by which the last of three inputs comes out, the others being on: as it is, or
# turned round.
_COPIES = {"0x80": "", "0x40": "!"}


class State(dict[object, Value]):
    """The knowledge at one place: about registers and predicates by name, and about cells of
    memory.

    `under` has what is known of registers under a condition, by the condition. `votes` has the
    predicates that a predicate is the vote of all lanes on. `twins` has, for a predicate, a
    condition that is equal to it, of which it is a copy, or which is a vote on the same: compilers
    make one for an address and one for the access. `elected` has the predicates that are on in one
    lane.
    """

    __slots__ = ("elected", "twins", "under", "votes")

    def __init__(self) -> None:
        super().__init__()
        self.under: dict[str, dict[object, Value]] = {}
        self.votes: dict[str, str] = {}
        self.twins: dict[str, str] = {}
        self.elected: set[str] = set()

    def copy(self) -> State:
        new = State()
        new.update(self)
        new.under = {condition: dict(values) for condition, values in self.under.items() if values}
        new.votes, new.twins, new.elected = (
            self.votes.copy(),
            self.twins.copy(),
            self.elected.copy(),
        )
        return new

    def forget(self, register: str) -> None:
        """Forget what is known under conditions of a register, or under a predicate, that is
        written."""
        if register.lstrip("U").startswith("P"):
            self._hand_on(register)
            for condition in (register, f"!{register}"):
                self.under.pop(condition, None)
            for known in (self.votes, self.twins):
                for name in [x for x, of in known.items() if register in (x, of.lstrip("!"))]:
                    del known[name]
            self.elected.discard(register)
        else:
            for values in self.under.values():
                values.pop(register, None)

    def _hand_on(self, predicate: str) -> None:
        """Keep what is known under a predicate that is to be written, under one that is equal to
        it, if there is any."""
        heir = next((x for x, of in self.twins.items() if of == predicate), None)
        if heir is None:
            return
        del self.twins[heir]
        for sign in ("", "!"):
            if sign + predicate in self.under:
                self.under[sign + heir] = self.under.pop(sign + predicate)
        if predicate in self.votes:
            self.votes[heir] = self.votes.pop(predicate)
        for name, of in self.twins.items():
            if of.lstrip("!") == predicate:
                self.twins[name] = of.replace(predicate, heir)

    def relate(self, each: Instruction) -> None:
        """Note that a predicate that has been written is a copy of another one, a vote on it, or
        elected."""
        if each.name == "ELECT":
            self.elected.add(each.written[0].text)
        elif each.name == "VOTEU" and each.kinds == ("ANY",) and len(each.written) == 1:
            predicate, on = each.written[0].text, each.read[0].text
            equal = next((x for x, of in self.votes.items() if of == on), None)
            if equal is not None:
                self.twins[predicate] = equal
            elif on in _PREDICATES:
                self.votes[predicate] = on
        elif each.name in ("PLOP3", "UPLOP3"):
            self._copy(each)

    def _copy(self, each: Instruction) -> None:
        predicate, a, b, c, table = (x.text for x in (each.written[0], *each.read[:4]))
        sign = _COPIES.get(table)
        is_copy = {a, b} <= {"PT", "UPT"} and c in _PREDICATES and c != predicate
        if is_copy and sign is not None:
            self.twins[predicate] = self.meant(sign + c)

    def where(self, condition: str) -> State:
        """The state of lanes for which a condition holds."""
        known = self.under.get(self.meant(condition))
        if not known:
            return self
        new = self.copy()
        new.update(known)
        return new

    def meant(self, condition: str) -> str:
        """The condition that stands for all that are equal to it."""
        twin = self.twins.get(condition.lstrip("!"))
        if twin is None:
            return condition
        return twin if not condition.startswith("!") else f"!{twin}".removeprefix("!!")


def negated(condition: str) -> str:
    return condition[1:] if condition.startswith("!") else f"!{condition}"


class Under(State):
    """A state as an instruction sees it that is executed under a condition only."""

    def __init__(self, state: State, condition: str):
        self.state, self.known = state, state.under.get(state.meant(condition), {})

    def get(self, name: object, default: Value = NOTHING) -> Value:
        found = self.known.get(name)
        return self.state.get(name, default) if found is None else found


def origin(parameter: int) -> int:
    """The label of what derives from a parameter."""
    return 2 << parameter


def either(a: Value, b: Value) -> Value:
    """The knowledge about a value that is one of two."""
    if a == b:
        return a
    is_same = a.base == b.base
    clear = clear_bits(a) & clear_bits(b)
    return Value(a.labels | b.labels, min(a.base, b.base), is_same and a.exact and b.exact, clear)


def clear_bits(value: Value) -> int:
    """The bits of a value that are not secret."""
    return value.clear if value.is_secret else ALL_BITS


def clear_result(each: Instruction, state: State) -> int:
    """The bits of the result of a move or of bitwise logic that are not secret; else 0."""
    name, read = each.name, each.read
    if name in _MOVES and len(read) == 1:
        return clear_bits(_value(read[0], state))
    if name == "P2R" and len(read) == 3:
        mask = read[2].constant or ALL_BITS
        secret = sum(1 << i for i in range(7) if state.get(f"P{i}", NOTHING).is_secret)
        return clear_bits(_value(read[1], state)) & ~(secret & mask)
    if name in ("LOP3", "ULOP3") and len(read) >= 4:
        lut = read[3].constant
        a, b, c = (_value(x, state) for x in read[:3])
        constants = [x.constant for x in read[:3]]
        known = clear_bits(a) & clear_bits(b) & clear_bits(c)
        if lut == _AND and constants[1] is not None:
            # Bits that are masked out are 0.
            return known | (~constants[1] & ALL_BITS)
        return known
    return 0


def _value(operand: Operand, state: State) -> Value:
    return state.get(operand.text.lstrip("~-"), NOTHING)


def labels_of(operands: tuple[Operand, ...], state: State) -> int:
    """The labels of all registers in the operands."""
    found = 0
    for operand in operands:
        for register in operand.registers:
            found |= state.get(register, NOTHING).labels
    return found


def base_of(each: Instruction, state: State) -> tuple[int, bool]:
    """`base` and `exact` of the result of arithmetic."""
    name, kinds = each.name, each.kinds
    read = each.numbers
    if "X" in kinds or "HI" in kinds:
        return 0, False
    if name in _MOVES and len(read) == 1:
        return _number(read[0], state)
    if name in _SUMS:
        return _sum([_number(x, state) for x in read])
    if name in ("IMAD", "UIMAD") and len(read) == 3:
        a, b, c = (_number(x, state) for x in read)
        return _sum([_product(a, b), c])
    if name in ("LEA", "ULEA") and len(read) == 3:
        a, b, shift = (_number(x, state) for x in read)
        return _sum([_product(a, (1 << shift[0], True)), b]) if shift[1] else (0, False)
    if name in ("SHF", "USHF") and "L" in kinds and len(read) == 3 and "Z" in read[2].text:
        a, shift = _number(read[0], state), _number(read[1], state)
        return _product(a, (1 << (shift[0] & 31), True)) if shift[1] else (0, False)
    if name in ("SEL", "USEL") and len(read) == 2:
        a, b = (_number(x, state) for x in read)
        return min(a[0], b[0]), False
    if name in ("LOP3", "ULOP3") and len(read) == 4:
        *numbers, lut = (_number(x, state) for x in read)
        # Masks leave nothing of a base; sums of bits keep it.
        return (0, False) if lut[0] == _AND else (max(x[0] for x in numbers), False)
    if name in ("PRMT", "UPRMT"):
        return max(_number(read[0], state)[0], _number(read[-1], state)[0]), False
    return 0, False


def address_base(operand: Operand, state: State) -> int:
    """The base of `[R4.X16+UR6+0x100]`."""
    inner = operand.text[operand.text.rindex("[") + 1 :].rstrip("]")
    total = 0
    for part in inner.replace("+-", "+ -").split("+"):
        term, _, scale = part.strip().partition(".X")
        number = _number(Operand(term.removesuffix(".64"), ()), state)
        total += number[0] * (int(scale) if scale.isdigit() else 1)
    return total


def _number(operand: Operand, state: State) -> tuple[int, bool]:
    text = operand.text
    if (constant := operand.constant) is not None:
        return (constant - _WORD if constant >= _SIGN else constant), True
    sign = -1 if text.startswith("-") else 1
    name = text.lstrip("-")
    if name in ("RZ", "URZ"):
        return 0, True
    value = state.get(name, NOTHING)
    if sign < 0 and not value.exact:
        return 0, False
    return sign * value.base, value.exact


def _sum(numbers: list[tuple[int, bool]]) -> tuple[int, bool]:
    return _bounded(sum(x for x, _ in numbers), all(exact for _, exact in numbers))


def _product(a: tuple[int, bool], b: tuple[int, bool]) -> tuple[int, bool]:
    if a[1] and b[1]:
        return _bounded(a[0] * b[0], True)
    if a[1] or b[1]:
        return _bounded(max(a[0] * b[0], 0), False)
    return 0, False


def _bounded(base: int, exact: bool) -> tuple[int, bool]:
    """A base that an address can have; else, one that is not known."""
    if -_WORD < base < _WORD:
        return base, exact
    return UNKNOWN, False
