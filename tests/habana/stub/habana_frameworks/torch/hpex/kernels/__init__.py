from enum import Enum

import torch

from .FusedSDPA import FusedSDPA  # the class hides the module of the same name, as in the plugin

__all__ = ["CTCLoss", "FusedSDPA", "RotaryPosEmbeddingMode", "apply_rotary_pos_emb"]


class RotaryPosEmbeddingMode(Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(p, cos, sin, position_ids=None, offset=0, mode=RotaryPosEmbeddingMode.BLOCKWISE):
    return torch.ops.hpu.rotary_pos_embedding(p, sin.to(p.dtype), cos.to(p.dtype), position_ids, offset, mode.value)


class RotaryPosEmbeddingHelperV1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, cos, sin, offset):
        return apply_rotary_pos_emb(p, cos, sin, None, offset)


class RotaryPosEmbeddingHelperV2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, cos, sin, position_ids):
        return apply_rotary_pos_emb(p, cos, sin, position_ids)


class RotaryPosEmbeddingHelperV3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, rope_cache):
        raise NotImplementedError("ChatGLM's rope is not in the stand-in")


class CTCLoss(torch.nn.CTCLoss): ...
