"""`attend_tokens` and `attend_blocks`: against float64 on what is seen, with NaN in everything else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swa_pass.masks import ADDITIVE_HIDDEN
from swa_pass.ops import gathered


def error(a, b):
    return (a - b).abs().max().item()


def dense(q, k, v, seen, scale, softcap=0.0, sinks=None, bias=None):
    """q (heads, Q, D), k and v (kv_heads, S, D), seen (Q, S), in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v


#: Largest difference from float64, of numbers near 1.
CLOSE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = st.sampled_from(list(CLOSE))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    DTYPES,
    st.sampled_from([(1, 1), (4, 2), (6, 1), (5, 5), (16, 1)]),
    st.sampled_from([(8, 8), (80, 16), (33, 64)]),
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from([0.0, 5.0]),
    st.booleans(),
    st.sampled_from(["bool", "float", "none", "half"]),
)
def test_attend_tokens(seed, dtype, heads, dims, queries, keys, softcap, with_sinks, kind):
    g = torch.Generator().manual_seed(seed)
    k_store, v_store = (torch.full((keys + 9, heads[1], dim), float("nan"), dtype=dtype) for dim in dims)
    index = torch.randperm(keys + 9, generator=g)[:keys]
    fresh = torch.rand(keys, generator=g) < 0.2
    k, v = (torch.randn(keys, heads[1], dim, generator=g).to(dtype) for dim in dims)
    seen = torch.rand(queries, keys, generator=g) < 0.5
    if kind == "none":
        seen = torch.ones_like(seen)
    read = seen.any(0)
    for store, tokens in ((k_store, k), (v_store, v)):
        store[index[read & ~fresh]] = tokens[read & ~fresh]
    index = torch.where(fresh, -7, index)
    q = torch.randn(1, heads[0], queries, dims[0], generator=g).to(dtype)
    sinks = torch.randn(heads[0], generator=g)
    bias = torch.randn(queries, keys, generator=g)
    mask = {
        "bool": seen,
        "float": bias.masked_fill(~seen, -1e30)[None, None],
        "half": bias.bfloat16().masked_fill(~seen, float("-inf")),
        "none": None,
    }[kind]
    added = {"float": bias, "half": bias.bfloat16().double()}.get(kind)
    options = {"scale": 0.3, "softcap": softcap, "sinks": sinks if with_sinks else None}
    args = (q, k_store, v_store, index, mask, k[fresh], v[fresh])
    got = torch.ops.swa_pass.attend_tokens(*args, sentinel=-7, **options)
    want = dense(q[0], k.transpose(0, 1), v.transpose(0, 1), seen, bias=added, **options)
    want = want.masked_fill(~seen.any(1)[:, None], 0)
    assert got.dtype == dtype
    assert error(got[0].double(), want) < CLOSE[dtype]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    DTYPES,
    st.sampled_from([(1, 1), (4, 2), (6, 1), (5, 5), (16, 1)]),
    st.sampled_from([(8, 8), (80, 16), (33, 64)]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([1, 4, 16]),
    st.booleans(),
)
def test_attend_blocks(seed, dtype, heads, dims, rows, count, size, with_bias):
    g = torch.Generator().manual_seed(seed)
    k_pages, v_pages = (torch.full((count + 3, heads[1], size, dim), float("nan"), dtype=dtype) for dim in dims)
    blocks = torch.randperm(count + 3, generator=g)[:count]
    owner = torch.randint(-1, rows + 1, (count,), generator=g)
    hidden = torch.rand(count, size, generator=g) < 0.3 if with_bias else torch.zeros(count, size, dtype=torch.bool)
    k, v = (torch.randn(count, heads[1], size, dim, generator=g).to(dtype) for dim in dims)
    keep = ((owner >= 0) & (owner < rows))[:, None] & ~hidden
    for pages, tokens in ((k_pages, k), (v_pages, v)):
        pages[blocks] = torch.where(keep[:, None, :, None], tokens, float("nan"))
    q = torch.randn(rows, heads[0], dims[0], generator=g).to(dtype)
    bias = torch.randn(count, size, generator=g)
    given_bias = bias.masked_fill(hidden, float("-inf")) if with_bias else None
    got = torch.ops.swa_pass.attend_blocks(q, k_pages, v_pages, blocks, owner, given_bias, scale=0.3)
    for row in range(rows):
        mine = ((owner == row)[:, None] & ~hidden).reshape(1, -1)
        flat = (x.transpose(0, 1).reshape(heads[1], count * size, -1) for x in (k, v))
        added = bias.reshape(1, -1) if with_bias else None
        want = dense(q[row][:, None], *flat, mine, 0.3, bias=added)[:, 0]
        assert error(got[row].double(), want) < CLOSE[dtype]


BAD = {
    "four dimensions": (lambda a: a | {"q": a["q"][0]}, "q must have the shape"),
    "two batches": (lambda a: a | {"q": a["q"].expand(2, -1, -1, -1)}, "q must have the shape"),
    "dtype": (lambda a: a | {"k_store": a["k_store"].half()}, "keys must have 3 dimensions"),
    "heads": (lambda a: a | {"q": a["q"][:, :3]}, "cannot share"),
    "head_dim": (lambda a: a | {"q": a["q"][..., :4]}, "do not fit together"),
    "mask": (lambda a: a | {"mask": torch.zeros(2, 5)}, "mask must have the shape"),
    "index": (lambda a: a | {"index": a["index"].float()}, "index must be one list"),
    "one of two": (lambda a: a | {"k_new": torch.zeros(1, 2, 8)}, "given together"),
    "new tokens": (
        lambda a: a | {"k_new": torch.zeros(1, 1, 8), "v_new": torch.zeros(1, 1, 8)},
        "do not fit the store",
    ),
    "out of range": (lambda a: a | {"index": torch.tensor([1, 2, 3, 99])}, "index"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(case):
    change, message = BAD[case]
    args = {
        "q": torch.randn(1, 4, 2, 8),
        "k_store": torch.randn(12, 2, 8),
        "v_store": torch.randn(12, 2, 8),
        "index": torch.arange(4),
        "mask": None,
    }
    with pytest.raises((ValueError, IndexError), match=message):
        torch.ops.swa_pass.attend_tokens(**change(args), scale=0.3)


def test_operators_and_proofs_mean_the_same_by_hidden():
    assert gathered.HIDDEN == ADDITIVE_HIDDEN
