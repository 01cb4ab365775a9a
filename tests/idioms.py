"""Small decoders that keep their KV cache in buffers of their own, each in another idiom that is found in the wild.

They share everything but `step`: how a layer writes its new keys, and what it reads. `reference` is the same decoder
without a cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 4, 2, 8, 64
W, SLOTS = 8, 64


class Decoder(nn.Module):
    """`forward(ids (B, N), position (N,)) -> logits (B, N, VOCAB)`; attention over the last `window` keys."""

    slots = SLOTS

    def __init__(self, layers: int = 2, window: int = W, shown: int | None = None, eager: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / math.sqrt(shape[-1]), requires_grad=False)

        self.layers, self.window, self.shown, self.eager = layers, window, shown or window, eager
        width = HEADS * HEAD_DIM
        self.embed = weight(VOCAB, width)
        self.qkv = nn.ParameterList(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, width) for _ in range(layers))
        self.out = nn.ParameterList(weight(width, width) for _ in range(layers))
        for n in range(layers):
            for kind in "kv":
                self.register_buffer(f"{kind}_cache_{n}", torch.zeros(BATCH, KV_HEADS, self.slots, HEAD_DIM))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x = self.embed[ids] * 2.0
        for n in range(self.layers):
            x = self.layer(n, x, position)
        return x @ self.embed.T

    def layer(self, n: int, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.heads(n, x, position)
        keys, values, mask = self.step(n, k, v, position)
        return x + self.merge(n, self.attend(q, keys, values, mask))

    def heads(self, n: int, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, new = x.shape[0], x.shape[1]
        flat = F.layer_norm(x, x.shape[-1:]) @ self.qkv[n].T
        parts = flat.view(batch, new, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = parts.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        turn = torch.cos(position * 0.1)[:, None]  # the keys know where they are
        return q * 3.0 * turn, k * turn, v

    def merge(self, n: int, out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1) @ self.out[n].T

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        batch, heads, length = keys.shape[0], q.shape[1], keys.shape[2]
        shape = (batch, KV_HEADS, heads // KV_HEADS, length, HEAD_DIM)
        keys = keys[:, :, None].expand(shape).reshape(batch, heads, length, HEAD_DIM)
        values = values[:, :, None].expand(shape).reshape(batch, heads, length, HEAD_DIM)
        if not self.eager:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.4)
        scores = torch.matmul(q, keys.transpose(2, 3)) * 0.4
        scores = scores + torch.where(mask, 0.0, torch.finfo(q.dtype).min)
        return torch.matmul(torch.softmax(scores, dim=-1), values)

    def reference(self, ids: Tensor) -> Tensor:
        """Logits of a whole text, without a cache."""
        position = torch.arange(ids.shape[1])
        distance = position[:, None] - position[None, :]
        mask = ((distance >= 0) & (distance < self.window))[None, None]
        x = self.embed[ids] * 2.0
        for n in range(self.layers):
            q, k, v = self.heads(n, x, position)
            x = x + self.merge(n, self.attend(q, k, v, mask))
        return x @ self.embed.T

    def step(self, n: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def stores(self, n: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"k_cache_{n}"), getattr(self, f"v_cache_{n}")

    def causal(self, position: Tensor, key: Tensor) -> Tensor:
        """(1, 1, N, keys): the window, and nothing before the first token."""
        distance = position[:, None] - key[None, :]
        return ((distance >= 0) & (distance < self.shown) & (key >= 0)[None, :])[None, None]


class IndexCopy(Decoder):
    """A linear store of the whole context: transformers' StaticCache, optimum-habana, gpt-fast."""

    def step(self, n, k, v, position):
        for store, new in zip(self.stores(n), (k, v)):
            store.index_copy_(2, position, new)
        return *self.stores(n), self.causal(position, torch.arange(self.slots))


class IndexPut(IndexCopy):
    """The same with ``store[:, :, position] = new``."""

    def step(self, n, k, v, position):
        for store, new in zip(self.stores(n), (k, v)):
            store[:, :, position] = new
        return *self.stores(n), self.causal(position, torch.arange(self.slots))


class Sliced(Decoder):
    """``store[:, :, start : start + n] = new``: `forward(ids, start)` with a number."""

    def forward(self, ids, start):  # type: ignore[override]
        self.start = start
        return super().forward(ids, start + torch.arange(ids.shape[1]))

    def step(self, n, k, v, position):
        for store, new in zip(self.stores(n), (k, v)):
            store[:, :, self.start : self.start + new.shape[2]] = new
        return *self.stores(n), self.causal(position, torch.arange(self.slots))


class Roll(Decoder):
    """A window that is shifted by one for every token: transformers' StaticSlidingWindowLayer."""

    slots = W

    def step(self, n, k, v, position):
        result = []
        for store, new in zip(self.stores(n), (k, v)):
            rolled = store.roll(-1, dims=-2)
            rolled[:, :, torch.tensor([-1])] = new
            store.copy_(rolled)
            result.append(rolled)
        return *result, self.causal(position, position - (W - 1) + torch.arange(W))


class Shift(Decoder):
    """The same as a concatenation."""

    slots = W

    def step(self, n, k, v, position):
        result = []
        for store, new in zip(self.stores(n), (k, v)):
            store.copy_(torch.cat([store[:, :, 1:], new], dim=2))
            result.append(store)
        return *result, self.causal(position, position - (W - 1) + torch.arange(W))


class ShiftOpen(Shift):
    """Its mask says only which slots hold a token: all of them come before the query anyway."""

    def causal(self, position, key):
        return (key >= 0)[None, :].expand(len(position), -1)[None, None]


class Gather(Decoder):
    """A window that is gathered by an index tensor once it is full: transformers 4.5x' SlidingWindowLayer."""

    slots = W

    def step(self, n, k, v, position):
        index = (torch.arange(W) + (position > W - 1).to(torch.int64)) % W
        result = []
        for store, new in zip(self.stores(n), (k, v)):
            moved = store[:, :, index]
            moved = moved.index_copy(2, position.clamp(max=W - 1), new)
            store.copy_(moved)
            result.append(moved)
        return *result, self.causal(position, (position - (W - 1)).clamp(min=0) + torch.arange(W))


class Cat(Decoder):
    """State goes in and out as tensors: transformers' DynamicCache. Keeps W - 1 keys once it has them."""

    def forward(self, ids, position, *past):  # type: ignore[override]
        self.past, self.present = past, []
        logits = super().forward(ids, position)
        return logits, *self.present

    def step(self, n, k, v, position):
        past = self.past[2 * n : 2 * n + 2]
        full = [torch.cat([old, new], dim=2) for old, new in zip(past, (k, v))]
        self.present += [x[:, :, -(W - 1) :] for x in full]
        held = past[0].shape[2]
        distance = position[:, None] - (position[0] - held + torch.arange(held + k.shape[2]))[None, :]
        return *full, ((distance >= 0) & (distance < self.shown))[None, None]


class Paged(Decoder):
    """Blocks of an engine's pool, all gathered: `forward(ids (B, 1), position (B,), table (B, blocks))`.

    The text of a row may begin later than others': every row has a position of its own.
    """

    size, blocks = 4, 24
    slots = size  # the pool is made here, in the shape (blocks, size, kv_heads, head_dim)

    def __init__(self, **knobs):
        super().__init__(**knobs)
        for n in range(self.layers):
            for kind in "kv":
                self.register_buffer(f"{kind}_cache_{n}", torch.zeros(self.shape()))

    def shape(self):
        return self.blocks, self.size, KV_HEADS, HEAD_DIM

    def forward(self, ids, position, table):  # type: ignore[override]
        self.table = table
        return super().forward(ids, position)

    def heads(self, n, x, position):
        q, k, v = super().heads(n, x, position[:1] * 0)
        turn = torch.cos(position * 0.1)[:, None, None, None]
        return q * turn, k * turn, v

    def step(self, n, k, v, position):
        block = self.table.gather(1, position[:, None] // self.size)[:, 0]
        read = []
        for pages, new in zip(self.stores(n), (k, v)):
            self.write(pages, block, position % self.size, new[:, :, 0])
            read.append(self.gathered(pages))
        key = torch.arange(read[0].shape[2])
        distance = position[:, None] - key[None, :]
        return *read, ((distance >= 0) & (distance < self.shown))[:, None, None]

    def write(self, pages, block, inside, new):
        pages[block, inside] = new

    def gathered(self, pages):
        return pages[self.table].reshape(BATCH, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)


class PagedSelect(Paged):
    """Heads before tokens, and `index_select` with a flat list."""

    def shape(self):
        return self.blocks, KV_HEADS, self.size, HEAD_DIM

    def write(self, pages, block, inside, new):
        pages[block, :, inside] = new

    def gathered(self, pages):
        chosen = torch.index_select(pages, 0, self.table.reshape(-1))
        chosen = chosen.reshape(*self.table.shape, KV_HEADS, self.size, HEAD_DIM)
        return chosen.permute(0, 2, 1, 3, 4).reshape(BATCH, KV_HEADS, -1, HEAD_DIM)


class PagedTokens(Paged):
    """An index for every token: transformers' continuous batching. Its pool is (slots, kv_heads, head_dim)."""

    size, blocks = 1, 96

    def shape(self):
        return self.blocks, KV_HEADS, HEAD_DIM

    def write(self, pages, block, inside, new):
        pages.index_copy_(0, block, new)

    def gathered(self, pages):
        return pages[self.table].transpose(1, 2)


class Packed(Paged):
    """transformers' continuous batching: all texts in one row, told apart by the mask; an index of slots to read.

    `forward(ids (1, N), position (N,), read (S,), write (N,), mask (1, 1, N, S))`, all made by the host (see `serve`).
    """

    slots, mark = 96, 95

    def shape(self):
        return self.slots, KV_HEADS, HEAD_DIM

    def forward(self, ids, position, read, write, mask):  # type: ignore[override]
        self.read, self.write, self.mask = read, write, mask
        return Decoder.forward(self, ids, position)

    def heads(self, n, x, position):
        return Decoder.heads(self, n, x, position)

    def step(self, n, k, v, position):
        out = []
        for store, new in zip(self.stores(n), (k, v)):
            tokens = new[0].transpose(0, 1)
            out.append(self.gathered(store, tokens).transpose(0, 1)[None])
        return *out, self.mask

    def gathered(self, store, new):
        store.index_copy_(0, self.write, new)
        return store.index_select(0, self.read)


class PackedMarked(Packed):
    """The same for a sliding layer: read before it is written, so the new tokens come in through marked places."""

    def gathered(self, store, new):
        tokens = store.index_select(0, self.read)
        tokens.masked_scatter_((self.read == self.mark)[:, None, None], new)
        store.index_copy_(0, self.write, new)
        return tokens


class FlatBlocks(Paged):
    """Paged decode on Gaudi: one flat list of blocks for all rows, softmax block by block, merged by row.

    `forward(ids (B, 1), position (B,), blocks (N,), groups (N,), bias (N, size), slot (B,))`, made by the host.
    """

    size, blocks = 4, 24
    slots = size * blocks

    def shape(self):
        return self.slots, KV_HEADS, HEAD_DIM

    def forward(self, ids, position, blocks, groups, bias, slot):  # type: ignore[override]
        self.list, self.groups, self.bias, self.slot = blocks, groups, bias, slot
        self.mapping = (groups[:, None] == torch.arange(ids.shape[0])).to(bias.dtype)
        return Decoder.forward(self, ids, position)

    def layer(self, n, x, position):
        q, k, v = self.heads(n, x, position)
        for store, new in zip(self.stores(n), (k, v)):
            store.index_copy_(0, self.slot, new[:, :, 0])
        return x + self.merge(n, self.flat(q[:, :, 0] * 0.4, *self.stores(n))[:, :, None])

    def flat(self, q, k_store, v_store):
        rows, count = q.shape[0], self.list.shape[0]
        to_blocks, to_rows = self.mapping, self.mapping.t()
        q = (to_blocks @ q.reshape(rows, -1)).view(count, KV_HEADS, -1, HEAD_DIM)
        k, v = (
            store.unflatten(0, (-1, self.size)).index_select(0, self.list).transpose(1, 2)
            for store in (k_store, v_store)
        )
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores.add_(self.bias[:, None, None])
        top = scores.amax(-1, keepdim=True)
        weights = self.weights(torch.exp(scores - top))
        out = torch.matmul(weights, v)
        total, top = weights.sum(-1, keepdim=True).squeeze(-1), top.squeeze(-1)
        best = torch.full((rows + 1, *top.shape[1:]), -math.inf)
        best = best.index_reduce_(0, self.groups, top, "amax").index_select(0, self.groups)
        fix = torch.exp(top - best)
        moved = (total * fix).reshape(count, -1)
        sums = torch.maximum(to_blocks @ (to_rows @ moved), moved).view(top.shape)
        out = out * (fix / sums)[..., None]
        return (to_rows @ out.reshape(count, -1)).view(rows, HEADS, HEAD_DIM)

    def weights(self, weights):
        return weights
