"""The operators as plain ATen, for programs that must run where nothing of ours is installed.

Positions stay tensors and no size depends on data. With q new tokens, a ring of C slots is read in place, whole, under
a mask that follows from `lengths`, and the new tokens are looked at besides: q * (C + q) scores on a sliding layer. A
linear store is written first and then read whole: q * C scores, however few tokens it holds.

    one token       C + 1 scores a head, nothing is moved; the operators read only the visible slots, without a mask
    a prompt of L   in one call L * (C + L); in chunks of about W, L * (C + W): the state makes both the same, so a
                    long prompt should come in chunks

(Blocks of queries inside the graph would give the second number for any call. Their number is a quotient of sizes, and
torch.export then writes guards on such quotients, which do not hold for every length.)

A slot that is not visible is multiplied by 0, not left out: a NaN that some token brought into a ring goes on until its
slot is written again, at most `slack` tokens after it left the window. The stores begin as zeros.

Products are taken in the tensors' dtype and the softmax in float32, as the eager attention of transformers does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_masked import slot_positions, visible

#: Score of a key that is not visible: its weight is exactly 0 beside any visible one. Not -inf, so that a pad, which
#: sees nothing, is some finite number and not NaN (no query ever looks at it).
HIDDEN = torch.finfo(torch.float32).min


def check_state(lengths: Tensor, input_ids: Tensor, max_length: int) -> None:
    """Stops a program before it writes: the rows' lengths (all that the state has) and the new input_ids (B, q).

    max_length: slots of the linear stores; 0: there are none.
    """
    rows, tokens = input_ids.shape
    if max_length:
        # One row says it for all. Inductor would make one kernel of a check of every row and of the statement that
        # advances `lengths`, which has as many elements: at the end, when the rings have been written.
        torch.ops.aten._assert_async.msg(
            lengths[0] + tokens <= max_length,
            f"swa_pass.export: more than max_length={max_length} tokens: the stores of the global layers are full. "
            "Export with a larger max_length, or reset the state.",
        )
    if not isinstance(rows, int):
        # Counted from the tensor: the size itself is known to be in range, so a compiler drops a check of it, and a
        # compiled package checks no sizes.
        torch.ops.aten._assert_async.msg(
            (input_ids[:, 0] >= 0).sum() <= lengths.shape[0],
            f"swa_pass.export: the state has room for {lengths.shape[0]} rows and more were given. Export with a "
            "larger batch.",
        )
        mine = lengths[:rows]
        torch.ops.aten._assert_async.msg(
            (mine == mine[0]).all(),
            "swa_pass.export: rows of different lengths: the number of rows changed since the state was reset. "
            "Reset the state first.",
        )


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    starts: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Attention over the store as it is, and over the new tokens. Same arguments as the operator."""
    new = lengths[:, None] + torch.arange(k_new.shape[2], device=q.device)
    old = slot_positions(lengths, k_store.shape[2], window)
    parts = [(k_store, v_store, old), (k_new, v_new, new)]
    return _attention(q, parts, new, starts, window, scale, softcap, sinks)


def attend_append(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    starts: Tensor | None = None,
    *,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """`attend`, then the write. All rows have one length: an exported program sees to that."""
    if window:
        out = attend(
            q, k_new, v_new, k_store, v_store, lengths, starts, window=window, scale=scale, softcap=softcap, sinks=sinks
        )
        write(k_new, k_store, lengths)
        write(v_new, v_store, lengths)
        return out
    write(k_new, k_store, lengths)
    write(v_new, v_store, lengths)
    new = lengths[:, None] + torch.arange(k_new.shape[2], device=q.device)
    slots = torch.arange(k_store.shape[2], device=q.device)[None]
    return _attention(q, [(k_store, v_store, slots)], new, starts, window, scale, softcap, sinks)


def _attention(
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    new: Tensor,
    starts: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention over several sets of keys.

    parts: keys (B, KV, n, D), values (B, KV, n, Dv), positions (B or 1, n), negative where there is no key.
    new: positions (B, N) of the new tokens; the queries are the last Q of them.
    """
    rows, heads, queries, dim = q.shape
    kv_heads, value_dim = parts[0][1].shape[1], parts[0][1].shape[3]
    group = heads // kv_heads

    # Heads that share keys are more queries, on one axis from here to the end, and what all heads share is repeated by
    # `cat`. A reshape that joins or splits axes of unknown size in a view costs guards, which not every size fulfils.
    mine = q.reshape(rows, kv_heads, group * queries, dim)
    at = new[:, new.shape[1] - queries :]
    scores = []
    for keys, _, positions in parts:
        some = torch.matmul(mine, keys.transpose(2, 3)).float() * scale
        if softcap > 0:
            some = torch.tanh(some / softcap) * softcap
        seen = visible(positions, at, starts, None, window)
        scores.append(torch.where(torch.cat([seen] * group, 1)[:, None], some, HIDDEN))
    if sinks is not None:
        per_group = sinks.float().view(1, kv_heads, group, 1, 1).unbind(2)
        scores.append(torch.cat([sink.expand(rows, -1, queries, -1) for sink in per_group], 2))
    weights = torch.softmax(torch.cat(scores, -1), -1).to(q.dtype)
    out, first = None, 0
    for _, values, _ in parts:
        some = torch.matmul(weights[..., first : first + values.shape[2]], values)
        out, first = some if out is None else out + some, first + values.shape[2]
    assert out is not None
    out = out.view(rows, kv_heads, group, queries, value_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, value_dim).transpose(1, 2)


def write(new: Tensor, store: Tensor, lengths: Tensor) -> None:
    """The new tokens into their slots, by one index for all rows; of more than C the last C.

    A linear store never wraps: that it has room is checked elsewhere.
    """
    tokens, slots = new.shape[2], store.shape[2]
    kept = torch.sym_min(tokens, slots)
    index = torch.arange(kept, device=new.device) + (tokens - kept)
    # Sizes that are unknown while exporting are not compared: that would be a guard on them.
    whole = isinstance(tokens, int) and isinstance(slots, int) and tokens <= slots
    store.index_copy_(2, (lengths[0] + index) % slots, new if whole else new.index_select(2, index))
