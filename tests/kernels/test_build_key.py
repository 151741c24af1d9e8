"""A build that one process leaves on disk is found by all others."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from itertools import chain

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.language.core import constexpr
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

from lockstep.kernels import hopper, triton
from lockstep.kernels.build_key import fix_key


@pytest.fixture(scope="module")
def functions() -> list[JITCallable]:
    """All that Triton compiles, kernels and what they call."""
    modules = chain.from_iterable(
        pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for package in (hopper, triton)
    )
    members = chain.from_iterable(vars(importlib.import_module(m.name)).values() for m in modules)
    found = {id(x): x for x in members if isinstance(x, JITCallable)}
    if not any(isinstance(x, JITFunction) for x in found.values()):
        pytest.skip("the interpreter compiles nothing")
    return list(found.values())


def keys_in_order(functions: list[JITCallable]) -> dict[str, str]:
    """As a process finds them that runs one after the other."""
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    for function in functions:
        fix_key(function)
    return {f"{x.fn.__module__}.{x.fn.__qualname__}": x.cache_key for x in functions}


def test_keys_do_not_depend_on_what_ran_before(functions):
    by_triton = DependenciesFinder._update_hash
    assert keys_in_order(functions) == keys_in_order(functions[::-1])
    assert DependenciesFinder._update_hash is by_triton


def test_no_two_constants_of_a_kernel_share_a_name(functions):
    """Triton would put them into the key in the order of their modules in memory."""
    for function in functions:
        fix_key(function)
        values = defaultdict(set)
        for (name, _), (value, _) in function.used_global_vals.items():
            if isinstance(value, constexpr):
                values[name].add(repr(value))
        assert all(len(found) == 1 for found in values.values()), function.fn.__qualname__
