"""What masks are proven to be, from graphs of both levels, and a brute-force check of the decision."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from swa_pass.formula import AtLeastZero, Lin, conjunction, disjunction, is_nonnegative, negation, quotient
from swa_pass.graph import example, integer
from swa_pass.masks import REFUSED, Mask, decide, prove

Q, K = 5, 24


def dynamo_graph(fn, *args):
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True, dynamic=True)(*args)
    return graphs[0]


def aten_graph(fn, *args):
    return make_fx(fn, tracing_mode="symbolic")(*args)


def verdict(capture, fn, *args):
    """Captures ``fn(n, ...)`` and proves its result; the query offset is n[0] or n."""
    gm = capture(fn, *args)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    offset = Lin(0)
    if isinstance(args[0], torch.Tensor):
        first = next(node for node in inputs if integer(node) is None)
        offset = Lin.symbol((first.name, Lin(0)))
    elif inputs:
        offset = integer(inputs[0])
    (mask,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
    mask = mask[0] if isinstance(mask, (tuple, list)) else mask
    return prove(mask, offset, Lin(0), Q)


def grid(n):
    return n[0] + torch.arange(Q)[:, None], torch.arange(K)[None, :]


def causal(n):
    q, k = grid(n)
    return k <= q


def sliding(n):
    q, k = grid(n)
    return (k <= q) & (k > q - 8)


def sliding_7(n):
    q, k = grid(n)
    return (k <= q) & (k >= q - 6)


def sliding_9(n):
    q, k = grid(n)
    return (k <= q) & (k >= q - 8)


def sliding_1(n):
    q, k = grid(n)
    return k == q


def sliding_by_distance(n):
    q, k = grid(n)
    return ((q - k) >= 0) & ((q - k) < 8)


def sliding_by_not(n):
    q, k = grid(n)
    return ~((k > q) | (k + 8 <= q))


def sliding_4d(n):
    return sliding(n)[None, None].expand(2, 1, Q, K)


def sliding_broadcast_late(n):
    q, k = (n[0] + torch.arange(Q))[None, None, :, None], torch.arange(K)[None, None, None, :]
    return torch.logical_and(k <= q, torch.logical_not(k <= q - 8)).expand(2, -1, -1, -1)


def sliding_transposed(n):
    q, k = (n[0] + torch.arange(Q))[None, :], torch.arange(K)[:, None]
    return ((k <= q) & (q - k < 8)).transpose(0, 1)


def sliding_sliced(n):
    q, k = n[0] + torch.arange(Q)[:, None], torch.arange(-3, K + 4)[None, :]
    return ((k <= q) & (k > q - 8))[:, 3 : 3 + K]


def sliding_negated_arithmetic(n):
    q, k = grid(n)
    return (-k >= -q) & (-(q - k) * 3 + 2 > (k - q) * 2 - 6)


def sliding_true_and(n):
    q, k = grid(n)
    return q.new_ones((), dtype=torch.bool) & (k <= q) & (k > q - 8) & (k >= 0)


def additive_inf(n):
    return torch.where(sliding(n), 0.0, float("-inf"))


def additive_large(n):
    return torch.where(sliding(n), 0.0, -1e9)


def additive_small(n):  # softmax leaves such keys some weight
    return torch.where(sliding(n), 0.0, -1.0)


def additive_dtype_min(n):
    shown = torch.zeros((), dtype=torch.float32)
    return torch.where(sliding(n), shown, torch.finfo(torch.float32).min)


def additive_inverted(n):
    return torch.where(sliding(n), -1e9, 0.0)


def hides_self(n):
    q, k = grid(n)
    return (k < q) & (k > q - 8)


def sees_one_ahead(n):
    q, k = grid(n)
    return (k <= q + 1) & (k > q - 8)


def bidirectional(n):
    q, k = grid(n)
    return (q - k < 8) & (k - q < 8)


def chunked(n):
    q, k = grid(n)
    return (k <= q) & (k // 8 == q // 8)


def chunked_by_equality_of_quotients(n):
    q, k = grid(n)
    same = torch.div(k, 8, rounding_mode="floor") == torch.floor_divide(q, 8)
    return torch.where(same & (k <= q), 0.0, float("-inf"))


def chunked_shifted(n):
    q, k = grid(n)
    return (k <= q) & ((k + 1) // 8 == q // 8)


def chunked_unequally(n):
    q, k = grid(n)
    return (k <= q) & (k // 8 == q // 7)


def chunked_one_sided(n):  # all earlier chunks as well
    q, k = grid(n)
    return (k <= q) & (k // 8 <= q // 8)


def chunked_and_sliding(n):
    return chunked(n) & sliding(n)


def everything(n):
    q, k = grid(n)
    return (q - q >= 0) & (k >= 0)


def chunked_behind_pads(n):  # as transformers writes it: the number of pads of each row, gathered
    pads, row = torch.zeros(2, dtype=torch.int64), torch.arange(2)[:, None, None, None]
    q, k = n[0] + torch.arange(Q)[None, None, :, None], torch.arange(K)[None, None, None, :]
    return ((k - pads[row]) // 8 == (q - pads[row]) // 8) & (k <= q)


def gathered_backwards(n):
    q, k = grid(n)
    where = torch.arange(K)
    return (k <= q) & (where[-torch.arange(K)][None, :] > q - 8)


def image_block(n):
    q, k = grid(n)
    return sliding(n) | ((k < 4) & (q < 4))


def absolute(n):
    q, k = grid(n)
    return (k <= q) & (k < 10)


def scaled_query(n):
    q, k = grid(n)
    return k <= 2 * q


def sliding_or_causal(n):
    return sliding(n) | causal(n)


def sliding_or_a_prefix_without_end(n):
    q, k = grid(n)
    return sliding(n) | ((k <= q) & (k - n[0] < float("inf")))


def sliding_or_an_empty_prefix(n):
    q, k = grid(n)
    return sliding(n) | ((k <= q) & (float("inf") <= k))


def sliding_or_a_prefix(n):
    q, k = grid(n)
    return sliding(n) | ((k <= q) & (k < 4))


def sliding_or_a_prefix_to_a_fraction(n):
    q, k = grid(n)
    return sliding(n) | ((k <= q) & (k < 3.5))


def sliding_or_causal_for_some(n):
    return sliding(n) | (causal(n) & (grid(n)[0] > 5))


def empty(n):
    q, k = grid(n)
    return (k <= q) & (k > q + 3)


TABLE = [
    (causal, "full", None),
    (sliding, "sliding", 8),
    (sliding_7, "sliding", 7),
    (sliding_9, "sliding", 9),
    (sliding_1, "sliding", 1),
    (sliding_by_distance, "sliding", 8),
    (sliding_by_not, "sliding", 8),
    (sliding_4d, "sliding", 8),
    (sliding_broadcast_late, "sliding", 8),
    (sliding_transposed, "sliding", 8),
    (sliding_sliced, "sliding", 8),
    (sliding_negated_arithmetic, "sliding", 8),
    (sliding_true_and, "sliding", 8),
    (additive_inf, "sliding", 8),
    (additive_large, "sliding", 8),
    (additive_small, "unknown", None),
    (additive_dtype_min, "sliding", 8),
    (additive_inverted, "unknown", None),
    (hides_self, "unknown", None),
    (sees_one_ahead, "bidirectional", None),
    (bidirectional, "bidirectional", None),
    (everything, "bidirectional", None),
    (chunked, "chunked", 8),
    (chunked_by_equality_of_quotients, "chunked", 8),
    (chunked_behind_pads, "chunked", 8),
    (gathered_backwards, "unknown", None),
    (chunked_shifted, "unknown", None),
    (chunked_unequally, "unknown", None),
    (chunked_one_sided, "unknown", None),
    (chunked_and_sliding, "unknown", None),
    (image_block, "blocks", None),
    (absolute, "unknown", None),
    (scaled_query, "unknown", None),
    (sliding_or_causal, "full", None),
    (sliding_or_a_prefix_without_end, "full", None),
    (sliding_or_an_empty_prefix, "sliding", 8),
    (sliding_or_a_prefix, "blocks", None),
    (sliding_or_a_prefix_to_a_fraction, "blocks", None),
    (sliding_or_causal_for_some, "blocks", None),
    (empty, "unknown", None),
]


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
@pytest.mark.parametrize(("fn", "kind", "window"), TABLE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_table(capture, fn, kind, window):
    got = verdict(capture, fn, torch.tensor([11]))
    assert (got.kind, got.window) == (kind, window), got
    assert bool(got.reason) == (kind in REFUSED), "a refusal needs a reason, and only a refusal"


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
def test_offset_as_number_of_the_graph(capture):
    """A position that is a Python number: the graph has it as a symbol, or as the constant it was."""

    def build(n):
        q, k = torch.arange(Q)[:, None] + n, torch.arange(K)[None, :]
        return (k <= q) & (k > q - 8)

    gm = capture(build, 11)
    numbers = [node for node in gm.graph.nodes if node.op == "placeholder" and integer(node) is not None]
    offset = integer(numbers[0]) if numbers else Lin(11)
    (mask,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
    mask = mask[0] if isinstance(mask, (tuple, list)) else mask
    assert prove(mask, offset, Lin(0), Q) == Mask("sliding", 8)
    # the same mask for queries that sit one further back is another mask
    assert prove(mask, offset - Lin(1), Lin(0), Q).kind in REFUSED


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
def test_padding_is_named(capture):
    """A 2D mask of the caller's, indexed and AND-ed as transformers does it."""

    def build(n, mask):
        return sliding(n)[None, None] & mask[:, None, None, :]

    got = verdict(capture, build, torch.tensor([11]), torch.ones(2, K, dtype=torch.bool))
    assert got.kind == "unknown"
    assert "graph input" in got.reason
    assert "mask" in got.reason or "arg" in got.reason


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
def test_a_mask_that_the_graph_is_given(capture):
    got = verdict(capture, lambda n, mask: mask.clone(), torch.tensor([11]), torch.ones(1, 1, Q, K, dtype=torch.bool))
    assert got.kind == "unknown"
    assert "graph input" in got.reason


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
def test_data_dependent_positions(capture):
    """Query positions read from a tensor, element by element, are no arange: nothing is known about their order."""

    def build(n, positions):
        k = torch.arange(K)[None, :]
        return (k <= positions[:, None]) & (k > positions[:, None] - 8)

    got = verdict(capture, build, torch.tensor([11]), torch.arange(Q) + 11)
    assert got.kind == "unknown"
    assert got.reason


# ------------------------------------------------------------------------------------------ the decision, brute force


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(-3, 3), st.integers(0, 2))
def test_chunks_against_brute_force(chunk, other, shift, ahead):
    """floor(q / C) == floor((k + shift) / D) and k <= q + ahead is chunked exactly where a grid says so."""
    parts = [
        AtLeastZero(QUERY - KEY + Lin(ahead)),
        *(AtLeastZero(side) for side in _both(quotient(QUERY, chunk) - quotient(KEY + Lin(shift), other))),
    ]
    formula = functools.reduce(conjunction, parts)
    same = all(
        (q // chunk == (k + shift) // other and k <= q + ahead) == (q // chunk == k // chunk and k <= q)
        for q in range(90)
        for k in range(90)
    )
    assert (decide(formula, QUERY, KEY).kind == "chunked") <= same
    if not shift and not ahead and chunk == other:
        assert decide(formula, QUERY, KEY) == Mask("chunked", chunk)


def _both(lin):
    return lin, -lin


QUERY, KEY = Lin.symbol("q"), Lin.symbol("k")
SIDE = 16  # positions tried; bounds of atoms stay below half of it


def evaluate(formula, q, k):
    """The formula's value at a point, written without any of the code under test."""
    if isinstance(formula, bool):
        return formula
    if isinstance(formula, AtLeastZero):
        point = {"q": q, "k": k}
        return formula.lin.const + sum(c * point[s] for s, c in formula.lin.terms) >= 0
    name = type(formula).__name__
    if name == "Not":
        return not evaluate(formula.part, q, k)
    return (all if name == "And" else any)(evaluate(part, q, k) for part in formula.parts)


def truth(formula):
    """What the formula is on the grid: ("full", None), ("sliding", W) or None."""
    table = {(q, k): evaluate(formula, q, k) for q in range(SIDE) for k in range(SIDE)}
    if all(value == (k <= q) for (q, k), value in table.items()):
        return "full", None
    for window in range(1, SIDE):
        if all(value == (k <= q and k > q - window) for (q, k), value in table.items()):
            return "sliding", window
    return None


difference = st.builds(
    lambda sign, bound: AtLeastZero((QUERY - KEY).scaled(sign) + Lin(bound)),
    st.sampled_from([1, -1]),
    st.integers(-SIDE // 2 + 1, SIDE // 2 - 1),
)
near_causal = st.sampled_from([AtLeastZero(QUERY - KEY), AtLeastZero(KEY - QUERY + Lin(5)), True])
other = st.builds(
    lambda a, b, c: AtLeastZero(QUERY.scaled(a) + KEY.scaled(b) + Lin(c)) if (a or b) else c >= 0,
    *[st.integers(-2, 2)] * 2,
    st.integers(-6, 6),
)
formulas = st.recursive(
    difference | near_causal | other,
    lambda inner: (
        st.builds(conjunction, inner, inner) | st.builds(disjunction, inner, inner) | st.builds(negation, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=600, deadline=None)
@given(formulas)
def test_a_proof_is_never_wrong(formula):
    got = decide(formula, QUERY, KEY)
    if got.kind not in REFUSED:
        assert truth(formula) == (got.kind, got.window)


@settings(max_examples=200, deadline=None)
@given(st.lists(difference | near_causal, min_size=1, max_size=5))
def test_conjunctions_of_distances_are_always_decided(atoms):
    formula = True
    for atom in atoms:
        formula = conjunction(formula, atom)
    expected = truth(formula)
    got = decide(formula, QUERY, KEY)
    assert (got.kind, got.window) == (expected or (got.kind if got.kind in REFUSED else "unknown", None))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), st.integers(-1, 1), st.integers(-1, 1), st.integers(-50, 50))
def test_one_off_changes_the_verdict(window, lower, upper, shift):
    """d >= lower and d <= W - 1 + upper, with the positions of query and key shifted together."""
    q, k = QUERY + Lin(shift), KEY + Lin(shift)
    formula = conjunction(AtLeastZero(q - k - Lin(lower)), AtLeastZero(k - q + Lin(window - 1 + upper)))
    got = decide(formula, q, k)
    if lower or window + upper < 1:
        assert got.kind in REFUSED
    else:
        assert got == Mask("sliding", window + upper)
    if shift and got.kind not in REFUSED:  # the same formula about queries that sit elsewhere
        assert decide(formula, QUERY, key=k).kind in REFUSED


def last_row(n, x):
    q, k = n[0] + torch.arange(x.shape[0])[:, None], torch.arange(K)[None, :]
    return ((k <= q) & (k > q - 8))[-1:, :]


def last_rows(n, x):
    q, k = n[0] + torch.arange(x.shape[0])[:, None], torch.arange(K)[None, :]
    return ((k <= q) & (k > q - 8))[-2:, :]


@pytest.mark.parametrize("capture", [dynamo_graph, aten_graph])
@pytest.mark.parametrize(("build", "last"), [(last_row, 1), (last_rows, 2)])
def test_the_last_rows_of_a_mask(capture, build, last):
    """A slice from the end of a symbolic length: the rows that are left belong to the last queries."""
    gm = capture(build, torch.tensor([11]), torch.zeros(Q))
    (mask,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
    mask = mask[0] if isinstance(mask, (tuple, list)) else mask
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sizes = [integer(node) for node in inputs if integer(node) is not None] or [integer(example(inputs[-1]).shape[0])]
    first = next(node for node in inputs if integer(node) is None)
    length, offset = sizes[0], Lin.symbol((first.name, Lin(0)))
    assert prove(mask, offset + length - Lin(last), Lin(0), last) == Mask("sliding", 8)
    for wrong in (offset, offset + length, offset + length - Lin(last + 1)):
        assert prove(mask, wrong, Lin(0), last).kind in REFUSED


def test_a_mask_that_is_changed_in_place():
    """Reading the tensor as it was first made would prove a plain sliding window, which it is not any more."""

    def filled(n):
        q, k = grid(n)
        mask = k <= q
        mask.masked_fill_(k < 3, True)
        return mask & (k > q - 4)

    def assigned(n):
        q, k = grid(n)
        mask = (k <= q) & (k > q - 4)
        mask[:, 0] = True
        return mask & (k >= 0)

    def through_a_view(n):
        q, k = grid(n)
        mask = (k <= q) & (k > q - 4)
        mask[2:].logical_or_(k < 3)
        return mask & (k >= 0)

    def before_only(n):
        q, k = grid(n)
        position = k + 1
        position -= 1
        return (position <= q) & (position > q - 4)

    n = torch.tensor([7])
    for fn in (filled, assigned, through_a_view):
        found = verdict(dynamo_graph, fn, n)
        assert found.kind == "unknown", fn.__name__
        assert "in place" in found.reason
    assert verdict(dynamo_graph, before_only, n).kind in ("sliding", "unknown")


@pytest.mark.parametrize("name", ["size", "max", "floor", "if"])
def test_an_input_is_never_taken_for_a_computed_number(name):
    """Its elements may be negative, whatever it is called."""
    assert not is_nonnegative(Lin.symbol((name, Lin(0))))
