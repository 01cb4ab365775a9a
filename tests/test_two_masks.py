"""Attention that hides keys twice: by a table of the model's own, and by the mask that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_flex import SLOTS, site_of
from torch import Tensor

W = 8
TABLE = torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril().triu(1 - W)
HIDDEN = torch.finfo(torch.float32).min


def attention(table: Any) -> Any:
    """Eager attention with a sliding mask; `table(first position, queries, keys)` hides more, None nothing."""

    def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        rows, columns = (torch.arange(queries) + first)[:, None], torch.arange(keys)[None, :]
        mask = torch.where((columns <= rows) & (columns > rows - W), 0.0, HIDDEN)[None, None]
        repeated = [x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, keys, 16) for x in (k, v)]
        scores = q @ repeated[0].transpose(2, 3)
        if table is not None:
            scores = torch.where(table(first, queries, keys), scores, torch.tensor(HIDDEN))
        return torch.softmax(scores + mask, -1) @ repeated[1]

    return attend


@pytest.mark.parametrize(
    ("table", "why"),
    [
        pytest.param(lambda first, q, k: TABLE[None, None, k - q : k, :k], "cut by the number of keys", id="cut"),
        pytest.param(lambda first, q, k: TABLE[torch.arange(q) + first][:, :k], "through two masks", id="positions"),
        pytest.param(lambda first, q, k: torch.ones(q, k, dtype=torch.bool), "through two masks", id="made-here"),
    ],
)
def test_two_masks_are_refused(table: Any, why: str) -> None:
    found = site_of(attention(table))
    assert found.refused
    assert why in found.refusal


def test_one_mask_is_proven() -> None:
    found = site_of(attention(None))
    assert not found.refused, found.refusal
    assert (found.mask.kind, found.mask.window) == ("sliding", W)
