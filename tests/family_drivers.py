"""Ways to drive, with token ids alone, decoders whose stock forward wants more, or hides its text decoder.

A driver is a module around the stock one with the forward of a plain decoder. What the stock forward wants besides ids
(another model's states, a delay, codebooks) is made from the ids, or is the same at every call, so that a sequence may
be read whole or token by token. The stock twin is wrapped in the same driver: both sides compute the same thing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast


class Driver(nn.Module):
    """`inner` behind the forward of a decoder: ids (B, q) in, `.logits` (B, q, any) out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    @property
    def dtype(self) -> torch.dtype:
        return next(self.inner.parameters()).dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        plain = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache, "use_cache": use_cache}
        return self.step(input_ids, plain)

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        """One call of the stock model. plain: the arguments that every decoder takes."""
        raise NotImplementedError


class Headless(Driver):
    """A decoder without a head: its last hidden states stand for logits."""

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        return CausalLMOutputWithPast(logits=self.inner(input_ids=ids, **plain).last_hidden_state)


class Embedded(Driver):
    """A decoder without a head that takes embeddings only."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.embeddings = nn.Embedding(inner.config.vocab_size, inner.config.hidden_size)

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        output = self.inner(inputs_embeds=self.embeddings(ids), **plain)
        return CausalLMOutputWithPast(logits=output.last_hidden_state)


class MasksGiven(Embedded):
    """A decoder that makes no mask for its sliding layers: masks are given, as `generate` gives what it made before."""

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        embeddings = self.embeddings(ids)
        given = {name: plain[name] for name in ("attention_mask", "position_ids", "cache")}
        arguments = {"config": self.config, "inputs_embeds": embeddings, **given}
        masks = {
            "full_attention": create_causal_mask(**arguments),
            "sliding_attention": create_sliding_window_causal_mask(**arguments),
        }
        output = self.inner(inputs_embeds=embeddings, **{**plain, "attention_mask": masks})
        return CausalLMOutputWithPast(logits=output.last_hidden_state)


class MoshiDepth(Driver):
    """One token for each codebook, on top of the main decoder's states. Embeddings are given: the stock look-up takes
    another table for every position, by its Python number."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.embeddings = nn.Embedding(inner.config.vocab_size, inner.config.hidden_size)
        self.states = nn.Embedding(inner.config.vocab_size, inner.config.input_size)

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        given = {"inputs_embeds": self.embeddings(ids), "last_hidden_state": self.states(ids)}
        if plain["attention_mask"] is None:  # without one, the stock model makes no causal mask either
            cache = plain["cache"]
            keys = ids.shape[1] if cache is None else cache.get_mask_sizes(ids.shape[1], 0)[0]
            plain = {**plain, "attention_mask": torch.ones(ids.shape[0], keys, dtype=torch.bool)}
        return self.inner(input_ids=ids, **given, **plain)


class TextAndCodebooks(Driver):
    """Ids (B, q, 1 + codebooks): a text token, and an audio token for each codebook."""

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        audio = [(ids * (n + 3)) % (self.config.codebook_vocab_size - 1) for n in range(self.config.num_codebooks)]
        return self.inner(input_ids=torch.stack([ids, *audio], dim=2), **plain)


class Delayed(Driver):
    """The text decoder of a streaming model, whose norms know by how many tokens the text is behind the audio."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.config = inner.config.text_config

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        model = getattr(self.inner, "model", self.inner)
        delay = model.time_embedding(torch.full((1,), 6.0))[None]
        states = model.language_model(input_ids=ids, t_cond=delay, **plain).last_hidden_state
        return CausalLMOutputWithPast(logits=self.inner.lm_head(states))


class DecoderHalf(Driver):
    """The decoder of an encoder-decoder model, beside the states of one text that the encoder has read."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.config = inner.config.decoder
        self.states = nn.Parameter(torch.randn(1, 5, inner.config.encoder.hidden_size))

    def step(self, ids: Tensor, plain: dict[str, Any]) -> Any:
        own = plain["cache"]
        both = None if own is None else EncoderDecoderCache(own, DynamicCache())
        states = self.states.expand(ids.shape[0], -1, -1)
        decoder = self.inner.model.decoder
        output = decoder(input_ids=ids, encoder_hidden_states=states, **{**plain, "cache": both})
        return CausalLMOutputWithPast(logits=self.inner.lm_head(output.last_hidden_state))


DRIVERS: dict[str, Any] = {
    "headless": Headless,
    "embedded": Embedded,
    "masks_given": MasksGiven,
    "moshi_depth": MoshiDepth,
    "text_and_codebooks": TextAndCodebooks,
    "delayed": Delayed,
    "decoder_half": DecoderHalf,
}


def driven(model: Any, entry: dict[str, Any]) -> Any:
    """The module that is tested: a part of the model (a dotted name), behind a driver, as the entry says."""
    for name in filter(None, entry.get("part", "").split(".")):
        model = getattr(model, name)
    driver = entry.get("driver")
    return DRIVERS[driver](model).eval() if driver else model
