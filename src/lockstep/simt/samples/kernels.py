"""Small kernels that each use one corner of the language."""

from __future__ import annotations

from lockstep.simt.kernel import device, kernel
from lockstep.simt.language import Constant, ct, cuda, phase, wmma
from lockstep.simt.types import bfloat16, float16, float32, int32, uint32

FULL = 0xFFFFFFFF
TILE = 32
ROWS = 8  # of a tile that the threads of a block move at a time
THREADS = 256


@kernel
def strided_copy(x: float32[:], y: float32[:], n: int32, STRIDE: Constant):
    """y[i] = x[i * STRIDE]."""
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i * STRIDE]


@kernel
def shifted_copy(x: float32[:], y: float32[:], n: int32, SHIFT: Constant):
    """Reads start SHIFT elements after a sector boundary."""
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i + SHIFT]


@kernel
def vector_copy(x: float32[:], y: float32[:], n: int32):
    """Four floats per thread and instruction."""
    i = 4 * cuda.grid(1)
    if i < n:
        v = cuda.vload(x, i, 4)
        cuda.vstore(y, i, cuda.vec(v.w, v.z, v.y, v.x))


@kernel
def half_vector_scale(x: float16[:], y: float16[:], factor: float32):
    """Eight 16-bit floats per thread; arithmetic in float32."""
    i = 8 * cuda.grid(1)
    v = cuda.vload(x, i, 8)
    scaled = cuda.vec(
        float16(v[0] * factor),
        float16(v[1] * factor),
        float16(v[2] * factor),
        float16(v[3] * factor),
        float16(v[4] * factor),
        float16(v[5] * factor),
        float16(v[6] * factor),
        float16(v[7] * factor),
    )
    cuda.vstore(y, i, scaled)


@kernel
def transpose_naive(x: float32[:, :], y: float32[:, :]):
    """Reads along rows, writes along columns: 32 sectors per write."""
    col = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    row = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    for r in range(0, TILE, ROWS):
        y[col, row + r] = x[row + r, col]


@kernel
def transpose(x: float32[:, :], y: float32[:, :], PAD: Constant):
    """Through a shared tile; one column of padding keeps its columns in different banks."""
    tile = cuda.shared.array((TILE, TILE + PAD), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    with phase("read"):
        col = cuda.blockIdx.x * TILE + tx
        row = cuda.blockIdx.y * TILE + ty
        for r in range(0, TILE, ROWS):
            tile[ty + r, tx] = x[row + r, col]
    # a thread writes what other threads have read
    cuda.syncthreads()
    with phase("write"):
        col = cuda.blockIdx.y * TILE + tx
        row = cuda.blockIdx.x * TILE + ty
        for r in range(0, TILE, ROWS):
            y[row + r, col] = tile[tx, ty + r]


@kernel
def tree_sum(x: float32[:], partial: float32[:], NEIGHBOURS: Constant):
    """One sum per block, by halving. NEIGHBOURS adds pairs side by side: divergent, conflicting."""
    sums = cuda.shared.array(THREADS, float32)
    tid = cuda.threadIdx.x
    sums[tid] = x[cuda.blockIdx.x * THREADS + tid]
    cuda.syncthreads()
    if NEIGHBOURS:
        step = 1
        while step < THREADS:
            i = 2 * step * tid
            if i < THREADS:
                sums[i] += sums[i + step]
            cuda.syncthreads()
            step *= 2
    else:
        step = THREADS // 2
        while step > 0:
            if tid < step:
                sums[tid] += sums[tid + step]
            cuda.syncthreads()
            step //= 2
    if tid == 0:
        partial[cuda.blockIdx.x] = sums[0]


@device
def warp_sum(value):
    """The sum over the warp, in every lane."""
    for hop in range(5):
        value += cuda.shfl_xor_sync(FULL, value, 16 >> hop)
    return value


@kernel
def shuffle_sum(x: float32[:], sums: float32[:], scan: float32[:]):
    """Warp sums by butterfly, an inclusive scan by shifting up, then a broadcast of lane 31."""
    i = cuda.grid(1)
    lane = cuda.threadIdx.x % 32
    value = x[i]
    total = warp_sum(value)
    if lane == 0:
        sums[i // 32] = total
    running = value
    hop = 1
    while hop < 32:
        below = cuda.shfl_up_sync(FULL, running, hop)
        if lane >= hop:
            running += below
        hop *= 2
    last = cuda.shfl_sync(FULL, running, 31)
    after = cuda.shfl_down_sync(FULL, running, 1)
    scan[i] = running - last + after


@kernel
def votes(x: int32[:], out: uint32[:], counts: int32[:]):
    """Ballots, and the rank of a thread among those of its warp that voted alike."""
    i = cuda.grid(1)
    lane = cuda.threadIdx.x % 32
    odd = x[i] % 2 == 1
    voted = cuda.ballot_sync(FULL, odd)
    if cuda.any_sync(FULL, x[i] > 900):
        voted ^= cuda.bitcast(lane, uint32)
    if cuda.all_sync(FULL, x[i] > 5):
        voted |= uint32(0x80000000)
    below = (uint32(1) << uint32(lane)) - uint32(1)
    out[i] = voted
    counts[i] = cuda.popc(voted & below)


@kernel
def collatz(start: int32[:], steps: int32[:]):
    """Loops of different lengths in one warp, with branches inside."""
    i = cuda.grid(1)
    n = start[i]
    count = 0
    while n != 1:
        if n % 2 == 0:
            n //= 2
        elif n > 100000:
            n = -1
        else:
            n = 3 * n + 1
        if n < 0:
            break
        count += 1
    steps[i] = count


@kernel
def histogram(x: int32[:], bins: int32[:], n: int32, BINS: Constant):
    """Counts in shared memory, then one global atomic per bin and block."""
    local = cuda.shared.array(BINS, int32)
    tid = cuda.threadIdx.x
    for b in range(tid, BINS, cuda.blockDim.x):
        local[b] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        cuda.atomic.add(local, x[i] % BINS, 1)
    cuda.syncthreads()
    for b in range(tid, BINS, cuda.blockDim.x):
        cuda.atomic.add(bins, b, local[b])


@kernel
def arithmetic(x: float32[:], k: int32[:], out: float32[:], bits: int32[:]):
    """Casts, floor division of negative numbers, shifts, bit casts, rounding, fma."""
    i = cuda.grid(1)
    a = x[i]
    n = k[i]
    whole = int32(a * 100.0)
    mixed = n // 7 + n % 7 - (n >> 3) + (n << 2)
    u = cuda.bitcast(a, uint32)
    folded = u ^ (u >> uint32(13))
    bits[i] = cuda.bitcast(folded, int32) + mixed + whole + cuda.clz(n) + cuda.ffs(n) + cuda.brev(n)
    y = cuda.fma(a, 3.0, -1.5) / (1.0 + abs(a))
    y = max(min(y, 4.0), cuda.floor(a)) + cuda.sqrt(abs(a))
    out[i] = y if n > 0 else float32(bfloat16(y)) - float32(float16(a))


@kernel
def oblivious_max(x: float32[:, :], out: float32[:], where: int32[:]):
    """Row maximum and its place without a branch on the values."""
    row = cuda.grid(1)
    best = x[row, 0]
    place = 0
    for col in range(1, x.shape[1]):
        value = x[row, col]
        larger = value > best
        best = ct.select(larger, value, best)
        place = ct.select(larger, col, place)
    out[row] = best
    where[row] = place


@kernel
def local_sort(x: int32[:], y: int32[:]):
    """Each thread sorts four numbers in registers."""
    i = 4 * cuda.grid(1)
    v = cuda.local.array(4, int32)
    for j in range(4):
        v[j] = x[i + j]
    for done in range(3):
        for j in range(3 - done):
            low = min(v[j], v[j + 1])
            v[j + 1] = max(v[j], v[j + 1])
            v[j] = low
    for j in range(4):
        y[i + j] = v[j]


@kernel
def matmul(a, b, c: float32[:, :], K: Constant, DTYPE: Constant):
    """c = a @ b, one 32x32 tile per block of four warps, operands staged in shared memory."""
    a_tile = cuda.shared.array((TILE, 16), DTYPE)
    b_tile = cuda.shared.array((16, TILE), DTYPE)
    tid = cuda.threadIdx.x
    warp = tid // 32
    row = 16 * (warp // 2)  # of this warp's 16x16 part
    col = 16 * (warp % 2)
    first_row = TILE * cuda.blockIdx.y
    first_col = TILE * cuda.blockIdx.x
    acc = wmma.fill(0.0)
    for k in range(0, K, 16):
        with phase("stage"):
            for i in range(tid, TILE * 16, 128):
                a_tile[i // 16, i % 16] = a[first_row + i // 16, k + i % 16]
                b_tile[i // TILE, i % TILE] = b[k + i // TILE, first_col + i % TILE]
            cuda.syncthreads()
        with phase("multiply"):
            left = wmma.load_a(a_tile, (row, 0))
            right = wmma.load_b(b_tile, (0, col))
            acc = wmma.mma_sync(left, right, acc)
            # the tiles are overwritten next
            cuda.syncthreads()
    acc = acc * 0.5 + 1.0
    wmma.store(c, (first_row + row, first_col + col), acc, ld=c.shape[1])


@kernel
def async_copy(x: float32[:], y: float32[:], WIDTH: Constant, STRIDE: Constant):
    """Each thread copies WIDTH floats; what other threads copied is read. STRIDE spreads them."""
    tile = cuda.shared.array(THREADS * STRIDE, float32)
    tid = cuda.threadIdx.x
    first = cuda.blockIdx.x * THREADS * WIDTH
    cuda.memcpy_async(tile, tid * STRIDE, x, first + tid * WIDTH, WIDTH)
    cuda.pipeline_commit()
    cuda.pipeline_wait_prior(0)
    cuda.syncthreads()
    for j in range(WIDTH):
        i = j * THREADS + tid
        y[first + i] = tile[i // WIDTH * STRIDE + i % WIDTH]


@kernel
def pipeline_sum(x: float32[:, :], out: float32[:], n: int32):
    """Column sums; while one row of 1024 floats is added, the next is on its way."""
    rows = cuda.shared.array((2, 4 * THREADS), float32)
    tid = cuda.threadIdx.x
    first = 4 * THREADS * cuda.blockIdx.x
    cuda.memcpy_async(rows, (0, 4 * tid), x, (0, first + 4 * tid), 4)
    cuda.pipeline_commit()
    total = 0.0
    for row in range(n):
        # the last round copies its own row once more, so that the copy needs no condition
        ahead = min(row + 1, n - 1)
        cuda.memcpy_async(rows, ((row + 1) % 2, 4 * tid), x, (ahead, first + 4 * tid), 4)
        cuda.pipeline_commit()
        cuda.pipeline_wait_prior(1)
        cuda.syncthreads()
        # strided by the block, so that other threads' copies are read as well
        for part in range(4):
            total += rows[row % 2, part * THREADS + tid]
        cuda.syncthreads()
    out[cuda.blockIdx.x * THREADS + tid] = total


@kernel
def softmax(x: float32[:, :], y: float32[:, :], COLS: Constant):
    """One warp per row."""
    row = cuda.blockIdx.x
    lane = cuda.threadIdx.x
    m = x[row, lane]
    for col in range(lane + 32, COLS, 32):
        m = max(m, x[row, col])
    for hop in range(5):
        m = max(m, cuda.shfl_xor_sync(FULL, m, 16 >> hop))
    l = 0.0
    for col in range(lane, COLS, 32):
        l += cuda.exp(x[row, col] - m)
    l = warp_sum(l)
    for col in range(lane, COLS, 32):
        y[row, col] = cuda.exp(x[row, col] - m) / l


@kernel
def reverse_dynamic(x: int32[:], y: int32[:], n: int32):
    """Reverses n numbers through dynamic shared memory, which may be all that a block can have."""
    buffer = cuda.shared.array(0, int32)
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        buffer[i] = x[cuda.blockIdx.x * n + i]
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        y[cuda.blockIdx.x * n + i] = buffer[n - 1 - i]
