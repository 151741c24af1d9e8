"""Modules of the flash_attn packages by their own names, for code that imports those."""

from __future__ import annotations

import sys
from types import ModuleType

from lockstep.flash_attn import bert_padding, fa2, fa3, fa4

# Modules of FlashAttention 2, 3 and 4, besides `flash_attn`, which is the package around this file.
MODULES = {
    "flash_attn.flash_attn_interface": fa2,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn_interface": fa3,
    "flash_attn.cute": fa4,
    "flash_attn.cute.interface": fa4,
}
_before: dict[str, ModuleType | None] = {}


def activate() -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` find Lockstep's functions.

    For this process, from now on: what was imported from these packages before stays as it is.
    `restore` undoes it.

    Example:
        >>> activate()
        >>> from flash_attn.flash_attn_interface import flash_attn_varlen_func
        >>> flash_attn_varlen_func.__module__
        'lockstep.flash_attn.fa2'
        >>> restore()
    """
    assert __package__ is not None
    for name, module in {"flash_attn": sys.modules[__package__], **MODULES}.items():
        _before.setdefault(name, sys.modules.get(name))
        sys.modules[name] = module


def restore() -> None:
    """Gives the names back to the modules that had them before `activate`, if any had.

    Example:
        >>> restore()
    """
    while _before:
        name, module = _before.popitem()
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
