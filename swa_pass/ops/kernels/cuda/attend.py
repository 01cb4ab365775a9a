"""Attention over a ring or linear store and the new tokens, as Triton kernels.

One program works for one kv head of one row: it takes a block of queries, all query heads of the group with them (so
keys and values are read once), and a part of their keys (a split). Its rows are (query, head) pairs:

    group 2, three queries       row   0   1   2   3   4   5
                                query  0   0   1   1   2   2
                                 head  a   b   a   b   a   b

Keys are walked by position, the store's first and then the new ones; a position becomes a slot only where it is loaded,
so the ring is read in place and nothing is ordered. Splits of the same queries are merged by their running maximum and
sum (online softmax, Milakov & Gimelshein 2018; split-K decoding as in Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite, so that differences are never NaN


@triton.jit
def _widened(data, factor, kind, FP8: tl.constexpr):
    """One-byte numbers (N, D) as `kind`: int8, or the bits of a float8 e4m3, times a factor for each token (N).

    The bits by hand: float8 is no type before sm_89, and conversions may drop what is too small for a normal float.
    """
    numbers = data.to(tl.float32)
    if FP8:
        bits = data.to(tl.int32) & 0x7F
        normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        numbers = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
        numbers = tl.where(data < 0, -numbers, numbers)
    return (numbers * factor[:, None]).to(kind)


@triton.jit
def _take(q, k, v, visible, top, total, values, scale, softcap, CAPPED: tl.constexpr, FLOAT: tl.constexpr):
    """One block of keys into the running sums. q (M, D), k (N, D), v (N, DV), visible (M, N).

    FLOAT: products in float32 (Triton's interpreter multiplies bfloat16 as if it were integers).
    """
    if FLOAT:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1), right for large x of both signs
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    scores = tl.where(visible, scores * LOG2E, LOWEST)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, values


@triton.jit
def _finished(top, total, values, sinks, heads, HAS_SINKS: tl.constexpr):
    """The output rows. A sink is one more logit, without a value; a row that saw nothing is zeros."""
    saw = total > 0
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        values = values * tl.exp2(top - new_top)[:, None]
    return tl.where(saw[:, None], values / tl.where(saw, total, 1.0)[:, None], 0.0)


@triton.jit
def _slots(position, capacity, WINDOW: tl.constexpr):
    if WINDOW > 0:
        return position % capacity
    return position


@triton.jit
def _visible(key, inside, position, real, WINDOW: tl.constexpr):
    """(M, N): which of the keys (N, if `inside`) the queries at `position` (M, if `real`) see."""
    visible = inside[None, :] & real[:, None] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return visible


@triton.jit
def _write(new, new_step, store, item, index, is_new, slot, capacity, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Copies tokens `index` of one head (from `new`) to their slots."""
    d = tl.arange(0, BLOCK)[None, :]
    mask = is_new[:, None] & (d < DIM)
    token = tl.load(new + index[:, None] * new_step + d, mask=mask)
    tl.store(store + (item * capacity + slot)[:, None] * DIM + d, token, mask=mask)


@triton.jit
def _write_factors(new, scale, item, index, is_new, slot, capacity, tokens):
    factor = tl.load(new + item * tokens + index, mask=is_new)
    tl.store(scale + item * capacity + slot, factor, mask=is_new)


@triton.jit
def attend(
    q, k_new, v_new, k_store, v_store, out, part_values, part_sums,
    lengths, starts, counts, sinks, k_scale, v_scale, k_new_scale, v_new_scale,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, out_row, out_head, out_token,
    kv_heads, capacity, tokens, queries, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_SINKS: tl.constexpr, CAPPED: tl.constexpr,
    WRITE: tl.constexpr, FLOAT: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid (query blocks * SPLITS, B * KV). With SPLITS > 1 the results go to part_values, part_sums; see `merge`.

    SCALED: stores and new tokens hold one byte a number (FP8: float8), with a factor for each token."""
    block = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    item = tl.program_id(1).to(tl.int64)
    b = item // kv_heads
    h = item % kv_heads
    length = tl.load(lengths + b)
    start = tl.load(starts + b) if HAS_STARTS else 0
    count = tl.load(counts + b) if HAS_COUNTS else tokens
    skipped = tokens - queries

    row = tl.arange(0, BLOCK_M)
    query = (block * BLOCK_Q + row // GROUP).to(tl.int64)  # among the queries; offsets may need 64 bits
    head = h * GROUP + row % GROUP
    exists = (row < BLOCK_Q * GROUP) & (query < queries)
    position = length + skipped + query
    real = exists & (skipped + query < count) & (position >= start)

    d = tl.arange(0, BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    q_at = q + b * q_row + head[:, None] * q_head + query[:, None] * q_token + d
    query_rows = tl.load(q_at, mask=exists[:, None] & (d < DIM), other=0.0)

    # The keys that this block's queries see, [low, end), and this split's part of them.
    first = skipped + block * BLOCK_Q
    low = tl.maximum(start, length + first - WINDOW + 1) if WINDOW > 0 else start + length * 0
    low = tl.maximum(low, 0)
    end = length + tl.minimum(tl.minimum(first + BLOCK_Q, tokens), count)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), SPLITS), BLOCK_N) * BLOCK_N
    low = low + split * share
    end = tl.minimum(low + share, end)
    stored_end = tl.minimum(end, length)

    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    n = tl.arange(0, BLOCK_N)
    for step in range(0, (stored_end - low).to(tl.int32), BLOCK_N):
        key = low + step + n
        inside = key < stored_end
        place = item * capacity + _slots(key, capacity, WINDOW)
        slot = place[:, None]
        k = tl.load(k_store + slot * DIM + d, mask=inside[:, None] & (d < DIM), other=0)
        v = tl.load(v_store + slot * VALUE_DIM + dv, mask=inside[:, None] & (dv < VALUE_DIM), other=0)
        if SCALED:
            k = _widened(k, tl.load(k_scale + place, mask=inside, other=0.0), query_rows.dtype, FP8)
            v = _widened(v, tl.load(v_scale + place, mask=inside, other=0.0), query_rows.dtype, FP8)
        visible = _visible(key, inside, position, real, WINDOW)
        top, total, values = _take(query_rows, k, v, visible, top, total, values, scale, softcap, CAPPED, FLOAT)
    low = tl.maximum(low, length)
    for step in range(0, (end - low).to(tl.int32), BLOCK_N):
        key = low + step + n
        inside = key < end
        index = (key - length)[:, None]
        k = tl.load(k_new + b * k_row + h * k_head + index * k_token + d, mask=inside[:, None] & (d < DIM), other=0)
        v_at = v_new + b * v_row + h * v_head + index * v_token + dv
        v = tl.load(v_at, mask=inside[:, None] & (dv < VALUE_DIM), other=0)
        if SCALED:
            place = item * tokens + key - length
            k = _widened(k, tl.load(k_new_scale + place, mask=inside, other=0.0), query_rows.dtype, FP8)
            v = _widened(v, tl.load(v_new_scale + place, mask=inside, other=0.0), query_rows.dtype, FP8)
        visible = _visible(key, inside, position, real, WINDOW)
        top, total, values = _take(query_rows, k, v, visible, top, total, values, scale, softcap, CAPPED, FLOAT)

    if SPLITS == 1:
        result = _finished(top, total, values, sinks, head, HAS_SINKS)
        out_at = out + b * out_row + head[:, None] * out_head + query[:, None] * out_token + dv
        tl.store(out_at, result.to(out.dtype.element_ty), mask=exists[:, None] & (dv < VALUE_DIM))
    else:
        part = ((item * (tl.num_programs(0) // SPLITS) + block) * SPLITS + split) * BLOCK_M + row
        tl.store(part_values + part[:, None] * BLOCK_DV + dv, values)
        tl.store(part_sums + part * 2, top)
        tl.store(part_sums + part * 2 + 1, total)
    if WRITE:  # the slots of the new tokens hold nothing that any split still reads (see `launch.writes_in_place`)
        index = tl.arange(0, BLOCK_M).to(tl.int64)
        slot = _slots(length + index, capacity, WINDOW)
        is_new = (index < tokens) & (index < count) & (slot < capacity) & (split == 0)
        k_new += b * k_row + h * k_head
        v_new += b * v_row + h * v_head
        _write(k_new, k_token, k_store, item, index, is_new, slot, capacity, DIM, BLOCK_D)
        _write(v_new, v_token, v_store, item, index, is_new, slot, capacity, VALUE_DIM, BLOCK_DV)
        if SCALED:
            _write_factors(k_new_scale, k_scale, item, index, is_new, slot, capacity, tokens)
            _write_factors(v_new_scale, v_scale, item, index, is_new, slot, capacity, tokens)


@triton.jit
def merge(
    part_values, part_sums, out, sinks, out_row, out_head, out_token, kv_heads, queries,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid (query blocks, B * KV): the splits of a block of queries, one after the other."""
    block = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)[None, :]
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for split in range(SPLITS):
        part = ((item * tl.num_programs(0) + block) * SPLITS + split) * BLOCK_M + row
        part_top = tl.load(part_sums + part * 2)
        new_top = tl.maximum(top, part_top)
        shrink = tl.exp2(top - new_top)
        grow = tl.exp2(part_top - new_top)
        total = total * shrink + tl.load(part_sums + part * 2 + 1) * grow
        values = values * shrink[:, None] + tl.load(part_values + part[:, None] * BLOCK_DV + dv) * grow[:, None]
        top = new_top
    query = (block * BLOCK_Q + row // GROUP).to(tl.int64)
    head = (item % kv_heads) * GROUP + row % GROUP
    exists = (row < BLOCK_Q * GROUP) & (query < queries)
    result = _finished(top, total, values, sinks, head, HAS_SINKS)
    out_at = out + (item // kv_heads) * out_row + head[:, None] * out_head + query[:, None] * out_token + dv
    tl.store(out_at, result.to(out.dtype.element_ty), mask=exists[:, None] & (dv < VALUE_DIM))


@triton.jit
def append(
    k_new, v_new, k_store, v_store, lengths, counts, k_scale, v_scale, k_new_scale, v_new_scale,
    k_row, k_head, k_token, v_row, v_head, v_token, kv_heads, capacity, tokens,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, HAS_COUNTS: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of new tokens, B * KV). Of more than C tokens the last C are written: no slot is written twice."""
    item = tl.program_id(1).to(tl.int64)
    b = item // kv_heads
    h = item % kv_heads
    length = tl.load(lengths + b)
    count = tl.load(counts + b) if HAS_COUNTS else tokens
    index = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    slot = _slots(length + index, capacity, WINDOW)
    is_new = (index < count) & (index >= count - capacity) & (slot < capacity)
    _write(k_new + b * k_row + h * k_head, k_token, k_store, item, index, is_new, slot, capacity, DIM, BLOCK_D)
    _write(v_new + b * v_row + h * v_head, v_token, v_store, item, index, is_new, slot, capacity, VALUE_DIM, BLOCK_DV)
    if SCALED:
        _write_factors(k_new_scale, k_scale, item, index, is_new, slot, capacity, tokens)
        _write_factors(v_new_scale, v_scale, item, index, is_new, slot, capacity, tokens)
