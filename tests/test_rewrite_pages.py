"""`swa_pass.rewrite` on engines' pages: the gather of a whole context becomes a read of the window's blocks."""

from __future__ import annotations

import copy

import idioms
import pytest
import torch
from idioms import BATCH, HEAD_DIM, HEADS, KV_HEADS, VOCAB, W
from test_rewrite import error, names
from torch.fx.experimental.proxy_tensor import make_fx

import swa_pass
from swa_pass.graph import op_name, shape_of

TEXT = torch.randint(0, VOCAB, (BATCH, 40), generator=torch.Generator().manual_seed(3))
LATE = torch.tensor([0, 5])  # the second row begins five steps later
PAGED = ["Paged", "PagedSelect", "PagedTokens"]


def table(model):
    """Blocks of both rows, scattered over the pool."""
    order = torch.randperm(model.blocks, generator=torch.Generator().manual_seed(4))
    return order[: BATCH * (40 // model.size)].reshape(BATCH, -1)


def capture(model, form):
    args = (TEXT[:, :1], torch.zeros(BATCH, dtype=torch.int64), table(model))
    with torch.no_grad():
        if form == "make_fx":
            return make_fx(model)(*args)
        if form == "dynamo":
            graphs = []
            torch._dynamo.reset()
            torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(*args)
            return graphs[0]
        program = torch.export.export(model, args)
        return (program if form == "export" else program.run_decompositions()).module()


def run(gm, blocks, steps=38):
    """Logits of both rows, each from its own first token on."""
    out = []
    for t in range(steps):
        position = (t - LATE).clamp(min=0)
        ids = TEXT.gather(1, position[:, None])
        step = gm(ids, position, blocks)
        out.append(step[0] if isinstance(step, (tuple, list)) else step)
    logits = torch.cat(out, dim=1)
    return [logits[0], logits[1, int(LATE[1]) :]]


def expected(**knobs):
    whole = idioms.Decoder(**knobs).reference(TEXT)
    return [whole[0, :38], whole[1, : 38 - int(LATE[1])]]


def worst(a, b):
    return max(error(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("form", ["export", "core", "make_fx"])
@pytest.mark.parametrize("idiom", PAGED)
def test_the_windows_blocks_are_read(idiom, form):
    model = getattr(idioms, idiom)()
    gm, blocks = capture(model, form), table(model)
    stock = copy.deepcopy(gm)
    for pool in gm.buffers():
        if pool.dim() > 2:
            pool.zero_()
    result = swa_pass.rewrite(gm)
    assert (result.matches, result.refusals, result.owned) == (2, [], {})
    assert names(gm).count("swa_pass::attend") == 2
    whole = BATCH * blocks.shape[1] * model.size * KV_HEADS * HEAD_DIM
    large = [n for n in gm.graph.nodes if op_name(n) in ("index", "index_select") and shape_of(n)]
    assert all(torch.Size(shape_of(n)).numel() < whole for n in large if len(shape_of(n)) > 2)
    got = run(gm, blocks)
    assert worst(got, expected()) < 1e-5
    assert worst(got, run(stock, blocks)) < 1e-5
    for ours, theirs in zip(gm.buffers(), stock.buffers()):
        torch.testing.assert_close(ours, theirs)  # the engine's writes are the engine's


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_is_seen(off):
    model = idioms.Paged(shown=W + off)
    gm = capture(model, "export")
    assert swa_pass.rewrite(gm).matches == 2
    got = run(gm, table(model))
    assert worst(got, expected(window=W + off)) < 1e-5
    assert worst(got, expected()) > 1e-2


def test_in_a_compiler():
    stock, ours = idioms.Paged(), idioms.Paged()
    compiled = torch.compile(ours, backend=swa_pass.backend("inductor"))
    with torch.no_grad():
        assert worst(run(compiled, table(ours), 20), run(stock, table(stock), 20)) < 1e-5


def test_blocks_outside_of_the_window_are_not_read():
    model = idioms.Paged()
    gm, blocks = capture(model, "export"), table(model)
    swa_pass.rewrite(gm)
    run(gm, blocks, 30)
    for row in range(BATCH):
        seen = 30 - int(LATE[row])
        for block in range((seen - (W - 1)) // model.size):
            for pool in gm.buffers():
                if pool.dim() == 4:
                    pool[blocks[row, block]] = float("nan")
    position = 30 - LATE
    assert torch.isfinite(gm(TEXT.gather(1, position[:, None]), position, blocks)).all()


def test_full_attention_reads_all_blocks():
    model = idioms.Paged(shown=10**6)
    gm = capture(model, "export")
    assert swa_pass.rewrite(gm).matches == 2
    assert worst(run(gm, table(model)), expected(window=10**6)) < 1e-5


class TestRefusals:
    def unchanged(self, model, reason):
        gm = capture(model, "export")
        before = gm.code
        result = swa_pass.rewrite(gm)
        assert (result.matches, gm.code) == (0, before)
        assert reason in " ".join(result.refusals)

    def test_pages_written_after_the_gather(self):
        class Late(idioms.Paged):
            def step(self, n, k, v, position):
                out = super().step(n, k, v, position)
                for pages in self.stores(n):
                    pages[self.table[:, 0], 0] = 7.0
                return out

        self.unchanged(Late(), "is written after it was gathered")

    def test_a_mask_without_a_last_key(self):
        class Open(idioms.Paged):
            def step(self, n, k, v, position):
                keys, values, _ = super().step(n, k, v, position)
                key = torch.arange(keys.shape[2])
                return keys, values, (key[None, :] >= position[:, None] - W)[:, None, None]

        self.unchanged(Open(), "no last key")

    def test_other_pages_for_values(self):
        class Other(idioms.Paged):
            def step(self, n, k, v, position):
                keys, _, mask = super().step(n, k, v, position)
                values = self.stores(n)[1][self.table.flip(0)]
                return keys, values.reshape(BATCH, -1, KV_HEADS, HEAD_DIM).transpose(1, 2), mask

        self.unchanged(Other(), "different blocks")


@pytest.mark.parametrize("window", [0, 1, 5, W, 13])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_operator(window, tokens):
    """Against the same tokens in a linear store."""
    torch.manual_seed(0)
    size, blocks, length = 4, 6, torch.tensor([19, 2])
    dense_k, dense_v = torch.randn(2, BATCH, KV_HEADS, blocks * size, HEAD_DIM)
    q, k, v = torch.randn(BATCH, HEADS, tokens, HEAD_DIM), *torch.randn(2, BATCH, KV_HEADS, tokens, HEAD_DIM)
    rows = torch.randperm(30)[: BATCH * blocks].reshape(BATCH, blocks)
    pools = []
    for dense in (dense_k, dense_v):
        pool = torch.full((30, KV_HEADS, size, HEAD_DIM), float("nan"))
        pool[rows] = dense.reshape(BATCH, KV_HEADS, blocks, size, HEAD_DIM).transpose(1, 2)
        pools.append(pool)
    starts, options = torch.tensor([16, 0]), {"window": window, "scale": 0.3}
    attend = torch.ops.swa_pass.attend
    want = attend(q, k, v, dense_k, dense_v, length, starts, **options)
    got = attend(q, k, v, *pools, length, starts, block_table=rows, **options)
    torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match="writes to paged stores"):
        torch.ops.swa_pass.attend_append(q, k, v, *pools, length, starts, block_table=rows, **options)
