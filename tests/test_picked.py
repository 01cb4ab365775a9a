"""Attention in which numbers computed from kept values choose among the keys: what is proven about its mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import BY_NAME, build
from test_flex import SLOTS, Q, site_of
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import swa_pass

W = 8
HIDDEN = torch.finfo(torch.float32).min
WEIGHT = nn.Parameter(torch.ones(16))


def attention(
    data: Any = lambda v, q, first: torch.exp(v @ WEIGHT)[:, :, None, :].expand(-1, -1, Q, -1),
    window: int | None = None,
    ranked_window: int | None = None,
    ranks: Any = lambda numbers, masked: masked,
    hidden: float = HIDDEN,
    largest: bool = True,
) -> Any:
    """SDPA whose mask shows the 5 earlier keys with the largest numbers; see the parameters of the test."""

    def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        rows, columns = (torch.arange(Q) + first)[:, None], torch.arange(SLOTS)[None, :]

        def shown(window: int | None) -> Tensor:
            seen = columns <= rows
            return torch.where(seen if window is None else seen & (columns > rows - window), 0.0, HIDDEN)[None, None]

        numbers = data(v, q, first)
        masked = numbers.masked_fill(shown(window) != 0, hidden)
        if ranks is not None:
            among = ranks(numbers, numbers.masked_fill(shown(ranked_window or window) != 0, hidden))
            places = torch.topk(among, 5, dim=-1, largest=largest).indices
            chosen = torch.zeros_like(masked).scatter(-1, places, 1.0)
            masked = masked.masked_fill(chosen == 0.0, hidden)
        mask = masked[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, Q, SLOTS)
        repeated = [x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, SLOTS, 16) for x in (k, v)]
        return scaled_dot_product_attention(q, *repeated, attn_mask=mask, scale=0.3)

    return attend


def moved(v: Tensor, q: Tensor, first: Tensor) -> Tensor:
    """As by default, but nearer keys weigh more."""
    distance = (torch.arange(Q) + first)[:, None] - torch.arange(SLOTS)[None, :]
    return torch.exp(v @ WEIGHT)[:, :, None, :] * torch.exp(-distance.float())


def of_place(v: Tensor, q: Tensor, first: Tensor) -> Tensor:
    return (torch.exp(v @ WEIGHT) * (torch.arange(SLOTS) > first - W).float())[:, :, None, :].expand(-1, -1, Q, -1)


def of_rows(v: Tensor, q: Tensor, first: Tensor) -> Tensor:
    return torch.exp(v @ v.transpose(2, 3))[:, :, :Q]


def of_queries(v: Tensor, q: Tensor, first: Tensor) -> Tensor:
    return torch.exp(v @ q.mean((0, 1, 2)))[:, :, None, :].expand(-1, -1, Q, -1)


@pytest.mark.parametrize(
    ("changed", "kind", "why"),
    [
        pytest.param({}, "picked", "at any distance", id="picked"),
        pytest.param({"ranks": None}, "picked", "at any distance", id="weighed-only"),
        pytest.param({"window": W}, "unknown", f"a window of {W} slides", id="in-a-window"),
        pytest.param({"window": W + 1}, "unknown", f"a window of {W + 1} slides", id="in-a-window-one-larger"),
        pytest.param({"ranked_window": W}, "unknown", "", id="ranked-in-a-window"),
        pytest.param({"ranks": lambda numbers, masked: numbers}, "unknown", "", id="ranked-with-later-keys"),
        pytest.param({"ranks": lambda numbers, masked: -masked}, "unknown", "", id="ranked-by-something-else"),
        pytest.param({"largest": False}, "unknown", "", id="smallest"),
        pytest.param({"hidden": -1.0}, "unknown", "", id="hides-little"),
        pytest.param({"data": moved}, "unknown", "", id="by-distance"),
        pytest.param({"data": of_place}, "unknown", "", id="by-position"),
        pytest.param({"data": of_rows}, "unknown", "", id="another-for-each-query"),
        pytest.param({"data": of_queries}, "unknown", "", id="by-the-queries-content"),
    ],
)
def test_what_is_picked(changed: dict[str, Any], kind: str, why: str) -> None:
    found = site_of(attention(**changed))
    assert found.refused, "no operator of ours can stand in for it"
    assert (found.mask.kind, found.problem) == (kind, "")
    assert why in found.refusal


@pytest.mark.parametrize("window", [None, W], ids=["everywhere", "in-a-window"])
def test_a_model_that_picks(window: int | None) -> None:
    """Kept where nothing slides; refused where a window does, with its size."""
    entry = copy.deepcopy(BY_NAME["doge"])
    entry["config"].update(sliding_window=window, num_hidden_layers=1)
    layer = swa_pass.explain(swa_pass.apply(build(entry), backend="eager")).layers[0]
    if window is None:
        assert (layer.kind, layer.action) == ("picked", "kept")
    else:
        assert (layer.kind, layer.action) == ("other", "refused")
        assert f"a window of {window} slides" in layer.reason
