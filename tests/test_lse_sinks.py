"""Sinks written as a scale of the result: ``attention * sigmoid(logsumexp(scores) - sinks)``, in a model and alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import BY_NAME, build, ids_of
from helpers import MUTATED, Pair, W, assert_oracle, distance, feed, full_logits, one_by_one, positions_of
from test_flex import SLOTS, site_of
from torch import Tensor

import swa_pass

PROMPT, TOTAL = 2 * W + 3, 4 * W
SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0])


def sinks_of(model: Any) -> Iterator[Tensor]:
    return (parameter for name, parameter in model.named_parameters() if name.endswith("sinks"))


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A model with two layers; its sinks are zeros when it is new, which would hide what is done with them."""
    entry = copy.deepcopy(BY_NAME["granite_swa"])
    entry["config"].update(num_hidden_layers=2, layer_types=entry["config"]["layer_types"][:2])
    stock = build(entry)
    found = list(sinks_of(stock))
    assert len(found) == 2
    with torch.no_grad():
        for sinks in found:
            sinks.copy_(SINKS)
    return Pair(swa_pass.apply(copy.deepcopy(stock), backend="eager"), stock)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    ids, mask = ids_of(TOTAL, batch=2), torch.ones(2, TOTAL, dtype=torch.int64)
    mask[1, :3] = 0
    return ids, mask


@pytest.fixture(scope="module")
def got(pair: Pair, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Logits of prefill and decode past the window, through graphs in which every layer is fused."""
    ids, mask = inputs
    logits, _ = feed(pair, ids, one_by_one(PROMPT, TOTAL - PROMPT), attention_mask=mask)
    return logits[mask.bool()]


def reference(model: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
    ids, mask = inputs
    return full_logits(model, ids, attention_mask=mask, position_ids=positions_of(mask))[mask.bool()]


def test_logits_of_stock(pair: Pair, inputs: tuple[Tensor, Tensor], got: Tensor) -> None:
    """And not those of a window that is wrong by one."""
    assert_oracle(pair, got, lambda model: reference(model, inputs), tolerance=5e-4)
    for step in pair.runtime.steps.values():
        assert step.rewrites
        for rewrite in step.rewrites:
            assert rewrite.matches == 2
            assert all(finding.site.sinks is not None for finding in rewrite.findings)
            assert "logsumexp" not in rewrite.ops_after


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(torch.zeros_like, id="zero"),
        pytest.param(lambda sinks: torch.full_like(sinks, -1e4), id="without"),
        pytest.param(torch.neg, id="other-sign"),
        pytest.param(lambda sinks: sinks.roll(1), id="of-the-next-head"),
        pytest.param(lambda sinks: sinks.roll(2), id="of-the-other-group"),
    ],
)
def test_other_sinks_are_told_apart(pair: Pair, inputs: tuple[Tensor, Tensor], got: Tensor, changed: Any) -> None:
    mutant = copy.deepcopy(pair.stock)
    with torch.no_grad():
        for sinks in sinks_of(mutant):
            sinks.copy_(changed(sinks))
    assert distance(got, reference(mutant, inputs)) > MUTATED


# ------------------------------------------------------------------------------------------------ one attention


def attention(factor: Any) -> Any:
    """Eager attention in a window, times ``factor(scores that go into the softmax, scores without mask)``."""

    def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        rows, columns = (torch.arange(q.shape[2]) + first)[:, None], torch.arange(SLOTS)[None, :]
        mask = torch.where((columns <= rows) & (columns > rows - W), 0.0, torch.finfo(torch.float32).min)
        keys, values = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, SLOTS, 16) for x in (k, v))
        bare = q @ keys.transpose(2, 3) * 0.3
        scores = bare + mask[None, None]
        return (torch.softmax(scores, -1) @ values) * factor(scores, bare)

    return attend


def right(scores: Tensor, bare: Tensor) -> Tensor:
    return torch.sigmoid(torch.logsumexp(scores, -1) - SINKS.view(1, -1, 1)).unsqueeze(-1)


def test_the_idiom() -> None:
    found = site_of(attention(right))
    assert not found.refused, found.refusal
    assert (found.mask.kind, found.mask.window, found.site.scale) == ("sliding", W, 0.3)
    assert found.site.sinks is not None


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(
            lambda s, bare: torch.sigmoid(SINKS.view(1, -1, 1) - torch.logsumexp(s, -1)).unsqueeze(-1), id="other-sign"
        ),
        pytest.param(lambda s, bare: right(bare, bare), id="of-scores-without-mask"),
        pytest.param(
            lambda s, bare: torch.sigmoid(torch.logsumexp(s, -2)[:, :, :1] - SINKS.view(1, -1, 1)).unsqueeze(-1),
            id="along-the-queries",
        ),
        pytest.param(
            lambda s, bare: torch.sigmoid(torch.logsumexp(s, -1) - SINKS[:3].view(1, 1, -1)).unsqueeze(-1),
            id="one-for-each-query",
        ),
        pytest.param(lambda s, bare: right(2.0 * s, bare), id="of-twice-the-scores"),
        pytest.param(
            lambda s, bare: torch.tanh(torch.logsumexp(s, -1) - SINKS.view(1, -1, 1)).unsqueeze(-1), id="tanh"
        ),
    ],
)
def test_what_only_looks_like_it_is_refused(factor: Any) -> None:
    """The scores are read by something else than the attention, so it must stay as it is."""
    found = site_of(attention(factor))
    assert found.refused
    assert found.site.sinks is None
