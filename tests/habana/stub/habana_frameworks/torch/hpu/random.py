import torch


def manual_seed_all(seed):
    torch.manual_seed(seed)


manual_seed = manual_seed_all


def get_rng_state(*args):
    return torch.get_rng_state()


def get_rng_state_all():
    return [torch.get_rng_state()]


def set_rng_state(state, *args):
    torch.set_rng_state(state)


def set_rng_state_all(states):
    torch.set_rng_state(states[0])
