import torch


class FusedAdamW(torch.optim.AdamW): ...
