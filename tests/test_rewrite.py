"""`swa_pass.rewrite`: every cache idiom in every form of graph, against the same decoder without a cache."""

from __future__ import annotations

import copy
import functools
import itertools

import idioms
import pytest
import torch
from idioms import HEAD_DIM, KV_HEADS, SLOTS, VOCAB, W
from torch.fx.experimental.proxy_tensor import make_fx

import swa_pass
from swa_pass.graph import op_name

TEXT = torch.randint(0, VOCAB, (idioms.BATCH, 5 * W + 1), generator=torch.Generator().manual_seed(1))
SLACK = 4
OWNED = ["IndexCopy", "IndexPut", "Roll", "Shift", "ShiftOpen", "Gather"]
#: What each idiom writes or moves with, in any form of graph; none of it may be left.
CACHE_OPS = {"index_copy_", "index_copy", "index_put_", "index_put", "setitem", "roll", "index_select", "copy_", "cat"}


@functools.lru_cache(None)
def captured(idiom: str, form: str, **knobs):
    """The decode graph of a decoder; `knobs` go to its constructor."""
    return _capture(getattr(idioms, idiom)(**knobs), (TEXT[:, :1], torch.tensor([0])), form)


def _capture(model, args, form):
    with torch.no_grad():
        if form == "make_fx":
            return make_fx(model)(*args)
        program = torch.export.export(model, args)
        return (program if form == "export" else program.run_decompositions()).module()


def dynamo_graph(model, args):
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def graph(idiom, form, **knobs):
    """A fresh copy, with states of its own that are empty."""
    gm = copy.deepcopy(captured(idiom, form, **knobs))
    for name, buffer in gm.named_buffers():
        if buffer.dim() == 4 and buffer.is_floating_point():
            getattr(gm, name).zero_()
    return gm


def decode(gm, first=0, stop=TEXT.shape[1]):
    steps = []
    for t in range(first, stop):
        out = gm(TEXT[:, t : t + 1], torch.tensor([t]))
        steps.append(out[0] if isinstance(out, (tuple, list)) else out)
    return torch.cat(steps, dim=1)


def expected(**knobs):
    return idioms.Decoder(**knobs).reference(TEXT)


def names(gm):
    return [op_name(node) for node in gm.graph.nodes]


def error(a, b):
    return (a - b).abs().max().item()


@pytest.mark.parametrize("eager", [False, True], ids=["sdpa", "eager"])
@pytest.mark.parametrize("form", ["export", "core", "make_fx"])
@pytest.mark.parametrize("idiom", OWNED)
def test_every_idiom_becomes_rings(idiom, form, eager):
    gm = graph(idiom, form, eager=eager)
    result = swa_pass.rewrite(gm, slack=SLACK)
    assert result.graph is gm
    assert (result.matches, result.refusals) == (2, [])
    assert "softmax" in result.ops_before or any("scaled_dot_product" in name for name in result.ops_before)
    left = names(gm)
    assert not any(name == "softmax" or "scaled_dot_product" in name for name in left)
    assert left.count("swa_pass::attend_append") == 2
    counter = [node for node in gm.graph.nodes if op_name(node) == "copy_"]
    assert [str(node.args[0].target) for node in counter] == ["swa_pass_seen"]
    assert not CACHE_OPS & set(left) - {"copy_"}
    assert error(decode(gm), expected()) < 1e-5
    assert gm.swa_pass_seen.tolist() == [TEXT.shape[1]] * 2
    slots = W + (SLACK if idiom.startswith("Index") else 0)
    rings = {name: ring for name, ring in result.owned.items() if "ring" in name}
    assert len(rings) == 4
    assert all(ring.shape == (idioms.BATCH, KV_HEADS, slots, HEAD_DIM) for ring in rings.values())


@pytest.mark.parametrize("idiom", [name for name in OWNED if name != "ShiftOpen"])  # whose slots are its window
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_is_seen(idiom, off):
    """The check above can fail: the mask shows one key more, or one less, and the graph follows the mask."""
    slots = getattr(idioms, idiom).slots
    gm = graph(idiom, "export", shown=W + off)
    assert swa_pass.rewrite(gm, slack=SLACK).matches == 2
    got = decode(gm)
    if off == 1 and slots == W:  # a window of W slots holds no more, whatever the mask would show
        assert error(got, expected()) < 1e-5
    else:
        assert error(got, expected(window=W + off)) < 1e-5
        assert error(got, expected()) > 1e-2


@pytest.mark.parametrize("idiom", ["IndexCopy", "Roll"])
def test_rings_hold_the_last_keys(idiom):
    gm, stock = graph(idiom, "export"), graph(idiom, "export")
    swa_pass.rewrite(gm, slack=SLACK)
    decode(gm), decode(stock)
    seen = TEXT.shape[1]
    for kind in "kv":
        ring, state = getattr(gm, f"swa_pass_ring_{kind}_cache_1"), getattr(stock, f"{kind}_cache_1")
        for back in range(1, W + 1):
            place = seen - back if idiom == "IndexCopy" else W - back
            torch.testing.assert_close(ring[:, :, (seen - back) % ring.shape[2]], state[:, :, place])


def test_twice_is_once():
    gm = graph("IndexCopy", "core")
    swa_pass.rewrite(gm)
    code = gm.code
    again = swa_pass.rewrite(gm)
    assert (again.matches, again.refusals, again.owned, gm.code) == (0, [], {}, code)
    assert again.ops_before == again.ops_after


class TestPositions:
    """Rings know the order of the calls only, so a caller who jumps must hear of it."""

    def rewritten(self, idiom="IndexCopy"):
        gm = graph(idiom, "export")
        swa_pass.rewrite(gm, slack=SLACK)
        return gm

    def test_going_back_within_the_slack_is_exact(self):
        gm = self.rewritten()
        decode(gm, stop=30)
        assert error(decode(gm, 30 - SLACK), expected()[:, 30 - SLACK :]) < 1e-5

    @pytest.mark.parametrize("idiom", ["IndexCopy", "Roll", "Gather"])
    def test_another_position_is_an_error_and_changes_nothing(self, idiom):
        gm = self.rewritten(idiom)
        decode(gm, stop=20)
        before = {name: buffer.clone() for name, buffer in gm.named_buffers()}
        for position in (21, 20 - SLACK - 1):
            with pytest.raises(RuntimeError, match="positions must go on"):
                gm(TEXT[:, :1], torch.tensor([position]))
        assert all(torch.equal(buffer, before[name]) for name, buffer in gm.named_buffers())
        assert error(decode(gm, 20), expected()[:, 20:]) < 1e-5

    @pytest.mark.parametrize("idiom", ["IndexCopy", "Roll", "Shift", "Gather"])
    def test_a_new_text_starts_at_zero(self, idiom):
        gm = self.rewritten(idiom)
        decode(gm, stop=23)
        assert error(decode(gm), expected()) < 1e-5


class TestRefusals:
    """What is not proven stays: the same nodes, the same bits."""

    def unchanged(self, model, reason, args=None, **options):
        args = args or (TEXT[:, :1], torch.tensor([0]))
        gm = _capture(model, args, "export")
        before = gm.code
        result = swa_pass.rewrite(gm, **options)
        assert result.matches == 0
        assert gm.code == before
        assert reason in " ".join(result.refusals), result.refusals
        return gm

    def test_a_mask_that_comes_from_outside(self):
        class Given(idioms.IndexCopy):
            def forward(self, ids, position, given):
                self.given = given
                return super().forward(ids, position)

            def causal(self, position, key):
                return self.given

        mask = torch.ones(1, 1, 1, SLOTS, dtype=torch.bool)
        self.unchanged(Given(), "the graph input given", (TEXT[:, :1], torch.tensor([0]), mask))

    def test_a_window_whose_empty_slots_are_seen(self):
        class Empty(idioms.Roll):
            def causal(self, position, key):
                distance = position[:, None] - key[None, :]
                return ((distance >= 0) & (distance < W))[None, None]

        self.unchanged(Empty(), "slots that hold no token yet")

    def test_keys_that_something_else_reads(self):
        class Leaks(idioms.IndexCopy):
            def forward(self, ids, position):
                return super().forward(ids, position), self.k_cache_1.sum()

        gm = _capture(Leaks(), (TEXT[:, :1], torch.tensor([0])), "export")
        result = swa_pass.rewrite(gm)
        assert result.matches == 1
        assert "also read by the output" in result.refusals[0]
        assert error(decode(gm), expected()) < 1e-5

    def test_positions_that_change_in_place(self):
        class Moves(idioms.IndexCopy):
            def step(self, n, k, v, position):
                for store, new in zip(self.stores(n), (k, v)):
                    store.index_copy_(2, position, new)
                position.add_(1)
                return *self.stores(n), self.causal(position, torch.arange(SLOTS))

        self.unchanged(Moves(), "see 1 later keys")  # the mask is one position further than the write
        result = swa_pass.rewrite(dynamo_graph(Moves(), (TEXT[:, :1], torch.tensor([0]))))
        assert result.matches == 0

    def test_a_boolean_that_is_added(self):
        """Found by the fuzz test: True adds 1 to a score, and hides nothing."""

        model = idioms.IndexCopy(eager=True)
        gm = _capture(model, (TEXT[:, :1], torch.tensor([0])), "export")
        for node in list(gm.graph.nodes):
            if op_name(node) == "where":
                node.replace_all_uses_with(node.args[0])
        gm.graph.lint()
        gm.recompile()
        result = swa_pass.rewrite(gm)
        assert result.matches == 0
        assert "torch.bool is added to the scores" in result.refusals[0]

    def test_a_position_that_is_no_element_of_an_input(self):
        class Computed(idioms.Roll):
            def step(self, n, k, v, position):
                return super().step(n, k, v, position.clamp(min=3))

        self.unchanged(Computed(), "no element of an input")

    def test_a_second_name_for_the_state(self):
        """Somebody who reads the store between the write and the attention would miss the token."""

        class Peeks(idioms.IndexCopy):
            def step(self, n, k, v, position):
                out = super().step(n, k, v, position)
                self.seen = self.stores(n)[0][:, :, 0].clone()
                return out

            def forward(self, ids, position):
                return super().forward(ids, position), self.seen

        gm = make_fx(Peeks(layers=1))(TEXT[:, :1], torch.tensor([0]))
        assert swa_pass.rewrite(gm, own_state=False).matches == 0

    def test_a_roll_by_two(self):
        class Two(idioms.Roll):
            def step(self, n, k, v, position):
                result = []
                for store, new in zip(self.stores(n), (k, v)):
                    rolled = store.roll(-2, dims=-2)
                    rolled[:, :, torch.tensor([-1])] = new
                    store.copy_(rolled)
                    result.append(rolled)
                return *result, self.causal(position, position - (W - 1) + torch.arange(W))

        self.unchanged(Two(), "")

    @pytest.mark.parametrize("idiom", ["Roll", "Shift", "Gather"])
    def test_a_window_of_the_callers(self, idiom):
        model = getattr(idioms, idiom)()
        self.unchanged(model, "belongs to the caller", own_state=False)

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match=r"swa_pass\.apply"):
            swa_pass.rewrite(idioms.Roll())
        with pytest.raises(ValueError, match="slack"):
            swa_pass.rewrite(graph("Roll", "export"), slack=-1)


class TestShared:
    """A store with a slot for every position keeps its layout: nobody else can tell."""

    @pytest.mark.parametrize("idiom", ["IndexCopy", "IndexPut"])
    @pytest.mark.parametrize("form", ["export", "core", "make_fx"])
    def test_stays_the_same_store(self, idiom, form):
        gm, stock = graph(idiom, form), graph(idiom, form)
        result = swa_pass.rewrite(gm, own_state=False)
        assert (result.matches, result.owned) == (2, {})
        assert error(decode(gm), decode(stock)) < 1e-5
        states = [(a, b) for a, b in zip(gm.buffers(), stock.buffers()) if a.dim() == 4]
        assert len(states) == 4
        for ours, theirs in states:
            torch.testing.assert_close(ours, theirs)

    def test_reads_the_window_only(self):
        gm = graph("IndexCopy", "export")
        swa_pass.rewrite(gm, own_state=False)
        decode(gm, stop=30)
        for name, state in gm.named_buffers():
            if "cache" in name:
                state[:, :, : 30 - (W - 1)] = float("nan")  # left of the window
                state[:, :, 30:] = float("nan")  # not written yet
        assert error(decode(gm, 30), expected()[:, 30:]) < 1e-5

    @pytest.mark.parametrize("own_state", [True, False])
    def test_a_prefix_ends_where_it_ends(self, own_state):
        """Beyond the slots that are read, stock does not see its newest key: an error, not another result."""

        class Prefix(idioms.IndexCopy):
            def step(self, n, k, v, position):
                keys, values, _ = super().step(n, k, v, position)
                return keys[:, :, :20], values[:, :, :20], self.causal(position, torch.arange(20))

        gm = _capture(Prefix(), (TEXT[:, :1], torch.tensor([0])), "export")
        assert swa_pass.rewrite(gm, own_state=own_state, slack=SLACK).matches == 2
        for buffer in gm.buffers():
            buffer.zero_()
        assert error(decode(gm, stop=20), expected()[:, :20]) < 1e-5
        with pytest.raises(RuntimeError, match="holds 20 positions"):
            gm(TEXT[:, :1], torch.tensor([20]))

    def test_past_its_end_is_an_error(self):
        gm = graph("IndexCopy", "export")
        swa_pass.rewrite(gm, own_state=False)
        with pytest.raises(RuntimeError, match="holds 64 positions"):
            gm(TEXT[:, :1], torch.tensor([SLOTS]))


class TestPrograms:
    """torch.export programs: a prefill of any length, and decode."""

    def program(self, decompose=False):
        tokens = torch.export.Dim("tokens", min=2, max=4 * W)
        args = (TEXT[:, :5], torch.arange(5))
        with torch.no_grad():
            program = torch.export.export(idioms.IndexCopy(), args, dynamic_shapes=({1: tokens}, {0: tokens}))
            return program.run_decompositions() if decompose else program

    @pytest.mark.parametrize("decompose", [False, True], ids=["training", "core"])
    def test_a_prefill_of_any_length(self, decompose):
        program = self.program(decompose)
        result = swa_pass.rewrite(program, slack=SLACK)
        assert isinstance(result.graph, torch.export.ExportedProgram)
        assert result.matches == 2
        for length in (2, W - 1, W, 3 * W):
            module = result.graph.module()
            out = module(TEXT[:, :length], torch.arange(length))
            assert error(out, expected()[:, :length]) < 1e-5
            more = module(TEXT[:, length : length + 6], torch.arange(length, length + 6))  # a chunk on a warm ring
            assert error(more, expected()[:, length : length + 6]) < 1e-5

    def test_positions_must_follow_one_another(self):
        module = swa_pass.rewrite(self.program()).graph.module()
        with pytest.raises(RuntimeError, match="must follow one another"):
            module(TEXT[:, :3], torch.tensor([0, 2, 3]))

    def test_saved_and_loaded(self, tmp_path):
        result = swa_pass.rewrite(self.program(), slack=SLACK)
        torch.export.save(result.graph, tmp_path / "rings.pt2")
        module = torch.export.load(tmp_path / "rings.pt2").module()
        assert error(module(TEXT[:, : 2 * W], torch.arange(2 * W)), expected()[:, : 2 * W]) < 1e-5

    def test_nothing_found_gives_the_program_back(self):
        with torch.no_grad():
            program = torch.export.export(torch.nn.Linear(3, 3), (torch.ones(1, 3),))
        assert swa_pass.rewrite(program).graph is program


class TestSliced:
    """A start that is a number: one program for all of them, and for prompts of any length."""

    def program(self, decompose, **knobs):
        """Decomposed, only for one token: torch 2.13 trips over its own guards on a number and a dynamic size."""
        sizes, tokens = ({}, 1) if decompose else ({1: torch.export.Dim.DYNAMIC}, 3)
        dims = (sizes, torch.export.Dim.DYNAMIC)
        with torch.no_grad():
            program = torch.export.export(idioms.Sliced(**knobs), (TEXT[:, :tokens], 5), dynamic_shapes=dims)
            return program.run_decompositions() if decompose else program

    @pytest.mark.parametrize("own_state", [True, False])
    @pytest.mark.parametrize("decompose", [False, True], ids=["training", "core"])
    def test_prefill_and_chunks(self, decompose, own_state):
        module = self.program(decompose).module()
        result = swa_pass.rewrite(module, own_state=own_state, slack=SLACK)
        assert (result.matches, result.refusals) == (2, [])
        assert len(result.owned) == (5 if own_state else 0)
        assert not {"slice_scatter", "index_put"} & set(names(module))
        borders = range(42) if decompose else (0, 11, 14, 30, 41)
        got = torch.cat([module(TEXT[:, a:b], a) for a, b in itertools.pairwise(borders) if b <= 41], dim=1)
        assert error(got, expected()) < 1e-5

    def test_a_window_that_is_off_by_one_is_seen(self):
        module = self.program(False, shown=W + 1).module()
        assert swa_pass.rewrite(module).matches == 2
        assert error(module(TEXT[:, :30], 0), expected()[:, :30]) > 1e-2


class TestJoined:
    """DynamicCache: the state goes in and out, so only the attention changes."""

    @pytest.mark.parametrize("form", ["export", "core", "make_fx"])
    @pytest.mark.parametrize("held", [W - 1, 3])
    def test_old_and_new_tokens_are_read_where_they_are(self, form, held):
        torch.manual_seed(0)
        past = [torch.randn(idioms.BATCH, KV_HEADS, held, HEAD_DIM) for _ in range(4)]
        args = (TEXT[:, :1], torch.tensor([held]), *past)
        model = idioms.Cat()
        gm = _capture(model, args, form)
        result = swa_pass.rewrite(gm)
        assert (result.matches, result.owned) == (2, {})
        assert names(gm).count("swa_pass::attend") == 2
        for ours, theirs in zip(gm(*args), model(*args)):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)

    def test_an_inner_window(self):
        """The cache holds more than the mask shows."""
        past = [torch.randn(idioms.BATCH, KV_HEADS, 20, HEAD_DIM) for _ in range(4)]
        args = (TEXT[:, :1], torch.tensor([20]), *past)
        model = idioms.Cat()
        gm = _capture(model, args, "export")
        assert swa_pass.rewrite(gm).matches == 2
        assert error(gm(*args)[0], model(*args)[0]) < 1e-5
        assert error(gm(*args)[0], idioms.Cat(shown=W + 1)(*args)[0]) > 1e-3
