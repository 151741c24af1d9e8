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
from kernel_calls import forget_calls

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import compile_for_hopper
from toy_kernel import ARGUMENTS, toy

import lockstep
from lockstep.cache import Cache
from lockstep.kernels import driver
from lockstep.kernels.driver import MAP_BYTES, ByDriver, TensorMap, launcher_of, parameters_of

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


class Driver:
    """Reads what it is given as the CUDA driver would."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.launches, self.results = sizes, [], []
        self.n_errors, self.encoded, self.attributes = 0, [], []
        self.current = threading.local()

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
        self.encoded.append(base := rest[2].value)
        ctypes.memmove(address.value, base.to_bytes(8, "little"), 8)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        result = self.results.pop() if self.results else 0
        if getattr(self.current, "context", None) is None:
            result = 201
        if result:
            self.n_errors += 1
            return result
        read = [ctypes.string_at(at, size) for at, size in zip(parameters, self.sizes, strict=True)]
        self.launches.append((config._obj, read))
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 77
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = getattr(self.current, "context", None)
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current.context = context.value
        return 0

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"out of luck"
        return 0


@pytest.fixture
def fake(monkeypatch) -> Driver:
    # [map, its 2 sizes, its 2 strides, an address, i32, fp32, two addresses]
    fake = Driver([MAP_BYTES, 4, 4, 8, 8, 8, 4, 4, 8, 8])
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "_THREAD", driver._Thread())
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


def test_a_launch_hands_over_addresses_and_numbers(compiled, fake):
    launch = launcher_of(handle(compiled, launch_pdl=True, shared=1024), GRID, ARGUMENTS)
    assert isinstance(launch, ByDriver)
    assert not fake.n_errors, "a sanitizer would report them"
    # It has shared memory, and the kernel before it may still have some.
    assert fake.attributes == [(42, 9, 100)]
    for turn in range(3):
        # The second pointer was None and is no parameter.
        launch(9 + turn, (1000 + turn,), (4000 + turn,))
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
    # One frame did for all: the last launch's stream stands in it.
    assert {id(config) for config, _ in fake.launches} == {id(fake.launches[0][0])}
    assert config.stream == 11


def test_a_kernel_that_wants_scratch_memory_gets_it(compiled, fake):
    launch = launcher_of(handle(compiled, global_scratch_size=128), GRID, ARGUMENTS)
    launch(9, (1000, 3000), (4000,))
    *_, scratch, profile = words(fake.launches[0][1])
    assert (scratch, profile) == (3000, 0)


def test_maps_are_encoded_as_triton_does(monkeypatch):
    """The arguments of cuTensorMapEncodeTiled behind the address of the map."""
    given = []
    encoder = SimpleNamespace(cuTensorMapEncodeTiled=lambda *rest: given.append(rest) or 0)
    monkeypatch.setattr(driver, "library", lambda: encoder)
    matrix = {"elem_size": 2, "elem_type": 10, "block_size": [64, 32], "swizzle": 3}
    vector = {"elem_size": 4, "elem_type": 7, "block_size": [128], "swizzle": 0}
    TensorMap(matrix, [100, 72], [80, 1]).at(4096)
    TensorMap(vector, [640], [1]).at(8192)
    read = [[list(x) if isinstance(x, ctypes.Array) else x for x in rest[1:]] for rest in given]
    kind, rank, base, *rest = read[0]
    assert (kind, rank, base.value) == (9, 2, 4096)
    assert rest == [[72, 100], [160], [32, 64], [1, 1], 0, 3, 2, 0]
    kind, rank, base, *rest = read[1]
    assert (kind, rank, base.value) == (7, 1, 8192)
    assert rest == [[640], [2560], [128], [1], 0, 0, 2, 0]


def test_a_map_is_encoded_once_for_an_address(compiled, fake, monkeypatch):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    for base in (4000, 5000, 4000, 5000):
        launch(9, (1,), (base,))
    assert fake.encoded == [4000, 5000]
    # Who has forgotten how the maps of a launch lay still knows each one.
    monkeypatch.setattr(driver, "_ENCODED", Cache(limit=10))
    launch(9, (1,), (5000,))
    assert fake.encoded == [4000, 5000]
    assert [words(read)[0] for _, read in fake.launches] == [4000, 5000, 4000, 5000, 5000]


def test_launches_at_the_same_time_have_frames_of_their_own(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    inner = fake.cuLaunchKernelEx

    def while_another_thread_launches(*arguments: Any) -> int:
        launch._launch = inner
        launch(1, (10,), (40,))
        return inner(*arguments)

    launch._launch = while_another_thread_launches
    launch(2, (11,), (41,))
    assert [words(read)[5] for _, read in fake.launches] == [10, 11]
    assert [words(read)[0] for _, read in fake.launches] == [40, 41]


def test_a_thread_without_a_context_gets_one(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    for n in (1, 2, 3):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch, 0, (1,), (4,)).result()
        assert len(fake.launches) == n
    assert not fake.n_errors, "a sanitizer would report them"


def test_a_context_that_somebody_left_is_entered_again(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    launch(0, (1,), (4,))
    fake.current.context = None
    launch(0, (1,), (4,))
    assert fake.current.context == 77
    assert len(fake.launches) == 2


def test_a_context_of_somebody_else_stays(compiled, fake):
    fake.current.context = 5
    launcher_of(handle(compiled), GRID, ARGUMENTS)(0, (1,), (4,))
    assert fake.current.context == 5


def test_an_error_of_the_driver_is_raised(compiled, fake):
    launch = launcher_of(handle(compiled), GRID, ARGUMENTS)
    fake.results = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700: out of luck"):
        launch(0, (1,), (4,))


@pytest.mark.parametrize(
    "why",
    [
        *("fewer in the code", "more in the code", "sizes differ", "fewer in the driver"),
        *("no code", "cooperative", "clusters", "no driver"),
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
    assert not isinstance(launch, ByDriver)
    launch(9, (1000,), (4000,))
    *head, tensor_map, pointer, absent, number, real, constant = launched[0]
    assert head == [*GRID, 9, 42, None, None, None, None]
    assert tensor_map.base.data_ptr() == 4000
    assert (pointer, absent, number, real, constant) == (1000, None, 7, 0.25, 3)


def calls() -> dict[str, Any]:
    """Of each kernel, with tensors that are copied and tensors that are not."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    odd = torch.randn(v.numel() + 3, device="cuda").to(v.dtype)[3:].view_as(v)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    page_table = torch.randperm(32, device="cuda").int().view(2, 16)
    kv_lens = torch.tensor([1900, 77], dtype=torch.int32, device="cuda")
    pages = torch.randn(2, 32, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
    options = {"causal": True, "return_lse": True}
    found = {
        "paged": lambda: lockstep.attention_paged(q, *pages, page_table, kv_lens, **options),
        "decode": lambda: lockstep.attention_paged(
            q[:, :, :1], *pages, page_table, kv_lens, **options
        ),
    }
    for kernel in ("triton", "hopper"):
        given = {**options, "kernel": kernel}
        found |= {
            f"{kernel}, dense": partial(lockstep.attention, q, k, v, **given),
            f"{kernel}, odd": partial(lockstep.attention, q, k, odd, **given),
            f"{kernel}, varlen": partial(
                lockstep.attention_varlen, *packed, cu_seqlens, cu_seqlens, **given
            ),
        }
    return found


def in_a_thread(call: Any) -> Any:
    """Of four new ones, which launch at once."""
    with ThreadPoolExecutor(4) as threads:
        results = [x.result() for x in [threads.submit(call) for _ in range(40)]]
    torch.cuda.synchronize()
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


def on_a_stream(call: Any) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = call()
    stream.synchronize()
    return results


def in_a_graph(call: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name",
    [
        "paged",
        "decode",
        "triton, dense",
        "triton, odd",
        "triton, varlen",
        "hopper, dense",
        "hopper, odd",
        "hopper, varlen",
    ],
)
def test_later_launches_give_the_bits_of_the_first(name, monkeypatch):
    """The first goes through Triton."""
    if name.startswith("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    by_driver = []
    launch = ByDriver.__call__
    monkeypatch.setattr(
        ByDriver, "__call__", lambda *given: (by_driver.append(given), launch(*given))
    )
    forget_calls(monkeypatch)
    call = calls()[name]
    first = call()
    for how in (lambda call: call(), in_a_thread, on_a_stream, in_a_graph):
        assert all(map(torch.equal, how(call), first))
    assert by_driver
