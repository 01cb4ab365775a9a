"""An applied model over its life: copies, files, threads, many generates, other dtypes, training, adapters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from helpers import W, distance, full_logits, make_pair, tiny, token_ids

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.cache import HybridCache
from swa_pass.compat import output_cache

GREEDY = {"max_new_tokens": 2 * W, "do_sample": False}


@pytest.fixture(scope="module")
def pair():
    return make_pair("gemma3")


def stock_tokens(pair, ids):
    return pair.stock.generate(ids, use_cache=False, **GREEDY)


def live_storages():
    gc.collect()
    return len(
        {o.untyped_storage().data_ptr() for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() > 200}
    )


def test_no_leak_over_many_generates(pair):
    for _ in range(3):
        pair.model.generate(token_ids(W + 1), **GREEDY)
    before = live_storages()
    for n in range(200):
        pair.model.generate(token_ids(1 + n % (2 * W)), max_new_tokens=2, do_sample=False)
        if n % 50 == 49:
            assert live_storages() <= before


def test_a_cache_is_freed_with_the_output_that_held_it(pair):
    output = pair.model.generate(token_ids(W), return_dict_in_generate=True, **GREEDY)
    cache = weakref.ref(output_cache(output))
    store = weakref.ref(output_cache(output).stores[0].k_store)
    assert cache() is not None
    assert store() is not None
    del output
    gc.collect()
    assert cache() is None
    assert store() is None


def test_bytes_of_rings_do_not_grow(pair):
    """Counted on the storages themselves: a view of a longer tensor would keep all of it."""
    cache, held = pair.runtime.make_cache(), {}
    with torch.no_grad():
        for n in range(100):
            pair.model(token_ids(W), use_cache=True, **{pair.runtime.cache_name: cache})
            held[n + 1] = [layer.k_store.untyped_storage().nbytes() for layer in cache.stores]
    sliding = [i for i, layer in enumerate(cache.stores) if layer.is_sliding]
    assert all(held[100][i] == held[4][i] for i in sliding)
    assert held[100][1] > 10 * held[4][1], "the global layer holds everything, or this test counts nothing"


def test_pickle_and_torch_save(pair):
    ids = token_ids(2 * W)
    pair.model.generate(ids, **GREEDY)
    for load in (
        lambda: pickle.loads(pickle.dumps(pair.model)),
        lambda: torch.load(_saved(pair.model), weights_only=False),
    ):
        loaded = load()
        assert runtime_of(loaded) is None, "a loaded model is a stock one"
        assert torch.equal(loaded.generate(ids, **GREEDY), stock_tokens(pair, ids))
        again = swa_pass.apply(loaded, backend="eager")
        assert runtime_of(again) is not None
        assert torch.equal(again.generate(ids, **GREEDY), stock_tokens(pair, ids))


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_save_pretrained_and_strict_state_dict(pair, tmp_path):
    pair.model.save_pretrained(tmp_path)
    loaded = type(pair.stock).from_pretrained(tmp_path).eval()
    ids = token_ids(3 * W)
    assert distance(full_logits(loaded, ids), full_logits(pair.stock, ids)) == 0
    pair.model.load_state_dict(pair.stock.state_dict(), strict=True)
    assert set(pair.model.state_dict()) == set(pair.stock.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_after_apply(dtype):
    """The stores follow the keys: proven and compiled anew, nothing is reinterpreted."""
    both = make_pair("gemma3")
    ids = token_ids(3 * W)
    both.model.generate(ids, **GREEDY)
    both.model.to(dtype)
    with torch.no_grad():
        output = both.model(ids, use_cache=True)
    assert {layer.k_store.dtype for layer in output_cache(output).stores} == {dtype}
    reference = copy.deepcopy(both.stock).to(dtype)
    truth = full_logits(copy.deepcopy(reference).double(), ids)
    noise = distance(full_logits(reference, ids).double(), truth)
    assert distance(output.logits.double(), truth) <= 3 * noise + 5e-6


def test_autocast(pair):
    ids = token_ids(3 * W)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = pair.model(ids, use_cache=True).logits.float()
        theirs = pair.stock(ids, use_cache=False).logits.float()
    truth = full_logits(pair.stock, ids)
    assert distance(ours, truth) < 3 * distance(theirs, truth)


def test_apply_revert_apply(pair):
    model = copy.deepcopy(pair.stock)
    ids = token_ids(2 * W)
    for _ in range(2):
        swa_pass.apply(model, backend="eager")
        assert torch.equal(model.generate(ids, **GREEDY), stock_tokens(pair, ids))
        swa_pass.revert(model)
        assert torch.equal(model.generate(ids, **GREEDY), stock_tokens(pair, ids))


def test_threads_with_caches_of_their_own(pair):
    prompts = [token_ids(W + n, seed=n) for n in range(4)]
    for prompt in prompts[:1]:
        pair.model.generate(prompt, **GREEDY)  # compiled once, before the threads meet
    results = {}

    def work(n):
        results[n] = pair.model.generate(prompts[n], **GREEDY)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, prompt in enumerate(prompts):
        assert torch.equal(results[n], stock_tokens(pair, prompt))


def test_one_cache_in_two_threads_is_an_error(pair):
    with torch.no_grad():
        cache = output_cache(pair.model(token_ids(W), use_cache=True))
        cache.clock.managed = True  # another thread is in a step
        before = cache.stores[0].k_store.nan_to_num_().clone()  # slots without a token may hold anything
        with pytest.raises(RuntimeError, match="another thread"):
            pair.model(token_ids(1), use_cache=True, **{pair.runtime.cache_name: cache})
        assert torch.equal(before, cache.stores[0].k_store)
        cache.clock.managed = False
        pair.model(token_ids(1), use_cache=True, **{pair.runtime.cache_name: cache})


def test_inference_mode_and_no_grad_on_one_cache(pair):
    ids = token_ids(3 * W)
    key = pair.runtime.cache_name
    with torch.inference_mode():
        cache = output_cache(pair.model(ids[:, : 2 * W], use_cache=True))
    parts = []
    for n in range(2 * W, 3 * W):
        with torch.no_grad() if n % 2 else torch.inference_mode():
            parts.append(pair.model(ids[:, n : n + 1], use_cache=True, **{key: cache}).logits.clone())
    assert distance(torch.cat([p.detach() for p in parts], 1), full_logits(pair.stock, ids)[:, 2 * W :]) < 5e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_has_the_stock_gradients(checkpointing):
    stock = tiny("gemma3")
    model = swa_pass.apply(copy.deepcopy(stock), backend="eager")
    ids = token_ids(3 * W)
    losses = []
    for each in (stock, model):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
        loss = each(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for a, b in zip(stock.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("before", [False, True])
def test_lora(pair, before):
    """Adapters under or over an applied model: the adapted model's tokens, on rings."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ids = token_ids(2 * W)
    base = copy.deepcopy(pair.stock)
    if before:
        swa_pass.apply(base, backend="eager")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config).eval()
    inner = model.get_base_model()
    if not before:
        swa_pass.apply(inner, backend="eager")
    ours = model.generate(input_ids=ids, **GREEDY)
    assert runtime_of(inner).compiled_calls == 2 * W
    swa_pass.revert(inner)
    theirs = model.generate(input_ids=ids, use_cache=False, **GREEDY)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, stock_tokens(pair, ids)), "this adapter changes nothing"


def test_all_sliding_models_run_for_ever():
    """No linear store, so no limit: positions beyond 2^31, and a ring that does not grow."""
    cache = HybridCache([W, W], max_length=10)
    for layer in cache.stores:
        layer.policy.seen = layer.policy.high = 2**31 - 3
        layer.policy.floor = layer.policy.seen
    tokens = torch.randn(1, 1, 40, 4)
    for n in range(40):
        for layer in range(2):
            keys, _ = cache.update(tokens[:, :, n : n + 1], tokens[:, :, n : n + 1], layer)
    assert cache.get_seq_length() == 2**31 - 3 + 40
    assert torch.equal(keys, tokens[:, :, 40 - W :])


def test_a_pipeline(pair):
    """`pipeline` calls generate with its own settings; it must find the rings too."""
    from transformers import pipeline

    calls = pair.runtime.compiled_calls
    tokenizer = _letters()
    writer = pipeline("text-generation", model=pair.model, tokenizer=tokenizer)
    ours = writer("abcabcabcabc", max_new_tokens=W, do_sample=False)[0]["generated_text"]
    assert pair.runtime.compiled_calls - calls == W
    theirs = pipeline("text-generation", model=pair.stock, tokenizer=tokenizer)(
        "abcabcabcabc", max_new_tokens=W, do_sample=False
    )[0]["generated_text"]
    assert ours == theirs


def _letters():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(n): n for n in range(33, 127)}
    tokenizer = Tokenizer(models.WordLevel({**letters, "?": 127}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="!")
