"""accelerate's hooks (device_map, offloading), put on before `apply` or after it: the stock tokens, on rings.

The devices are emulated: everything runs on the CPU, and weights wait on the meta device, in memory or on disk.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import W, make_pair, tiny, token_ids

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache import HybridCache
from swa_pass.compat import output_cache

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False}
PARTS = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
MAP = dict.fromkeys(PARTS, "cpu")

#: Ways to put hooks on submodules.
WAYS = {
    "device_map": lambda model, folder: accelerate.dispatch_model(model, MAP, force_hooks=True),
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, torch.device("cpu")),
    "one_module": lambda model, folder: hooks.add_hook_to_module(
        model.model.layers[0].self_attn, hooks.AlignDevicesHook(io_same_device=True)
    ),
}


@pytest.fixture(scope="module")
def pair():
    return make_pair("mistral")


def hooked(model):
    return {name for name, module in model.named_modules() if "_old_forward" in module.__dict__}


@pytest.mark.parametrize("first", ["apply", "hooks"])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_submodules(pair, way, first, tmp_path, caplog):
    """No graph, but rings: proven on a twin without hooks, run eager, said once. They survive apply and revert."""
    model, ids = tiny("mistral"), token_ids(2 * W)
    if first == "hooks":
        WAYS[way](model, tmp_path)
    with caplog.at_level(logging.WARNING, logger="swa_pass"):
        swa_pass.apply(model, backend="eager")
        if first == "apply":
            WAYS[way](model, tmp_path)
        before = hooked(model)
        outputs = [model.generate(ids, return_dict_in_generate=True, **GREEDY) for _ in range(2)]
    expected = pair.stock.generate(ids, use_cache=False, **GREEDY)
    for output in outputs:
        assert torch.equal(output.sequences, expected)
        cache = output_cache(output)
        assert isinstance(cache, HybridCache)
        assert [layer.policy.capacity for layer in cache.stores if layer.is_sliding] == [W + 16] * 2
        assert {layer.k_store.device.type for layer in cache.stores} == {"cpu"}
    for mutant in pair.mutants.values():
        assert not torch.equal(expected, mutant.generate(ids, use_cache=False, **GREEDY))
    assert sum("accelerate's hooks" in record.getMessage() for record in caplog.records) == 1
    assert [layer.index for layer in swa_pass.explain(model).rewritten] == [0, 1]
    assert hooked(model) == before
    swa_pass.revert(model)
    assert hooked(model) == before
    assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("first", ["apply", "hook"])
def test_a_hook_on_the_model_itself(pair, first):
    """It stays around our forward, whichever came first; removing it, before or after revert, leaves what was there."""
    model, ids = tiny("mistral"), token_ids(2 * W)
    expected = pair.stock.generate(ids, use_cache=False, **GREEDY)

    def hook():
        calls = []

        class Count(hooks.ModelHook):
            def pre_forward(self, module, *args, **kwargs):
                calls.append(1)
                return args, kwargs

        hooks.add_hook_to_module(model, Count())
        return calls

    calls = hook() if first == "hook" else None
    swa_pass.apply(model, backend="eager")
    calls = hook() if calls is None else calls
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(calls) == runtime_of(model).compiled_calls == 2 * W
    hooks.remove_hook_from_module(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(calls) == 2 * W
    assert runtime_of(model).compiled_calls == 4 * W
    again = hook()
    swa_pass.revert(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(again) == 2 * W
    hooks.remove_hook_from_module(model)
    assert model.forward.__func__ is type(model).forward
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_a_copy_of_a_model_with_hooks(pair):
    model, ids = tiny("mistral"), token_ids(2 * W)
    WAYS["device_map"](model, None)
    twin = copy.deepcopy(swa_pass.apply(model, backend="eager"))
    assert torch.equal(twin.generate(ids, **GREEDY), pair.stock.generate(ids, use_cache=False, **GREEDY))
    assert runtime_of(twin) is not runtime_of(model)


def test_every_store_is_on_the_device_of_its_layer():
    """The first layer's device is not the cache's: here the second one is elsewhere, and indices are on the CPU."""
    cache = HybridCache([W, None, W])
    devices = ["cpu", "meta", "cpu"]
    for tokens in (3, 1, 3 * W, 1):
        for layer, device in enumerate(devices):
            new = torch.randn(2, 1, tokens, 4, device=device)
            keys, _ = cache.update(new, new, layer)
            assert keys.device.type == device
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    assert [layer.k_store.device.type for layer in cache.stores] == devices
