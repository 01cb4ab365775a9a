"""`swa_pass.rewrite` on what engines list for every step: slots of packed texts, and flat lists of blocks.

The host decides what a query sees, by lists and masks, so the host here makes them for a window, and the decoder
without a cache is what the answers are compared with.
"""

from __future__ import annotations

import copy

import idioms
import pytest
import torch
from idioms import BATCH, HEADS, VOCAB, W
from test_rewrite import error, names
from torch.fx.experimental.proxy_tensor import make_fx

import swa_pass

STEPS = 30
TEXT = torch.randint(0, VOCAB, (BATCH, STEPS), generator=torch.Generator().manual_seed(3))
PACKED = ["Packed", "PackedMarked"]
FORMS = ["make_fx", "export", "core"]
pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.*:UserWarning")


def capture(model, args, form):
    names = ["a", "b", "c", "d", "e", "f"][: len(args)]
    with torch.no_grad():
        if form == "make_fx":
            scope = {"model": model}
            exec(f"def call({', '.join(names)}): return model({', '.join(names)})", scope)
            return make_fx(scope["call"])(*args)
        program = torch.export.export(model, args)
        return (program if form == "export" else program.run_decompositions()).module()


def result_of(out):
    return out[0] if isinstance(out, (tuple, list)) else out


class PackedHost:
    """What continuous batching's host makes for one token of each text: row b's position p is in slot 40 * b + p."""

    def __init__(self, model, window=W):
        self.marked = isinstance(model, idioms.PackedMarked)
        self.window = window

    def step(self, t):
        write = torch.tensor([40 * b + t for b in range(BATCH)])
        read, rows = [], []
        for b in range(BATCH):
            seen = list(range(max(0, t - self.window + 1), t + 1))
            read += [40 * b + p for p in seen[:-1]] + [idioms.Packed.mark if self.marked else 40 * b + t]
            rows += [b] * len(seen)
        pad = BATCH * (W + 1) - len(read)  # lists of one length; what pads them nobody sees
        hidden = torch.tensor(rows + [-1] * pad)[None, :] != torch.arange(BATCH)[:, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        position = torch.full((BATCH,), t)
        return TEXT[:, t][None], position, torch.tensor(read + [39] * pad), write, mask[None, None]


class BlockHost:
    """What paged decode's host makes: the window's blocks of all rows in one list, and which of their tokens count."""

    def __init__(self, model, window=W):
        self.size, self.window = model.size, window
        self.table = torch.randperm(model.blocks, generator=torch.Generator().manual_seed(4)).reshape(BATCH, -1)

    def step(self, t):
        first, last = max(0, t - self.window + 1) // self.size, t // self.size
        used = range(first, last + 1)
        positions = torch.tensor([[n * self.size + i for i in range(self.size)] for n in used])
        hidden = (positions > t) | (positions <= t - self.window)
        bias = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")).repeat(BATCH, 1)
        blocks, groups = self.table[:, first : last + 1].reshape(-1), torch.arange(BATCH).repeat_interleave(len(used))
        pad = 4 * BATCH - len(blocks)  # lists of one length; BATCH is nobody's number
        blocks = torch.cat([blocks, blocks[:1].expand(pad)])
        groups = torch.cat([groups, torch.full((pad,), BATCH)])
        bias = torch.cat([bias, torch.zeros(pad, self.size)])
        slot = self.table[:, t // self.size] * self.size + t % self.size
        return TEXT[:, t : t + 1], torch.full((BATCH,), t), blocks, groups, bias, slot


def host_of(model, window=W):
    return BlockHost(model, window) if isinstance(model, idioms.FlatBlocks) else PackedHost(model, window)


def run(graph, host, steps=STEPS):
    """(B, steps, VOCAB) logits."""
    with torch.no_grad():
        return torch.stack([result_of(graph(*host.step(t))).reshape(BATCH, VOCAB) for t in range(steps)], 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("idiom", [*PACKED, "FlatBlocks"])
def test_lists_are_read_in_place(idiom, form):
    model = getattr(idioms, idiom)()
    host = host_of(model)
    gm = capture(model, host.step(12), form)
    stock = copy.deepcopy(gm)
    for store in [*gm.buffers(), *stock.buffers(), *model.buffers()]:
        store.zero_()
    before = names(gm)
    result = swa_pass.rewrite(gm)
    assert (result.matches, result.refusals, result.owned) == (2, [], {})
    after = names(gm)
    fused = "swa_pass::attend_blocks" if idiom == "FlatBlocks" else "swa_pass::attend_tokens"
    assert after.count(fused) == 2
    gone = (
        "index_select",
        "masked_scatter",
        "masked_scatter_",
        "scaled_dot_product_attention",
        "amax",
        "bmm",
        "softmax",
    )
    assert any(before.count(name) for name in gone)
    assert not any(after.count(name) for name in gone)
    assert after.count("swa_pass::block_rows") == (1 if idiom == "FlatBlocks" else 0)
    writes = ("index_copy_", "index_copy", "index_put", "index_put_")
    assert [before.count(name) for name in writes] == [after.count(name) for name in writes]
    got, want = run(gm, host), run(stock, host)
    assert error(got, want) < 1e-5
    assert error(got, idioms.Decoder().reference(TEXT)) < 1e-5
    for ours, theirs in zip(gm.buffers(), stock.buffers()):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert swa_pass.rewrite(gm).matches == 0  # idempotent


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("idiom", ["PackedMarked", "FlatBlocks"])
def test_a_list_that_is_off_by_one_is_seen(idiom, off):
    model = getattr(idioms, idiom)()
    gm = capture(model, host_of(model).step(12), "export")
    assert swa_pass.rewrite(gm).matches == 2
    assert error(run(gm, host_of(model, W + off)), idioms.Decoder().reference(TEXT)) > 1e-2


@pytest.mark.parametrize("inner", ["inductor", "eager"])
@pytest.mark.parametrize("idiom", [*PACKED, "FlatBlocks"])
def test_in_a_compiler(idiom, inner, tmp_path):
    stock, ours = getattr(idioms, idiom)(), getattr(idioms, idiom)()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=swa_pass.backend(inner))
    with swa_pass.debug(tmp_path):
        assert error(run(compiled, host_of(ours), 12), run(stock, host_of(stock), 12)) < 1e-5
    for matches in tmp_path.glob("*.matches.txt"):
        assert "2 rewritten" in matches.read_text()
    lines = [line for after in tmp_path.glob("*.after.py") for line in after.read_text().splitlines()]
    code = "".join(line for line in lines if not line.lstrip().startswith("#"))
    assert "swa_pass.attend_" in code
    assert not any(gone in code for gone in ("index_select", "masked_scatter", "scaled_dot_product_attention"))


@pytest.mark.parametrize("idiom", [*PACKED, "FlatBlocks"])
def test_what_the_host_hides_is_not_read(idiom):
    model = getattr(idioms, idiom)()
    host = host_of(model)
    gm = capture(model, host.step(12), "export")
    swa_pass.rewrite(gm)
    run(gm, host, 20)
    for n, store in enumerate(store for store in gm.buffers() if store.dim() == 3):
        for b in range(BATCH):
            for p in range(20 - W + 1):
                place = host.table[b, p // 4] * 4 + p % 4 if idiom == "FlatBlocks" else 40 * b + p
                store[place] = float("nan")
        if idiom != "FlatBlocks":
            store[39] = float("nan")  # what pads the list
        assert n < 4
    assert torch.isfinite(result_of(gm(*host.step(20)))).all()


class TestRefusals:
    def unchanged(self, model, reason=""):
        gm = capture(model, host_of(model).step(12), "export")
        before = gm.code
        result = swa_pass.rewrite(gm)
        assert (result.matches, gm.code) == (0, before)
        assert reason in " ".join(result.refusals)

    def test_a_write_before_the_query_is_there(self):
        class Late(idioms.PackedMarked):
            def attend(self, q, keys, values, mask):
                return super().attend(q + self.k_cache_0.mean(), keys, values, mask)

        self.unchanged(Late(), "writes to the store before")

    def test_a_query_that_changes_later(self):
        class Doubled(idioms.PackedMarked):
            def heads(self, n, x, position):
                self.query, k, v = super().heads(n, x, position)
                return self.query.view(self.query.shape), k, v

            def step(self, n, k, v, position):
                out = super().step(n, k, v, position)
                self.query.mul_(2.0)
                return out

        self.unchanged(Doubled(), "changes what the attention needs")

    def test_other_places_for_values(self):
        class Other(idioms.Packed):
            def gathered(self, store, new):
                store.index_copy_(0, self.write, new)
                return store.index_select(0, self.read.flip(0).flip(0))

        self.unchanged(Other(), "different places")

    def test_a_mask_for_every_head(self):
        class Heads(idioms.Packed):
            def step(self, n, k, v, position):
                keys, values, mask = super().step(n, k, v, position)
                return keys, values, mask + torch.zeros(1, HEADS, 1, 1)

        self.unchanged(Heads(), "the mask has the shape")

    def test_gathered_tokens_that_change_again(self):
        class Changed(idioms.PackedMarked):
            def gathered(self, store, new):
                return super().gathered(store, new).mul_(0.5)

        self.unchanged(Changed())

    def test_something_between_the_steps_of_a_softmax(self):
        class Sharper(idioms.FlatBlocks):
            def weights(self, weights):
                return weights * weights

        self.unchanged(Sharper())

    def test_blocks_written_after_the_gather(self):
        """In Dynamo's graph, where the blocks are a view by `unflatten` and not by `view`."""

        class Late(idioms.FlatBlocks):
            def weights(self, weights):
                self.k_cache_0.zero_()
                self.v_cache_0.zero_()
                return weights

        results = []
        torch._dynamo.reset()
        model = Late(layers=1)
        compiled = torch.compile(model, backend=lambda gm, _: results.append(swa_pass.rewrite(gm)) or gm)
        args = host_of(model).step(12)
        with torch.no_grad():
            want = Late(layers=1)(*args)
            assert error(compiled(*args), want) < 1e-5
        assert results[0].matches == 1
        after = names(results[0].graph)
        assert after.index("swa_pass::attend_blocks") < after.index("zero_")

    def test_a_change_in_place_between_the_steps(self):
        class Clipped(idioms.FlatBlocks):
            def weights(self, weights):
                weights.clamp_(min=0.1)
                return weights

        self.unchanged(Clipped())


def test_a_block_that_two_numbers_give_to_two_rows():
    class Weighted(idioms.FlatBlocks):
        def forward(self, ids, position, blocks, groups, bias, slot):
            self.other = groups
            return super().forward(ids, position, blocks, groups.flip(0), bias, slot)

        def layer(self, n, x, position):
            self.groups = self.other
            return super().layer(n, x, position)

    model = Weighted()
    gm = capture(model, host_of(model).step(12), "export")
    assert swa_pass.rewrite(gm).matches == 2
    with pytest.raises(ValueError, match="disagree about whose a block is"):
        gm(*host_of(model).step(12))
