"""What a launch hands to the CUDA driver, read back by a driver of our own."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import compile_for_hopper
from toy_kernel import ARGUMENTS, toy

from lockstep.kernels import driver
from lockstep.kernels.driver import (
    MAP_BYTES,
    ByTriton,
    TensorMap,
    launcher_of,
    parameters_of,
)
from lockstep.kernels.launch import Launch

GRID = (5, 2, 1)


def sizes_in(ptx: str) -> list[int]:
    """Bytes of the parameters that a kernel declares."""
    header = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    pattern = r"\.param (?:\.align \d+ )?\.[a-z](\d+).*?(?:\[(\d+)\])?(?:,|$)"
    declared = re.findall(pattern, header, re.MULTILINE)
    return [int(bits) // 8 * int(count or 1) for bits, count in declared]


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compile_for_hopper(toy, ARGUMENTS).kernel


def test_parameters_are_those_of_the_machine_code(compiled):
    found = [parameter.size for parameter in parameters_of(compiled, ARGUMENTS)]
    assert found == sizes_in(compiled.asm["ptx"])
    assert len(found) == driver._count_parameters(compiled.asm["ptx"])
    assert found.count(MAP_BYTES) == 1


INT, POINTER = ctypes.c_int, ctypes.c_void_p
POINTERS = ctypes.POINTER(POINTER)


class Driver:
    """Reads what it is given as the CUDA driver would."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.launches, self.results = sizes, [], []
        self.n_errors, self.encoded, self.attributes = 0, [], []
        self.current = threading.local()
        self.rest = bytes(range(MAP_BYTES - 8))
        self.while_launching: Any = None
        of_config = ctypes.POINTER(driver._Config)
        function = ctypes.CFUNCTYPE
        self.cuLaunchKernelEx = function(INT, of_config, POINTER, POINTERS, POINTER)(self.launch)
        self.cuCtxGetCurrent = function(INT, POINTERS)(self.get_context)
        self.cuDevicePrimaryCtxRetain = function(INT, POINTERS, INT)(self.retain_context)
        self.cuCtxSetCurrent = function(INT, POINTER)(self.set_context)
        of_text = ctypes.POINTER(ctypes.c_char_p)
        self.cuGetErrorString = function(INT, INT, of_text)(self.get_error_string)

    def cuFuncGetParamInfo(self, function: Any, i: int, offset: Any, size: Any) -> int:
        if i >= len(self.sizes):
            self.n_errors += 1
            return 1
        size._obj.value = self.sizes[i]
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((function.value, attribute, value))
        return 0

    def cuTensorMapEncodeTiled(self, address: Any, *rest: Any) -> int:
        assert getattr(self.current, "context", None) is not None
        assert address.value % driver.MAP_ALIGNMENT == 0
        self.encoded.append(base := rest[2].value)
        ctypes.memmove(address.value, self.encode_map(base, self.rest), MAP_BYTES)
        return 0

    @staticmethod
    def encode_map(base: int, rest: bytes) -> bytes:
        return base.to_bytes(8, "little") + rest

    def launch(self, config: Any, function: int, parameters: Any, extra: None) -> int:
        if self.while_launching is not None:
            # In place of another thread.
            other, self.while_launching = self.while_launching, None
            other()
        result = self.results.pop() if self.results else 0
        if getattr(self.current, "context", None) is None:
            result = 201
        if result:
            self.n_errors += 1
            return result
        places = enumerate(self.sizes)
        read = [ctypes.string_at(parameters[i], size) for i, size in places]
        self.launches.append((driver._Config.from_buffer_copy(config.contents), read))
        return 0

    def retain_context(self, context: Any, device: int) -> int:
        assert device == 0
        context[0] = 77
        return 0

    def get_context(self, context: Any) -> int:
        context[0] = getattr(self.current, "context", None)
        return 0

    def set_context(self, context: int) -> int:
        self.current.context = context
        return 0

    def get_error_string(self, result: int, text: Any) -> int:
        text[0] = b"out of luck"
        return 0


@pytest.fixture
def fake(monkeypatch) -> Driver:
    # [map, its 2 sizes, its 2 strides, an address, i32, fp32, two addresses]
    fake = Driver([MAP_BYTES, 4, 4, 8, 8, 8, 4, 4, 8, 8])
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def handle(compiled: Any, **metadata: Any) -> Any:
    """A compiled kernel as it is once loaded."""
    values = compiled.metadata._asdict() | metadata
    return SimpleNamespace(
        function=42,
        packed_metadata=None,
        src=compiled.src,
        asm=compiled.asm,
        metadata=SimpleNamespace(**values),
    )


def words(read: list[bytes]) -> list[int]:
    return [int.from_bytes(x[:8], "little") for x in read]


def start(launch: Any, stream: int, addresses: tuple[int, ...], base: int) -> None:
    """A launch with one tensor map."""
    launch(stream, base, *addresses)


def test_a_launch_hands_over_addresses_and_numbers(compiled, fake):
    launch = launcher_of(handle(compiled, launch_pdl=True, shared=1024), GRID, ARGUMENTS)
    assert not isinstance(launch, ByTriton)
    assert not fake.n_errors, "a sanitizer would report them"
    # It has shared memory, and the kernel before it may still have some.
    assert fake.attributes == [(42, 9, 100)]
    for turn in range(3):
        # The second pointer was None and is no parameter.
        start(launch, 9 + turn, (1000 + turn,), 4000 + turn)
    assert len(fake.launches) == 3
    for turn, (config, read) in enumerate(fake.launches):
        assert tuple(config.grid) == GRID
        assert tuple(config.block) == (128, 1, 1)
        assert config.n_attributes == 1
        base, *sizes_and_strides, pointer, number, _, scratch, profile = words(read)
        assert base == 4000 + turn
        assert sizes_and_strides == [64, 64, 64, 1]
        assert (pointer, number, scratch, profile) == (1000 + turn, 7, 0, 0)
        assert ctypes.c_float.from_buffer_copy(read[7]).value == 0.25
        assert config.stream == 9 + turn


def test_a_kernel_that_wants_scratch_memory_gets_it(compiled, fake):
    launch = launcher_of(handle(compiled, global_scratch_size=128), GRID, ARGUMENTS)
    start(launch, 9, (1000, 3000), 4000)
    *_, scratch, profile = words(fake.launches[0][1])
    assert (scratch, profile) == (3000, 0)


def test_maps_are_encoded_as_triton_does(monkeypatch):
    """The arguments of cuTensorMapEncodeTiled behind the address of the map."""
    given = []
    encoder = SimpleNamespace(cuTensorMapEncodeTiled=lambda *rest: given.append(rest) or 0)
    monkeypatch.setattr(driver, "library", lambda: encoder)
    matrix = {"elem_size": 2, "elem_type": 10, "block_size": [64, 32], "swizzle": 3}
    vector = {"elem_size": 4, "elem_type": 7, "block_size": [128], "swizzle": 0}
    TensorMap(matrix, [100, 72], [80, 1])._encode(4096)
    TensorMap(vector, [640], [1])._encode(8192)
    read = [[list(x) if isinstance(x, ctypes.Array) else x for x in rest[1:]] for rest in given]
    kind, rank, base, *rest = read[0]
    assert (kind, rank, base.value) == (9, 2, 4096)
    assert rest == [[72, 100], [160], [32, 64], [1, 1], 0, 3, 2, 0]
    kind, rank, base, *rest = read[1]
    assert (kind, rank, base.value) == (7, 1, 8192)
    assert rest == [[640], [2560], [128], [1], 0, 0, 2, 0]


def test_maps_are_not_encoded_at_a_launch(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    fake.encoded.clear()
    for base in (4000, 5000, 1 << 46):
        start(launch, 9, (1,), base)
    assert not fake.encoded
    assert [read[0] for _, read in fake.launches] == [
        base.to_bytes(8, "little") + fake.rest for base in (4000, 5000, 1 << 46)
    ]


@pytest.mark.parametrize(
    "encode",
    [
        lambda base, rest: rest[:8] + base.to_bytes(8, "little") + rest[8:],
        lambda base, rest: base.to_bytes(8, "little") + rest[:-8] + base.to_bytes(8, "little"),
        lambda base, rest: (base >> 4).to_bytes(8, "little") + rest,
    ],
    ids=["elsewhere", "twice", "in other units"],
)
def test_maps_that_are_encoded_in_another_way_are_left_to_triton(compiled, fake, encode):
    fake.encode_map = encode
    assert isinstance(launcher_of(handle(compiled), GRID, ARGUMENTS), ByTriton)


def test_maps_that_the_driver_refuses_are_left_to_triton(compiled, fake):
    fake.cuTensorMapEncodeTiled = lambda *_: 1
    assert isinstance(launcher_of(handle(compiled), GRID, ARGUMENTS), ByTriton)


def test_launches_at_the_same_time_have_memory_of_their_own(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    fake.while_launching = partial(start, launch, 1, (10,), 40)
    start(launch, 2, (11,), 41)
    assert [words(read)[5] for _, read in fake.launches] == [10, 11]
    assert [words(read)[0] for _, read in fake.launches] == [40, 41]
    assert [config.stream for config, _ in fake.launches] == [1, 2]


@pytest.mark.parametrize("addresses", [(), (1,), (1, 2, 3), (1, "2"), (-1, 2), (1, 1 << 64)])
def test_addresses_that_are_none_raise(compiled, fake, addresses):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    with pytest.raises((TypeError, OverflowError)):
        launch(9, *addresses)
    assert not fake.launches


def test_a_thread_without_a_context_gets_one(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    for n in (1, 2, 3):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(start, launch, 0, (1,), 4).result()
        assert len(fake.launches) == n
    assert not fake.n_errors, "a sanitizer would report them"


def test_launches_through_triton_have_a_context(fake):
    """Triton encodes tensor maps before it looks for one."""
    contexts = []

    class Kernel(SimpleNamespace):
        __hash__ = object.__hash__

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **options: contexts.append(fake.current.context)

    kernel = Kernel(
        __name__="toy", arg_names=("x_ptr",), params=(), hash="toy", is_gluon=lambda: False
    )
    launch = Launch(kernel, GRID, {})
    with ThreadPoolExecutor(1) as thread:
        thread.submit(launch.run, (torch.zeros(1),), 0).result()
    assert contexts == [77]


def test_a_context_that_was_left_is_entered_again(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    start(launch, 0, (1,), 4)
    fake.current.context = None
    start(launch, 0, (1,), 4)
    assert fake.current.context == 77
    assert len(fake.launches) == 2


def test_another_context_stays(compiled, fake):
    fake.current.context = 5
    start(launcher_of(handle(compiled), GRID, ARGUMENTS), 0, (1,), 4)
    assert fake.current.context == 5


def test_an_error_of_the_driver_is_raised(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    fake.results = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700: out of luck"):
        start(launch, 0, (1,), 4)


@pytest.mark.parametrize(
    "why",
    [
        *("fewer in the code", "more in the code", "sizes differ", "fewer in the driver"),
        *("no code", "cooperative", "clusters", "no driver", "no compiler"),
    ],
)
def test_what_the_driver_does_not_agree_with_goes_triton_s_way(compiled, fake, monkeypatch, why):
    kernel = handle(compiled)
    ptx = compiled.asm["ptx"]
    last = re.search(r",\s*\.param [^,]*?(?=\s*\))", ptx)[0]
    if why == "fewer in the code":
        kernel.asm = {"ptx": ptx.replace(last, "", 1)}
    elif why == "more in the code":
        kernel.asm = {"ptx": ptx.replace(last, last + last, 1)}
        fake.sizes.append(8)
    elif why == "sizes differ":
        fake.sizes[6] = 8
    elif why == "fewer in the driver":
        fake.sizes.pop()
    elif why == "no code":
        kernel.asm = {}
    elif why == "no driver":
        monkeypatch.setattr(driver, "library", lambda: None)
    elif why == "no compiler":
        monkeypatch.setattr(driver, "find_launch", lambda: None)
    else:
        changed = {"cooperative": "launch_cooperative_grid", "clusters": "num_ctas"}[why]
        kernel = handle(compiled, **{changed: 2})
    launched = []
    kernel.run = lambda *arguments: launched.append(arguments)
    tensor = torch.zeros(1)
    seen = weakref.ref(tensor)
    launch = launcher_of(kernel, GRID, (ARGUMENTS[0], tensor, *ARGUMENTS[2:]))
    del tensor
    assert seen() is None, "the tensors of the first launch are kept"
    assert isinstance(launch, ByTriton)
    start(launch, 9, (1000,), 4000)
    *head, tensor_map, pointer, absent, number, real, constant = launched[0]
    assert head == [*GRID, 9, 42, None, None, None, None]
    assert tensor_map.base.data_ptr() == 4000
    assert (pointer, absent, number, real, constant) == (1000, None, 7, 0.25, 3)
