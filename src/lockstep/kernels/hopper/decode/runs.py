"""What the producer tells the consumer: which run is next.

A *run* is what a program has of one head of one sequence. The program folds a run that begins with
the first span; if it ends before the last, its state is one part of the head. Every other span is a
part of its own. Parts are handed out, and folded by `folding/fold.py`.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.mailbox import Mailbox

# Runs that the producer may be ahead.
RUNS_AHEAD = gl.constexpr(4)


@aggregate
class Run:
    """Spans of one tile of query rows that one program computes."""

    exists: gl.tensor
    b: gl.tensor
    head: gl.tensor  # KV head
    q_tile: gl.tensor
    begin: gl.tensor  # tiles of keys
    end: gl.tensor
    span: gl.tensor  # tiles of a span
    first_span: gl.tensor  # counted from the first that is seen
    kv_len: gl.tensor  # -1 if it is wrong
    slot: gl.tensor  # where its parts go; if these are all spans, -1 less that
    n_q: gl.tensor  # queries of its sequence, and where they begin
    q_start: gl.tensor
    n_own: gl.tensor  # its spans, those of its head, and the first part of the head, if it is cut
    n_spans: gl.tensor
    first_part: gl.tensor

    @gluon.constexpr_function
    def __init__(self, numbers):
        self.exists = numbers[0]
        self.b = numbers[1]
        self.head = numbers[2]
        self.q_tile = numbers[3]
        self.begin = numbers[4]
        self.end = numbers[5]
        self.span = numbers[6]
        self.first_span = numbers[7]
        self.kv_len = numbers[8]
        self.slot = numbers[9]
        self.n_q = numbers[10]
        self.q_start = numbers[11]
        self.n_own = numbers[12]
        self.n_spans = numbers[13]
        self.first_part = numbers[14]


@aggregate
class RunQueue:
    """The producer writes which run is next, the consumer reads it."""

    mailbox: Mailbox
    INSIDE: gl.constexpr  # programs fold what they have cut: `folding/arrivals.py`

    @gluon.constexpr_function
    def __init__(self, mailbox, INSIDE):
        self.mailbox = mailbox
        self.INSIDE = gl.constexpr(INSIDE)

    @gluon.jit
    def create(PACKED: gl.constexpr, INSIDE: gl.constexpr):
        FIELDS: gl.constexpr = 10 + (2 if PACKED else 0) + (3 if INSIDE else 0)
        return RunQueue(Mailbox.create(FIELDS, 1, RUNS_AHEAD), INSIDE)

    @gluon.jit
    def post(self, n, numbers):
        self.mailbox.post(n, numbers)

    @gluon.jit
    def read(self, n, sizes):
        self.mailbox.wait(n)
        if sizes.PACKED:
            n_q = self.mailbox.field(n, 10)
            q_start = self.mailbox.field(n, 11)
        else:
            n_q = sizes.Sq
            q_start = sizes.Sq * 0
        n_own, n_spans, first_part = sizes.Sq, sizes.Sq, sizes.Sq
        if self.INSIDE:
            AT: gl.constexpr = 12 if sizes.PACKED else 10
            n_own = self.mailbox.field(n, AT)
            n_spans = self.mailbox.field(n, AT + 1)
            first_part = self.mailbox.field(n, AT + 2)
        run = Run(
            (
                self.mailbox.field(n, 0),
                self.mailbox.field(n, 1),
                self.mailbox.field(n, 2),
                self.mailbox.field(n, 3),
                self.mailbox.field(n, 4),
                self.mailbox.field(n, 5),
                self.mailbox.field(n, 6),
                self.mailbox.field(n, 7),
                self.mailbox.field(n, 8),
                self.mailbox.field(n, 9),
                n_q,
                q_start,
                n_own,
                n_spans,
                first_part,
            )
        )
        self.mailbox.release(n)
        return run
