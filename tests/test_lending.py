"""Rings that are lent to decode graphs of the kind that optimum-habana has: see swa_pass/lending.py, passes/lend.py."""

from __future__ import annotations

import re

import idioms
import pytest
import torch
from idioms import HEAD_DIM, HEADS, KV_HEADS, VOCAB, W
from torch._dynamo.utils import counters

import swa_pass
from swa_pass.graph import op_name
from swa_pass.masks import Mask
from swa_pass.passes import loans

SLOTS, PROMPT, STEPS, KEPT = 48, 13, 24, W + 1
TEXT = torch.randint(0, VOCAB, (3, SLOTS), generator=torch.Generator().manual_seed(1))
MIN = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


class Stock(idioms.Decoder):
    """`forward(ids (B, T), token_idx (), tokens (B, S))`: T > 1 is a prompt; token_idx counts the tokens so far.

    Masks keep W + 1 keys, counted from the last token that `tokens` shows in its first row.
    """

    boolean = False
    sliding = True

    def __init__(self, batch: int = 2, slots: int = SLOTS) -> None:
        super().__init__(layers=2)
        self.cache = [[torch.zeros(batch, KV_HEADS, slots, HEAD_DIM) for _ in "kv"] for _ in range(2)]

    def forward(self, ids, token_idx, tokens):
        queries = ids.shape[1]
        position = token_idx - 1 + torch.zeros(1) if queries == 1 else torch.arange(queries)
        mask = self.mask(tokens, queries)
        x = self.embed[ids] * 2.0
        for n in range(self.layers):
            q, k, v = self.heads(n, x, position)
            x = x + self.merge(n, self.attend(q, *self.kept(n, k, v, token_idx), mask))
        return x @ self.embed.T

    def kept(self, n, k, v, token_idx):
        if k.shape[2] > 1:
            for store, new in zip(self.cache[n], (k, v)):
                store[:, :, : new.shape[2]].copy_(new)
            return k, v
        for store, new in zip(self.cache[n], (k, v)):
            store.index_copy_(2, token_idx - 1, new)
        return self.cache[n]

    def mask(self, tokens, queries):
        keys = tokens.shape[1]
        place = torch.arange(keys)
        query = torch.arange(queries)[:, None]
        if queries == 1:
            query = query + tokens.cumsum(dim=1).argmax(dim=1, keepdim=True)[0]
            far = place <= query - W - 1
        else:
            far = (place <= query - W - 1) | (place > query)
        if not self.sliding:
            far = far & (place < 0)
        pads = (tokens != 1.0)[:, None, None, :].expand(-1, 1, queries, -1)
        if self.boolean:
            return ~far[None, None] & ~pads
        mask = torch.zeros(queries, keys)
        mask.masked_fill_(far, MIN)
        return mask[None, None].expand(tokens.shape[0], 1, queries, keys).masked_fill(pads, MIN)

    def attend(self, q, keys, values, mask):
        batch, heads, queries, _ = q.shape
        q = q.reshape(batch, KV_HEADS, heads // KV_HEADS, queries, HEAD_DIM)
        keys, values = keys.reshape(batch, KV_HEADS, 1, -1, HEAD_DIM), values.unsqueeze(2)
        scores = torch.matmul(q, keys.transpose(-2, -1)) * 0.4
        mask = mask.unsqueeze(1)
        scores = torch.where(mask, scores, MIN) if self.boolean else scores + mask[:, :, :, : keys.shape[-2]]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, values).reshape(batch, HEADS, queries, HEAD_DIM)


class Booleans(Stock):
    boolean = True


class Everything(Stock):
    sliding = False


class Shown(Stock):
    """Its keys leave the graph, so they must be in the store."""

    def forward(self, ids, token_idx, tokens):
        return super().forward(ids, token_idx, tokens), self.cache[0][0][0, 0, 0, 0] + 1


class Given(Stock):
    """The mask is an input."""

    def mask(self, tokens, queries):
        return tokens if tokens.dim() == 4 else super().mask(tokens, queries)


class Inner:
    def __init__(self, compiler="eager"):
        self.graphs, self.options, self.compiler = [], [], compiler

    def __call__(self, gm, inputs, **options):
        self.graphs.append(gm)
        self.options.append(options)
        return torch._dynamo.lookup_backend(self.compiler)(gm, inputs)


def behind(model, compiler="eager", **options):
    """(compiled, inner compiler, our backend)"""
    inner = Inner(compiler)
    backend = swa_pass.backend(inner, **{"window_semantics": "graph", **options})
    return torch.compile(model, backend=backend), inner, backend


class Run:
    """A text through a model, call by call: rows have `pads` on their left, and the prompt has some on its right."""

    def __init__(self, model, batch=2, prompt=PROMPT, pads=(0, 5, 2), slots=SLOTS, right=0):
        self.model, self.ids, self.prompt, self.tokens = model, TEXT[:batch], prompt, torch.zeros(batch, slots).long()
        self.tokens[:, : prompt - right] = 1
        for row in range(batch):
            self.tokens[row, : pads[row]] = 0
        self.token_idx = torch.tensor(prompt - right)

    @torch.no_grad()
    def start(self):
        return self.model(self.ids[:, : self.prompt], self.token_idx, self.tokens[:, : self.prompt])

    @torch.no_grad()
    def step(self, show=True):
        at = int(self.token_idx)
        self.token_idx = torch.tensor(at + 1)
        if show:
            self.tokens[:, at] = 1
        return self.model(self.ids[:, at : at + 1], self.token_idx, self.tokens)

    def all(self, steps=STEPS):
        return torch.cat([self.start()[:, -1:], *(self.step() for _ in range(steps))], dim=1)


def stores(model):
    return [store for layer in model.cache for store in layer]


@pytest.mark.parametrize("kind", [Stock, Booleans])
@pytest.mark.parametrize("prompt", [3, PROMPT])
def test_steps_are_those_of_stock(kind, prompt):
    ours, stock = kind(), kind()
    model, inner, backend = behind(ours, "aot_eager")
    pads = (0, 1, 0) if prompt == 3 else (0, 5, 2)
    for _ in range(2):  # a second text meets the same stores
        for store in [*stores(ours), *stores(stock)]:
            store.fill_(0)
        got, wanted = Run(model, prompt=prompt, pads=pads).all(), Run(stock, prompt=prompt, pads=pads).all()
        assert (got - wanted).abs().max() < 1e-5
    assert len(inner.graphs) == 2
    assert (backend.rings.matches, backend.rings.refusals) == (2, [])
    assert not [node for gm in inner.graphs for node in gm.graph.nodes if "swa_pass::" in op_name(node)]
    assert backend.rings.nbytes == 4 * 2 * KV_HEADS * KEPT * HEAD_DIM * 4
    last = prompt + STEPS - 1
    for store, whole in zip(stores(ours), stores(stock)):
        ring = backend.rings.of(store)
        for position in range(last - W, last + 1):
            torch.testing.assert_close(ring[:, :, position % KEPT], whole[:, :, position])
        assert store.isnan().all()


def test_hf_shows_one_key_less():
    class One(Stock):
        """The same masks, one key narrower."""

        def mask(self, tokens, queries):
            place, query = torch.arange(tokens.shape[1]), torch.arange(queries)[:, None]
            if queries == 1:
                query = query + tokens.cumsum(dim=1).argmax(dim=1, keepdim=True)[0]
            return super().mask(tokens, queries).masked_fill(place <= query - W, MIN)

    model, inner, backend = behind(Stock(), window_semantics="hf")
    got, wanted = Run(model).all(), Run(One()).all()
    assert (got - wanted).abs().max() < 1e-5
    assert (got - Run(Stock()).all()).abs().max() > 1e-2
    assert backend.rings.nbytes == 4 * 2 * KV_HEADS * W * HEAD_DIM * 4
    assert len(inner.graphs) == 2


def test_a_ring_that_is_too_small_is_nan(monkeypatch):
    """The proof says W + 1; if it said W, no number would come out."""
    monkeypatch.setattr(loans, "_prove", lambda *args: Mask("sliding", window=W))
    got, wanted = Run(behind(Stock())[0]).all(), Run(Stock()).all()
    full = got.isnan().any(-1)
    assert (got - wanted)[~full].abs().max() < 1e-5
    assert full[:, 1:].all(1)[0]  # the row without pads shows W + 1 keys from the first step on


@pytest.mark.parametrize("change", [-3, 2])
def test_a_mask_that_speaks_of_another_position_is_nan(change):
    """optimum-habana reads the position off the mask and off token_idx; no graph says that both are one."""
    run = Run(behind(Stock())[0], pads=(0, 0, 0))
    run.start()
    assert not run.step().isnan().any()
    run.tokens[:, : int(run.token_idx) + change] = 1
    run.tokens[:, int(run.token_idx) + change :] = 0
    assert run.step(show=False).isnan().all()


def test_positions_that_are_skipped():
    """A slot knows its position: what the mask hides may be missing, what it shows must be there."""
    ours, stock = Run(behind(Stock())[0], pads=(0, 0, 0)), Run(Stock(), pads=(0, 0, 0))
    for run in (ours, stock):
        run.start()
        run.step()
        run.token_idx = run.token_idx + 2
    assert (ours.step() - stock.step()).abs().max() < 1e-5  # two positions that nobody wrote, hidden
    ours.tokens[:, : int(ours.token_idx)] = 1
    assert ours.step().isnan().all()  # shown


@pytest.mark.parametrize("right", [4, 12])
def test_a_prompt_with_pads_on_its_right(right):
    """The next tokens take the places of the pads."""
    got, wanted = (Run(m, prompt=14, pads=(0, 1), right=right).all() for m in (behind(Stock())[0], Stock()))
    assert (got - wanted)[:, 1:].abs().max() < 1e-5


def test_beyond_the_store():
    run = Run(behind(Stock())[0])
    run.all()
    run.token_idx = torch.tensor(SLOTS + 2)
    run.tokens[:] = 1
    with torch.no_grad():
        assert run.model(run.ids[:, :1], run.token_idx, run.tokens).isnan().all()


def test_stores_that_change_between_steps():
    ours = Stock()
    run = Run(behind(ours)[0])
    run.all(3)
    for store in stores(ours):
        store.copy_(store.index_select(0, torch.tensor([1, 0])))
    with pytest.raises(RuntimeError, match="beam search does"):
        run.step()
    assert not Run(run.model).all(3).isnan().any()  # the next prompt writes the stores anew


def test_other_batches_and_lengths():
    ours = Stock()
    model, _, backend = behind(ours, "aot_eager")
    for batch, slots, prompt in ((2, SLOTS, PROMPT), (3, SLOTS - 7, 10)):
        stock = Stock(batch, slots)
        ours.cache = Stock(batch, slots).cache
        got, wanted = (Run(m, batch, prompt, slots=slots).all(12) for m in (model, stock))
        assert (got - wanted).abs().max() < 1e-5
    # The rings of stores that are gone went with them.
    assert backend.rings.nbytes == 4 * 3 * KV_HEADS * KEPT * HEAD_DIM * 4
    assert not backend.rings.refusals


@pytest.mark.parametrize(("kind", "reason"), [(Shown, "also read by"), (Given, "graph input .*whole decoder")])
def test_refusals(kind, reason, caplog):
    ours, stock = kind(), kind()
    model, _, backend = behind(ours)
    for run in (Run(model), Run(stock)):
        run.start()
    tokens = Run(stock).tokens
    tokens[:, PROMPT] = 1
    given = tokens if kind is Shown else Stock().mask(tokens, 1)
    with torch.no_grad():
        got, wanted = (m(TEXT[:2, :1], torch.tensor(PROMPT + 1), given) for m in (model, stock))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0 if kind is Given else 1e-5)
    left = 1 if kind is Shown else 2  # layers, of two
    torch.testing.assert_close(ours.cache[:left], stock.cache[:left], rtol=0, atol=0)
    assert [re.search(reason, refusal) is not None for refusal in backend.rings.refusals] == [True] * left
    assert backend.rings.matches == 2 - left
    assert "left alone" in caplog.text


def test_a_graph_that_reads_a_store_that_is_behind():
    ours = Given()
    model, _, _ = behind(ours)
    run = Run(model)
    run.all(2)
    with pytest.raises(RuntimeError, match="could not be rewritten reads keys"), torch.no_grad():
        model(TEXT[:2, :1], run.token_idx + 1, Stock().mask(run.tokens, 1))


def test_layers_without_a_window_are_left_alone():
    ours, stock = Everything(), Everything()
    model, _, backend = behind(ours)
    torch.testing.assert_close(Run(model).all(), Run(stock).all(), rtol=0, atol=0)
    assert (backend.rings.matches, backend.rings.refusals, backend.rings.nbytes) == (0, [], 0)
    torch.testing.assert_close(stores(ours), stores(stock), rtol=0, atol=0)


def test_a_store_no_longer_than_the_window():
    ours, stock = Stock(slots=KEPT), Stock(slots=KEPT)
    model, _, backend = behind(ours)
    got, wanted = (Run(m, prompt=4, pads=(0, 1), slots=KEPT).all(3) for m in (model, stock))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert "no more than the window" in backend.rings.refusals[0]


def test_poison_in_slots_that_hold_nothing():
    ours = Stock()
    model, _, backend = behind(ours)
    run, stock = Run(model, prompt=3, pads=(0, 1)), Run(Stock(), prompt=3, pads=(0, 1))
    run.start(), stock.start(), run.step(), stock.step()
    for _ in range(3):
        for store in stores(ours):
            backend.rings.of(store)[:, :, int(run.token_idx) + 1 :] = 1e4  # finite: a mask is added
        assert (run.step() - stock.step()).abs().max() < 1e-5


def test_inference_mode_stores_are_refused():
    ours = Stock()
    with torch.inference_mode():
        ours.cache = Stock().cache
    run = Run(behind(ours)[0])
    with pytest.raises(RuntimeError, match="inference"):
        run.all(2)


def test_options_go_on_to_the_inner_compiler():
    inner = Inner()
    model = torch.compile(Stock(), backend=swa_pass.backend(inner), options={"keep_input_mutations": True})
    Run(model).start()
    assert inner.options == [{"options": {"keep_input_mutations": True}}]


def test_no_operator_of_ours_reaches_hpu_backend(monkeypatch):
    seen = []

    def inner(gm, inputs):
        seen.append([op_name(node) for node in gm.graph.nodes])
        return lambda *args: (torch.zeros(2, 1, VOCAB),)  # what the graph computes does not matter here

    found = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inner if name == "hpu_backend" else found(name))
    for compiler in (inner, "hpu_backend"):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(idioms.IndexCopy(), backend=swa_pass.backend(compiler))(TEXT[:2, :1], torch.tensor([0]))
    assert "swa_pass::attend_append" in seen[0]
    assert not [name for name in seen[1] if "swa_pass" in name]


def test_stores_get_rings_on_gaudi_or_on_demand_only():
    model, inner = Stock(), Inner()
    backend = swa_pass.backend(inner)
    Run(torch.compile(model, backend=backend)).all(2)
    assert (backend.rings.matches, backend.rings.nbytes) == (0, 0)
    assert not any(store.isnan().any() for layer in model.cache for store in layer)


def test_window_semantics_that_nobody_knows():
    with pytest.raises(ValueError, match="window_semantics='w'"):
        swa_pass.backend("eager", window_semantics="w")
