"""Steps whose rings count from their first key: nothing but proven attention may see such a position."""

from __future__ import annotations

import copy

import pytest
import torch
from families import BY_NAME, batch, build, stepwise, whole

import swa_pass
from swa_pass import runtime
from swa_pass.api import runtime_of
from swa_pass.passes import counts_from_first

WINDOW = 8


def graph(fn):
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True)(torch.tensor([11]), torch.zeros(3))
    return graphs[0]


def held(lengths, window=WINDOW):
    return lengths[0] - torch.clamp(lengths[0] - (window - 1), min=0)


@pytest.mark.parametrize(
    ("fn", "counts"),
    [
        pytest.param(lambda n, x: x + held(n), True, id="itself"),
        pytest.param(lambda n, x: x * torch.log(held(n) + torch.arange(3) + 1.0), True, id="positions"),
        pytest.param(lambda n, x: x + held(n, 1), True, id="window-of-one"),
        pytest.param(lambda n, x: x + n[0], False, id="tokens"),
        pytest.param(lambda n, x: x + torch.clamp(n[0] - (WINDOW - 1), min=0), False, id="first-key"),
        pytest.param(lambda n, x: x + (n[0] - WINDOW), False, id="difference"),
    ],
)
def test_what_is_left_of_the_count(fn, counts):
    assert counts_from_first(graph(fn)) == counts


@pytest.fixture(scope="module")
def stock():
    return build(BY_NAME["gemma4_unified"])


@pytest.mark.parametrize(
    ("elsewhere", "checked"),
    [
        pytest.param(False, True, id="in-masks"),
        pytest.param(True, True, id="also-elsewhere"),
        pytest.param(True, False, id="also-elsewhere-unchecked"),
    ],
)
def test_a_position_used_elsewhere_runs_eager(stock, monkeypatch, elsewhere, checked):
    """The model scales its embeddings by the position that masks are made of, which is another one in such a step."""
    model = copy.deepcopy(stock)
    if elsewhere:
        inner = model.model.language_model.forward

        def forward(*args, cache=None, inputs_embeds=None, **kwargs):
            at = cache.get_query_offset(0) if cache is not None else 0
            places = torch.arange(inputs_embeds.shape[1]) + at
            scaled = inputs_embeds * (1 + 0.01 * places)[None, :, None]
            return inner(*args, cache=cache, inputs_embeds=scaled, **kwargs)

        monkeypatch.setattr(model.model.language_model, "forward", forward)
    if not checked:
        monkeypatch.setattr(runtime, "counts_from_first", lambda gm: False)
    ids, mask = batch(stock, 3 * WINDOW)
    mask[:] = 1
    wanted = whole(model, ids, mask)
    swa_pass.apply(model, backend="eager")
    error = (stepwise(model, ids, mask, 2 * WINDOW) - wanted).abs().max()
    assert error > 1e-2 if not checked else error < 1e-3
    ours = runtime_of(model)
    assert bool(ours.compiled_calls) == (not elsewhere or not checked)
    assert bool(ours.steps["decode"].failed) == (elsewhere and checked)
