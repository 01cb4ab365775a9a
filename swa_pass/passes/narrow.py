"""Masks of prompts that show one key too many, made to show W: `window_semantics="hf"`.

optimum-habana's masks keep W + 1 keys, upstream transformers W. Where a mask (.., T, T) of a prompt is proven to hide
every key more than d positions before the query, it gets to hide the one at distance d as well.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..formula import Lin
from ..graph import example, shape_of
from ..masks import implied
from ..patterns import token_store
from .adopt import Caller
from .loans import between, last_tokens, sites, without_group

aten = torch.ops.aten


def narrow_prompts(gm: GraphModule) -> int:
    """Rewrites in place. Returns how many attentions of several queries a row see one key fewer now."""
    memo, call = last_tokens(gm), Caller(gm)
    narrowed: dict[Node, Node] = {}
    count = 0
    for site, problem in list(sites(gm)):
        plain = without_group(site.mask) if not problem and token_store.keeps(site.key) else None
        if plain is None or plain.op == "placeholder" or len(shape_of(plain)) != 4:
            continue
        queries, keys = shape_of(plain)[2:]
        if str(queries) in ("0", "1") or str(queries) != str(keys) or plain in narrowed.values():
            continue
        distances = [(form - (Lin.symbol("k") - Lin.symbol("q"))) for form in implied(plain, memo)]
        windows = [distance.const for distance in distances if distance.is_const and distance.const > 0]
        if not windows:
            continue  # no window: a global layer, or a prompt that the graph runs without one
        if plain not in narrowed:
            with gm.graph.inserting_before(plain.next):
                narrowed[plain] = _without_the_oldest(call, plain, min(windows))
        mask = narrowed[plain]
        if len(shape_of(site.mask)) == 5:
            with gm.graph.inserting_before(between(site)[0]):
                mask = call(aten.unsqueeze.default, mask, 1)
        for node in between(site):
            node.replace_input_with(site.mask, mask)
        count += 1
    return count


def _without_the_oldest(call: Caller, mask: Node, distance: int) -> Node:
    value, length = example(mask), shape_of(mask)[3]
    length = length if isinstance(length, int) else call(aten.sym_size.int, mask, 3)
    place = call(aten.arange.default, length, device=value.device)
    far = call(aten.le.Tensor, place, call(aten.sub.Scalar, call(aten.reshape.default, place, [-1, 1]), distance))
    hidden = False if value.dtype == torch.bool else torch.finfo(value.dtype).min
    return call(aten.masked_fill.Scalar, mask, far, hidden)
