# pyright: reportMissingImports=false, reportIndexIssue=false
"""The Triton kernels of the elementwise passes: what one program does to its part of one matrix.

Owns the arithmetic on the device, that of passes.py and of the scaling in wire.py. A matrix is a
line of a table of four int64 addresses (gradient, momentum, weight, gate); how many programs there
are and what they are given is passes_triton.py's.
"""

import triton
import triton.language as tl


@triton.jit
def _address(table_ptr, matrix, COLUMN: tl.constexpr):
    return tl.load(table_ptr + matrix * 4 + COLUMN)


@triton.jit
def _matrix_ptr(table_ptr, matrix, COLUMN: tl.constexpr):
    pointer = _address(table_ptr, matrix, COLUMN).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _is_open(table_ptr, matrix):
    """A matrix without a gate is open."""
    address = _address(table_ptr, matrix, 3)
    flag = tl.load(address.to(tl.pointer_type(tl.int8)), mask=address != 0, other=1)
    return flag != 0


@triton.jit
def _has_gradient(table_ptr, matrix):
    """A gradient behind a shut gate may hold nan and inf: it counts as zeros, like one not there.

    Directions stay finite then, for products that apply an update of factor 0.
    """
    return (_address(table_ptr, matrix, 0) != 0) & _is_open(table_ptr, matrix)


@triton.jit
def _power_of_two(exponent):
    """Of an int32 in [-126, 127], fp32, exact."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def momentum_kernel(
    table_ptr,
    kept_ptr,
    num_elements,
    mu,
    num_parts,
    NESTEROV: tl.constexpr,
    OF_SQUARES: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """M <- mu * m + g; keep each part's sum of squares, or largest magnitude, of the direction."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    m_ptr = _matrix_ptr(table_ptr, matrix, 1)
    g_ptr = _matrix_ptr(table_ptr, matrix, 0)
    has_gradient, is_open = _has_gradient(table_ptr, matrix), _is_open(table_ptr, matrix)
    total = tl.zeros((TILE,), dtype=tl.float64 if OF_SQUARES else tl.float32)
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        m = tl.load(m_ptr + offsets, mask=inside, other=0.0)
        g = tl.load(g_ptr + offsets, mask=inside & has_gradient, other=0.0)
        m = tl.where(is_open, m * mu + g, m)
        tl.store(m_ptr + offsets, m, mask=inside & is_open)
        u = m * mu + g if NESTEROV else m
        if OF_SQUARES:
            wide = u.to(tl.float64)
            total += wide * wide
        else:
            total = tl.maximum(total, tl.abs(u))
    if OF_SQUARES:
        tl.store(kept_ptr + work, tl.sum(total, axis=0))
    else:
        tl.store(kept_ptr + work, tl.max(total, axis=0).to(tl.float64))


@triton.jit
def _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV: tl.constexpr):
    m = tl.load(_matrix_ptr(table_ptr, matrix, 1) + offsets, mask=inside, other=0.0)
    if NESTEROV:
        g_ptr = _matrix_ptr(table_ptr, matrix, 0)
        g = tl.load(g_ptr + offsets, mask=inside & _has_gradient(table_ptr, matrix), other=0.0)
        m = m * mu + g
    return m


@triton.jit
def normalize_kernel(
    table_ptr,
    kept_ptr,
    out_ptr,
    num_elements,
    mu,
    num_parts,
    MAX_PARTS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write directions divided by their Frobenius norm; a norm of zero divides by one."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    parts = tl.arange(0, MAX_PARTS)
    total = tl.sum(
        tl.load(kept_ptr + matrix * num_parts + parts, mask=parts < num_parts, other=0.0),
        axis=0,
    )
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    # The inverse may leave fp32's range, and an fp64 product an element would bound the pass: a
    # power of two in its range, exact, then the rest.
    bits = inverse.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1023
    shift = tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    rest = mantissa.to(tl.float32) * _power_of_two(exponent - shift)
    y_ptr = out_ptr + matrix * num_elements
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        u = _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV)
        y = (u * _power_of_two(shift)) * rest
        tl.store(y_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def message_kernel(
    table_ptr,
    kept_ptr,
    out_ptr,
    num_elements,
    row_stride,
    mu,
    num_parts,
    MAX_PARTS: tl.constexpr,
    TAIL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ZERO_EXPONENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write directions divided by 2**e, the largest in [0.5, 1), and e behind them."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    parts = tl.arange(0, MAX_PARTS)
    largest = tl.max(
        tl.load(kept_ptr + matrix * num_parts + parts, mask=parts < num_parts, other=0.0),
        axis=0,
    )
    # Every fp32 is a normal fp64, whose exponent bits are frexp's exponent less one.
    bits = largest.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1022
    exponent = tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    factor = _power_of_two(-exponent)
    y_ptr = out_ptr + matrix * row_stride
    for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
        offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
        inside = offsets < num_elements
        u = _direction(table_ptr, matrix, offsets, inside, mu, NESTEROV)
        tl.store(y_ptr + offsets, (u * factor).to(out_ptr.dtype.element_ty), mask=inside)
    if part == 0:
        ends = num_elements + tl.arange(0, TAIL)
        sent = tl.where(largest == 0.0, ZERO_EXPONENT, exponent)
        sent = sent.to(tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(y_ptr + ends, tl.zeros((TAIL,), out_ptr.dtype.element_ty) + sent)


@triton.jit
def update_kernel(
    table_ptr,
    update_ptr,
    num_elements,
    kept,
    step_size,
    num_parts,
    STAGES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """W <- w * kept - step_size * O."""
    work = tl.program_id(0)
    matrix, part = (work // num_parts).to(tl.int64), work % num_parts
    if _is_open(table_ptr, matrix):
        w_ptr = _matrix_ptr(table_ptr, matrix, 2)
        o_ptr = update_ptr + matrix * num_elements
        for block in tl.range(NUM_BLOCKS, num_stages=STAGES):
            offsets = (part * NUM_BLOCKS + block) * TILE + tl.arange(0, TILE)
            inside = offsets < num_elements
            update = tl.load(o_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + offsets, mask=inside, other=0.0)
            tl.store(w_ptr + offsets, w * kept - step_size * update, mask=inside)
