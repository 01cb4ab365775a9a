"""Gemma 3 270M with its real weights: one run of every mode, on a prompt longer than its window of 512.

In float32. The oracle is the stock model with its own cache: without one, every token would read all of the prompt
again, minutes for this file. That stock's cached and uncached runs agree here is what test_real_model.py rests on.
Each mode must also have run on rings, counted. That the tokens can tell a wrong window: the last test.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import swa_pass
from swa_pass.api import runtime_of
from swa_pass.compat import output_cache
from swa_pass.demo.text import document
from swa_pass.demo.weights import gemma

pytestmark = [pytest.mark.weights, pytest.mark.slow]
extended = pytest.mark.extended

WINDOW, PROMPT, NEW = 512, 540, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def real() -> SimpleNamespace:
    model, tokenizer = gemma(torch.float32)
    model.generation_config.eos_token_id = None
    ids = tokenizer(document(), return_tensors="pt").input_ids[:, :PROMPT]
    greedy = model.generate(ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    sampled = _sampled(model, ids)
    swa_pass.apply(model, backend="eager")
    return SimpleNamespace(model=model, tokenizer=tokenizer, ids=ids, greedy=greedy, sampled=sampled)


def _sampled(model, ids):
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=NEW, do_sample=True, num_return_sequences=2)


@contextmanager
def on_rings(real, expected=None):
    """Every forward inside is a compiled graph; `expected` of them, if that is known."""
    runtime, calls = runtime_of(real.model), []
    handle = real.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    before = runtime.compiled_calls
    yield
    handle.remove()
    assert runtime.compiled_calls - before == len(calls) > 0
    assert expected is None or len(calls) == expected


@contextmanager
def stock(real):
    """The stock model, for what is too dear to be computed for all tests. The graphs are kept for afterwards."""
    ours = real.model.__dict__.pop("forward"), real.model.__dict__.pop("_prepare_cache_for_generation")
    yield real.model
    real.model.forward, real.model._prepare_cache_for_generation = ours


def test_greedy(real):
    with on_rings(real, NEW):
        ours = real.model.generate(real.ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert torch.equal(ours.sequences, real.greedy.sequences)
    assert (torch.stack(ours.logits) - torch.stack(real.greedy.logits)).abs().max() < 2e-3


def test_prompt_lookup(real):
    with on_rings(real):
        ours = real.model.generate(real.ids, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(ours, real.greedy.sequences)


def test_streamer_and_chunked_prefill(real):
    class Ids:
        def __init__(self):
            self.ids = []

        def put(self, value):
            self.ids += value.flatten().tolist()

        def end(self):
            self.ids.append(None)

    streamer = Ids()
    with on_rings(real, NEW - 1 + 3):
        real.model.generate(real.ids, prefill_chunk_size=200, streamer=streamer, **GREEDY)
    assert streamer.ids == [*real.greedy.sequences[0].tolist(), None]


def test_turns_and_a_snapshot(real):
    """One cache: a first turn, a second one on what it returned, then back to the prefix and the second turn again."""
    key, first = runtime_of(real.model).cache_name, real.ids[:, : PROMPT - 8]
    with on_rings(real):
        output = real.model.generate(first, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        cache = output_cache(output)
        # The second turn is the rest of the prompt: its beginning must be what the cache has read.
        cache.crop(-(cache.get_seq_length() - first.shape[1]))
        prefix = cache.snapshot()
        for _ in range(2):
            ours = real.model.generate(real.ids, **{key: cache}, **GREEDY)
            assert torch.equal(ours, real.greedy.sequences)
            cache.restore(prefix)


def test_a_pipeline(real):
    from transformers import pipeline

    writer = pipeline("text-generation", model=real.model, tokenizer=real.tokenizer)
    text = real.tokenizer.decode(real.ids[0], skip_special_tokens=True)
    again = real.tokenizer(text, return_tensors="pt").input_ids
    assert torch.equal(again, real.ids), "the text does not give these tokens, and so not the stock ones"
    with on_rings(real, NEW):
        ours = writer(text, return_full_text=False, **GREEDY)[0]["generated_text"]
    assert ours == real.tokenizer.decode(real.greedy.sequences[0, PROMPT:])


@extended
def test_sampled(real):
    with on_rings(real, NEW):
        ours = _sampled(real.model, real.ids)
    assert torch.equal(ours, real.sampled)
    assert not torch.equal(ours[0], ours[1])


@extended
def test_beams_left_padded(real):
    ids = torch.cat([real.ids, real.ids.roll(-7, 1)])
    mask = torch.ones_like(ids)
    mask[1, :20], ids[1, :20] = 0, 0
    given = {"attention_mask": mask, "num_beams": 2, **GREEDY}
    with on_rings(real, NEW):
        ours = real.model.generate(ids, **given)
    with stock(real) as model:
        assert torch.equal(ours, model.generate(ids, **given))


@extended
def test_assisted_by_its_own_first_layers(real):
    with on_rings(real):
        ours = real.model.generate(real.ids, assistant_early_exit=6, **GREEDY)
    assert torch.equal(ours, real.greedy.sequences)


@extended
def test_embeddings(real):
    embeddings = real.model.get_input_embeddings()(real.ids).detach()
    with on_rings(real, NEW):
        ours = real.model.generate(inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(ours, real.greedy.sequences[:, PROMPT:])


@extended
def test_given_positions(real):
    """RoPE knows differences only: positions that begin at 1000 give the same tokens."""
    with on_rings(real, NEW):
        positions = torch.arange(PROMPT)[None] + 1000
        ours = real.model.generate(real.ids, position_ids=positions, **GREEDY)
    assert torch.equal(ours, real.greedy.sequences)


def test_these_logits_can_tell_a_wrong_window(real):
    with stock(real) as model, torch.no_grad():
        model.config.sliding_window = WINDOW - 1
        try:
            wrong = model(real.ids, use_cache=False, logits_to_keep=1).logits
        finally:
            model.config.sliding_window = WINDOW
    assert (wrong[0, -1] - real.greedy.logits[0][0]).abs().max() > 5e-3
