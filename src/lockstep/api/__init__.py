"""The public calls."""

from lockstep.api.beside import explain, merge
from lockstep.api.dense import attention
from lockstep.api.packed import attention_varlen
from lockstep.api.paged import attention_paged

__all__ = ["attention", "attention_paged", "attention_varlen", "explain", "merge"]
