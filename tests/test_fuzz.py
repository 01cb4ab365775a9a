"""Random graphs, and random mutations of real ones: the pass never crashes and never changes what a graph computes.

``SWA_PASS_FUZZ=300 pytest tests/test_fuzz.py`` tries as many mutations of each idiom, other ones in each run.
"""

from __future__ import annotations

import copy
import operator
import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from idioms import VOCAB, W
from test_rewrite import OWNED, SLACK, captured, error

import swa_pass

aten = torch.ops.aten
EXAMPLES = int(os.environ.get("SWA_PASS_FUZZ", 0))
#: What became of the mutated graphs: a fuzz test that only meets broken graphs proves nothing.
OUTCOMES: Counter[str] = Counter()
TEXT = torch.randint(0, VOCAB, (2, 2 * W + 4), generator=torch.Generator().manual_seed(2))

#: Operations that take each other's places.
SWAPS = [
    (aten.ge.Scalar, aten.gt.Scalar),
    (aten.lt.Scalar, aten.le.Scalar),
    (aten.ge.Scalar, aten.lt.Scalar),
    (aten.sub.Tensor, aten.add.Tensor),
    (aten.__and__.Tensor, aten.__or__.Tensor),
    (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
    (aten.bitwise_and.Tensor, aten.bitwise_xor.Tensor),
    (aten.remainder.Scalar, aten.fmod.Scalar),
]
SWAPS += [(b, a) for a, b in SWAPS]

#: Operations that leave the shape: put behind a node, before all of its users or one.
EXTRA = [
    lambda g, n: g.call_function(aten.mul.Tensor, (n, 2)),
    lambda g, n: g.call_function(aten.add.Tensor, (n, 1)),
    lambda g, n: g.call_function(aten.neg.default, (n,)),
    lambda g, n: g.call_function(aten.clone.default, (n,)),
    lambda g, n: g.call_function(aten.flip.default, (n, [-1])),
    lambda g, n: g.call_function(aten.roll.default, (n, [1], [-1])),
    lambda g, n: g.call_function(aten.add_.Tensor, (n, 1)),
    lambda g, n: g.call_function(aten.logical_not.default, (n,)),
]


def _changed_number(gm, draw):
    """One integer in one call is another."""
    places = []
    for node in gm.graph.nodes:
        for i, arg in enumerate(node.args if node.op == "call_function" else ()):
            if isinstance(arg, int) and not isinstance(arg, bool):
                places.append((node, i, None))
            if isinstance(arg, (list, tuple)):
                places += [(node, i, j) for j, x in enumerate(arg) if isinstance(x, int)]
    node, i, j = draw(st.sampled_from(places))
    by = draw(st.sampled_from([-2, -1, 1, 2]))
    if j is None:
        node.update_arg(i, node.args[i] + by)
    else:
        inner = list(node.args[i])
        inner[j] += by
        node.update_arg(i, inner)


def _swapped_operation(gm, draw):
    places = [(node, b) for node in gm.graph.nodes for a, b in SWAPS if node.target in (a, getattr(a, "default", None))]
    if places:
        node, target = draw(st.sampled_from(places))
        node.target = target


def _swapped_arguments(gm, draw):
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and len(n.args) > 1]
    node = draw(st.sampled_from([n for n in nodes if all(isinstance(a, torch.fx.Node) for a in n.args[:2])]))
    node.args = (node.args[1], node.args[0], *node.args[2:])


def _extra_operation(gm, draw):
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr") and n.users]
    node = draw(st.sampled_from(nodes))
    make = draw(st.sampled_from(EXTRA))
    users = list(node.users)
    chosen = users if draw(st.booleans()) else [draw(st.sampled_from(users))]
    later = node.next
    while later.op in ("placeholder", "get_attr"):
        later = later.next
    with gm.graph.inserting_before(later):
        extra = make(gm.graph, node)
    for user in chosen:
        if user is not extra:
            user.replace_input_with(node, extra)


def _removed_operation(gm, draw):
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.args and isinstance(n.args[0], torch.fx.Node)]
    node = draw(st.sampled_from(nodes))
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)


def _other_source(gm, draw):
    """One use of a node becomes a use of another one."""
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr", "placeholder") and n.users]
    node = draw(st.sampled_from(nodes))
    user = draw(st.sampled_from(list(node.users)))
    order = list(gm.graph.nodes)
    earlier = [n for n in nodes if order.index(n) < order.index(user) and n is not node]
    if earlier:
        user.replace_input_with(node, draw(st.sampled_from(earlier)))


MUTATIONS = [
    *(_changed_number, _changed_number, _swapped_operation, _swapped_arguments),
    *(_extra_operation, _extra_operation, _removed_operation, _other_source, _other_source),
]


def outcome(gm):
    """Logits of some steps; None where the graph itself fails."""
    steps = []
    try:
        for t in range(TEXT.shape[1]):
            steps.append(gm(TEXT[:, t : t + 1], torch.tensor([t])))
    except Exception:
        return None
    return torch.cat([s[0] if isinstance(s, (tuple, list)) else s for s in steps], dim=1)


@pytest.mark.parametrize("idiom", OWNED)
@settings(max_examples=EXAMPLES or 12, deadline=None, derandomize=not EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutations_of_real_graphs(idiom, data):
    draw = data.draw
    gm = copy.deepcopy(captured(idiom, draw(st.sampled_from(["export", "core"])), eager=draw(st.booleans())))
    for _ in range(draw(st.integers(1, 2))):
        draw(st.sampled_from(MUTATIONS))(gm, draw)
    try:
        gm.graph.lint()
        gm.recompile()
        with torch.no_grad():
            gm = torch.export.export(gm, (TEXT[:, :1], torch.tensor([0]))).module()
    except Exception:
        OUTCOMES["no graph any more"] += 1
        return
    for buffer in gm.buffers():
        if buffer.is_floating_point() and buffer.dim() == 4:
            buffer.zero_()
    own_state = draw(st.booleans())
    ours = copy.deepcopy(gm)
    result = swa_pass.rewrite(ours, own_state=own_state, slack=SLACK)
    want = outcome(gm)
    if want is None:
        OUTCOMES["fails by itself"] += 1
        return
    got = outcome(ours)
    OUTCOMES["rewritten" if result.matches == 2 else "rewritten in part" if result.matches else "left alone"] += 1
    if result.matches == 0:
        assert got is not None
        assert torch.equal(got, want) or torch.isnan(want).any()
    elif not torch.isnan(want).any():  # a row that sees nothing: NaN in one, zeros in the other
        assert got is not None
        assert error(got, want) < 1e-4 * max(1.0, want.abs().max().item())


SHAPE = (2, 2, 6, 8)
UNARY = [
    torch.neg,
    torch.exp,
    lambda x: x.roll(-1, 2),
    lambda x: x.transpose(1, 2).transpose(1, 2),
    lambda x: x[:, :, :],
]
BINARY = [operator.add, operator.mul, torch.maximum, lambda a, b: torch.cat([a[:, :, 1:], b[:, :, :1]], 2)]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_random_graphs(program):
    class Random(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(SHAPE))

        def forward(self, x, y):
            values = [x, y, self.state]
            for unary, which, a, b in program:
                a, b = values[a % len(values)], values[b % len(values)]
                values.append(UNARY[which](a) if unary else BINARY[which](a, b))
            self.state.copy_(values[-1])
            scores = values[-1] @ values[len(values) // 2].transpose(2, 3)
            return torch.softmax(scores, -1) @ values[0]

    args = torch.randn(SHAPE), torch.randn(SHAPE)
    with torch.no_grad():
        gm = torch.export.export(Random(), args).module()
    before, stock = gm.code, copy.deepcopy(gm)
    result = swa_pass.rewrite(gm)
    if result.matches == 0:
        assert gm.code == before
    for _ in range(3):
        torch.testing.assert_close(gm(*args), stock(*args), equal_nan=True)


def test_the_mutations_reach_every_outcome():
    if OUTCOMES.total() >= 5 * 12:  # all of the above ran in this process
        print(dict(OUTCOMES))
        assert OUTCOMES["rewritten"] >= 5
        assert OUTCOMES["left alone"] >= 5
