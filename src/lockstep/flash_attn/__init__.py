"""The functions of the flash_attn packages, run by Lockstep.

    from lockstep.flash_attn import flash_attn_func             # signatures of flash-attn 2
    from lockstep.flash_attn.fa3 import flash_attn_func         # flash_attn_interface, for Hopper
    from lockstep.flash_attn.fa4 import flash_attn_func         # flash_attn.cute

Tensors have tokens before heads, [B, S, H, D], windows use -1 for no limit, a softcap of 0 is
none, and a causal mask sets the right side of the window. All of it runs on a CPU, too. What
Lockstep does not do raises NotImplementedError and names the argument: dropout, fp8.

Code that imports from `flash_attn` or `flash_attn_interface` gets these functions by

    lockstep.flash_attn.activate()

before its import. Lockstep never installs a package of that name itself.
"""

from lockstep.flash_attn import bert_padding, fa3, fa4
from lockstep.flash_attn.fa2 import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from lockstep.flash_attn.modules import activate, restore

__all__ = [
    "activate",
    "bert_padding",
    "fa3",
    "fa4",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "restore",
]
