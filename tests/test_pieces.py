"""Equal layers are compiled once, and only equal ones."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import F, Pair, S, W, assert_oracle, feed, full_logits, one_by_one, tiny, token_ids

import swa_pass
from swa_pass.graph import op_name
from swa_pass.pieces import as_module, assemble, compile_in_pieces, cut, signature


@pytest.fixture(scope="module")
def graph():
    """The decode graph of six layers after the pass, and example inputs."""
    graphs = []

    def keep(gm, inputs):
        graphs.append((copy.deepcopy(gm), inputs))
        return gm.forward

    stock = tiny("gemma3", layer_types=[S, S, F, S, S, F])
    pair = Pair(swa_pass.apply(copy.deepcopy(stock), backend=keep), stock)
    ids = token_ids(W + 8)
    got, _ = feed(pair, ids, one_by_one(W + 3, 5))
    assert_oracle(pair, got, lambda model: full_logits(model, ids))
    return graphs[-1][0]


def compiler_that_counts(seen):
    def compiler(gm, inputs):
        seen.append(gm)
        return gm.forward

    return compiler


def real(gm):
    """Random values for the inputs of a graph, from what Dynamo noted about them."""
    torch.manual_seed(0)
    values = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["example_value"]
            if isinstance(fake, torch.Tensor):
                shape = [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in fake.shape]
                values.append(
                    torch.rand(shape).to(fake.dtype)
                    if fake.is_floating_point()
                    else torch.ones(shape, dtype=fake.dtype)
                )
            else:
                values.append(int(fake.node.hint) if isinstance(fake, torch.SymInt) else fake)
    return values


def test_six_layers_are_three_pieces(graph):
    seen = []
    pieces = cut(graph)
    assert len(pieces) == 7
    assert len({signature(piece) for piece in pieces}) == 3
    whole = compile_in_pieces(graph, [], compiler_that_counts(seen))
    assert len(seen) == 3
    inputs = real(graph)
    expected = graph(*copy.deepcopy(inputs))
    got = whole(*copy.deepcopy(inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_writes_happen_in_place_and_once(graph):
    inputs = real(graph)
    one, other = copy.deepcopy(inputs), copy.deepcopy(inputs)
    graph(*one)
    compile_in_pieces(graph, [], compiler_that_counts([]))(*other)
    changed = 0
    for before, a, b in zip(inputs, one, other, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
            changed += not torch.equal(before, a)
    assert changed == 12, "keys and values of six layers"


def test_the_compiler_sees_no_store(graph):
    seen = []
    compile_in_pieces(graph, [], compiler_that_counts(seen))
    stores = {
        node for each in graph.graph.nodes if op_name(each) == "swa_pass::attend_append" for node in each.args[3:5]
    }
    assert len(stores) == 12
    assert not stores & {source for piece in cut(graph) for source in piece.inputs}
    assert not any("swa_pass" in op_name(node) for gm in seen for node in gm.graph.nodes)


def test_a_constant_in_the_middle_of_a_piece(graph):
    changed = copy.deepcopy(graph)
    changed.register_buffer("one", torch.ones(()))
    middle = cut(changed)[2].nodes[4]
    value = middle.meta["example_value"]
    with changed.graph.inserting_after(middle):
        constant = changed.graph.get_attr("one")
    constant.meta["example_value"] = changed.one
    with changed.graph.inserting_after(constant):
        product = changed.graph.call_function(torch.mul, (middle, constant))
    product.meta["example_value"] = value
    middle.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    changed.recompile()
    inputs = real(changed)
    expected = graph(*copy.deepcopy(inputs))
    got = compile_in_pieces(changed, [], compiler_that_counts([]))(*copy.deepcopy(inputs))
    assert torch.equal(got[0], expected[0])


def test_another_constant_is_another_piece(graph):
    changed = copy.deepcopy(graph)
    middle = cut(changed)[2]
    node = next(n for n in middle.nodes if any(isinstance(a, float) and a > 0.1 for a in n.args))
    node.args = tuple(a * 2 if isinstance(a, float) else a for a in node.args)
    changed.recompile()
    pieces = cut(changed)
    assert len({signature(piece) for piece in pieces}) == 4
    functions = [as_module(changed, piece)[0].forward for piece in pieces]
    functions[2] = functions[3]  # what sharing it would have computed
    inputs = real(changed)
    right, wrong = (
        changed(*copy.deepcopy(inputs)),
        assemble(changed, pieces, [_plain(f) for f in functions])(*copy.deepcopy(inputs)),
    )
    assert not torch.allclose(right[0], wrong[0])


def _plain(function):
    def call(*args):
        return function(*args)

    return call


def test_a_graph_that_writes_elsewhere_stays_whole(graph):
    changed = copy.deepcopy(graph)
    middle = cut(changed)[2].nodes[3]
    with changed.graph.inserting_after(middle):
        changed.graph.call_method("add_", (middle, 1))
    seen = []
    compile_in_pieces(changed, [], compiler_that_counts(seen))
    assert seen == [changed]


def test_a_graph_without_attention_stays_whole():
    seen = []
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    compile_in_pieces(gm, [], compiler_that_counts(seen))
    assert seen == [gm]
