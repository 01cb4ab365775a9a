import torch


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, *unused):
        return torch.ops.hpu.rms_norm(x, weight, eps)[0]


class FusedClipNorm:
    def __init__(self, *args, **kwargs): ...
