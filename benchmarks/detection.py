"""How long it takes to find out what a model's layers are: recorded, and by Dynamo, in turns.

    python benchmarks/detection.py                 # 48 layers of Gemma 3, hidden size 64, random weights
    python benchmarks/detection.py --layers 12

The first line of each is the first time in this process. Layers are small: only their number counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from swa_pass.capture import capture
from swa_pass.recording import record


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    config = transformers.Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    print(f"{options.layers} layers, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for _ in range(options.rounds):
        print(f"recorded {seconds(lambda: record(model, model.forward)):6.2f} s", flush=True)
        print(f"Dynamo   {seconds(lambda: capture(model, model.forward)):6.2f} s", flush=True)


if __name__ == "__main__":
    main()
