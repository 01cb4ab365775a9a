"""`swa_pass.export`: past the window, from a file, in another process, and what is refused.

The oracle is the stock model on the whole sequence without a cache, and its mutants with a window wrong by one.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from helpers import (
    MUTATED,
    TOLERANCE,
    F,
    Pair,
    S,
    W,
    assert_oracle,
    distance,
    full_logits,
    left_padded,
    one_by_one,
    tiny,
    token_ids,
    with_window,
)
from torch import Tensor
from torch.export import ExportedProgram

import swa_pass
from swa_pass.api import missing_for_inductor, runtime_of
from swa_pass.graph import op_name

ROOT = Path(__file__).resolve().parent.parent
TOTAL = 5 * W + 3
LIMIT = 64
SLACK = 4
LOWERINGS = ("ops", "aten")
#: All layers slide (no limit at all); mixed; sinks, eager; softcap, eager. Exporting takes seconds, so the last are
#: left to `make test-all`; test_ops_aten.py has every option of the operators in plain ATen.
EVERY = [
    ("mistral", "ops"),
    ("mistral", "aten"),
    ("gemma3", "ops"),
    ("gemma3", "aten"),
    ("gpt_oss", "aten"),
    pytest.param("gpt_oss", "ops", marks=pytest.mark.extended),
    pytest.param("gemma2", "ops", marks=pytest.mark.extended),
    pytest.param("gemma2", "aten", marks=pytest.mark.extended),
]
#: The same again with plain ATen only in the long run.
MAINLY_OPS = ["ops", pytest.param("aten", marks=pytest.mark.extended)]
#: Rows and pads are tested on one program.
ROWS: dict[str, Any] = {"batch": 3, "dynamic_batch": True, "left_padding": True}


@functools.cache
def stock_of(family: str) -> Any:
    return families.build(families.BY_NAME[family]) if family == "gemma2" else tiny(family)


@functools.cache
def exported(family: str, lowering: str, **options: Any) -> ExportedProgram:
    """One program for all tests of a process: exporting takes seconds. Its modules share one state."""
    stock = stock_of(family)
    slides = all(kind == "sliding_attention" for kind in getattr(stock.config, "layer_types", None) or ["full"])
    limit = None if slides or family == "mistral" else LIMIT
    return swa_pass.export(stock, lowering=lowering, max_length=limit, slack=SLACK, **options)


def module_of(program: ExportedProgram) -> Any:
    module = program.module()
    swa_pass.reset_state(module)
    return module


@torch.no_grad()
def feed(module: Any, ids: Tensor, chunks: Iterable[int], *more: Tensor) -> Tensor:
    parts = torch.split(ids, list(chunks), 1)
    return torch.cat([module(part, *more) for part in parts], 1)


def check(family: str, got: Tensor, ids: Tensor, mutants: Any = None) -> None:
    pair = Pair(None, stock_of(family))
    assert_oracle(pair, got, lambda model: full_logits(model, ids)[:, -got.shape[1] :], mutants=mutants)


# ---------------------------------------------------------------------------------------------------- past the window


@pytest.mark.parametrize(("family", "lowering"), EVERY)
def test_prefill_chunks_and_decode_past_the_window(family: str, lowering: str) -> None:
    program, ids = exported(family, lowering), token_ids(TOTAL) % 90
    plans = [one_by_one(n, TOTAL - n) for n in (1, W, 4 * W)]
    plans += [[n, TOTAL - n] for n in (W - 1, W + 1, 2 * W + 5)]
    plans += [[W + 3, 5, 1, 2 * W + SLACK, *[1] * (TOTAL - 3 * W - 9 - SLACK)], [TOTAL]]
    for chunks in plans:
        check(family, feed(module_of(program), ids, chunks), ids)


def test_a_window_that_is_wrong_by_one_is_seen() -> None:
    ids = token_ids(TOTAL)
    program = swa_pass.export(with_window(stock_of("mistral"), W - 1))
    error = distance(feed(program.module(), ids, one_by_one(W, TOTAL - W)), full_logits(stock_of("mistral"), ids))
    assert error > MUTATED


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_program_without_global_layers_has_no_limit(lowering: str) -> None:
    ids = token_ids(20 * W + 3)
    chunks = [9 * W, *[1] * W, 7 * W, *[1] * (3 * W + 3)]
    check("mistral", feed(module_of(exported("mistral", lowering)), ids, chunks), ids)


@pytest.mark.parametrize("lowering", MAINLY_OPS)
def test_rows_from_one_to_the_batch(lowering: str) -> None:
    program = exported("gemma3", lowering, **ROWS)
    for rows in (1, 2, 3):
        ids, starts = token_ids(TOTAL, batch=rows, seed=rows), torch.zeros(rows, dtype=torch.int64)
        check("gemma3", feed(module_of(program), ids, [2 * W + 3, 3, 1, 1, TOTAL - 2 * W - 8], starts), ids)


@pytest.mark.parametrize("lowering", MAINLY_OPS)
def test_left_padding(lowering: str) -> None:
    program = exported("gemma3", lowering, **ROWS)
    rows, ids, _, starts = left_padded([2 * W + 3, 4, W], TOTAL)
    got = feed(module_of(program), ids, one_by_one(2 * W + 3, TOTAL - 2 * W - 3), starts)
    for row, alone in enumerate(rows):
        check("gemma3", got[row : row + 1, -alone.shape[1] :], alone)


def test_tokens_are_taken_back_within_the_slack() -> None:
    ids, module = token_ids(TOTAL), module_of(exported("mistral", "ops"))
    before = feed(module, ids, [TOTAL])
    module.get_buffer("cache.lengths").sub_(SLACK)
    again = feed(module, ids[:, -SLACK:], [1] * SLACK)
    assert distance(again, before[:, -SLACK:]) < TOLERANCE


# ---------------------------------------------------------------------------------------------------- what is inside


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_graph_holds_rings_of_constant_size(lowering: str) -> None:
    program, stock = exported("gemma3", lowering), stock_of("gemma3")
    slots = [program.state_dict[f"cache.{name}_{i}"].shape[2] for i in range(3) for name in ("keys", "values")]
    ring = W + SLACK
    assert slots == [ring, ring, LIMIT, LIMIT, ring, ring]
    names = [op_name(node) for node in program.graph.nodes]
    assert names.count("swa_pass::attend_append") == (3 if lowering == "ops" else 0)
    assert [name for name in names if "swa_pass" in name and name != "swa_pass::attend_append"] == []
    # Every size is a number, or made of the number of new tokens alone: nothing grows with what was read before.
    symbols = {str(s) for node in program.graph.nodes for s in _symbols(node.meta.get("val"))}
    assert len(symbols) == 1
    (tokens,) = program.range_constraints.values()
    assert (tokens.lower, tokens.upper) == (1, LIMIT)
    weights = {name for name in program.state_dict if not name.startswith("cache.")}
    assert weights <= set(stock.state_dict())
    held = stock.state_dict(keep_vars=True)
    assert all(program.state_dict[name].data_ptr() == held[name].data_ptr() for name in weights), "a weight was copied"


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, Tensor) else [value]
    return set().union(*(size.node.expr.free_symbols for size in sizes if isinstance(size, torch.SymInt)))


def test_no_mask_is_left_in_the_graph_with_operators() -> None:
    """On the sliding layers of the model the operators need none: nothing has tokens x tokens elements."""
    program = exported("mistral", "ops")
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            assert sum(isinstance(size, torch.SymInt) for size in value.shape) <= 1, node.format_node()


def test_an_applied_model_exports_as_its_stock_self() -> None:
    """And with the last logits only."""
    model = swa_pass.apply(copy.deepcopy(stock_of("mistral")), backend="eager")
    ids, chunks = token_ids(TOTAL), [W, W, 2 * W, *[1] * (TOTAL - 4 * W)]
    got = feed(swa_pass.export(model, logits_to_keep=1).module(), ids, chunks)
    assert got.shape[1] == len(chunks)
    check("mistral", got[:, 2:], ids)
    assert runtime_of(model) is not None, "still applied"


# ---------------------------------------------------------------------------------------------------- files, processes


@pytest.mark.parametrize("lowering", MAINLY_OPS)
def test_a_saved_program_continues_from_a_saved_state(lowering: str) -> None:
    ids, first, buffer = token_ids(TOTAL), 2 * W + 5, io.BytesIO()
    program = exported("gemma3", lowering)
    module = module_of(program)
    torch.export.save(program, buffer)
    buffer.seek(0)
    head = feed(module, ids[:, :first], [first])
    state = {name: tensor.clone() for name, tensor in module.state_dict().items() if name.startswith("cache.")}
    loaded = torch.export.load(buffer).module()
    check("gemma3", feed(loaded, ids, one_by_one(first, TOTAL - first)), ids)
    swa_pass.reset_state(loaded)
    missing = loaded.load_state_dict(state, strict=False).missing_keys
    assert not [name for name in missing if name.startswith("cache.")]
    check("gemma3", torch.cat([head, feed(loaded, ids[:, first:], [1] * (TOTAL - first))], 1), ids)


RUN = """
import sys, torch
kind, lowering, folder = sys.argv[1:]
if lowering == "ops":
    import swa_pass.ops
data = torch.load(f"{folder}/data.pt")
if kind == "aoti":
    module = torch._inductor.aoti_load_package(f"{folder}/program.pt2")
else:
    module = torch.export.load(f"{folder}/program.pt2").module()
with torch.no_grad():
    parts = [module(part) for part in torch.split(data["ids"], data["chunks"], 1)]
    try:
        module(torch.ones(1, data["limit"], dtype=torch.int64))
        error = ""
    except RuntimeError as raised:
        error = str(raised)
loaded = [name for name in ("transformers", "swa_pass", "swa_pass.exporting", "swa_pass.passes") if name in sys.modules]
torch.save({"logits": torch.cat(parts, 1), "loaded": loaded, "error": error}, f"{folder}/out.pt")
"""


def run_elsewhere(kind: str, lowering: str, folder: Path, ids: Tensor, chunks: list[int]) -> dict[str, Any]:
    torch.save({"ids": ids, "chunks": chunks, "limit": LIMIT}, folder / "data.pt")
    paths = {"PYTHONPATH": str(ROOT)} if lowering == "ops" else {}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | paths
    command = [sys.executable, "-c", RUN, kind, lowering, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


def check_elsewhere(kind: str, family: str, lowering: str, folder: Path) -> None:
    ids, first = token_ids(TOTAL), 2 * W + 5
    out = run_elsewhere(kind, lowering, folder, ids, [first, 3, *[1] * (TOTAL - first - 3)])
    check(family, out["logits"], ids)
    assert out["loaded"] == (["swa_pass"] if lowering == "ops" else [])
    assert ("max_length=64" in out["error"]) == (family != "mistral")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_file_runs_in_a_process_without_transformers(lowering: str, tmp_path: Path) -> None:
    program = exported("gemma3", lowering)
    module_of(program)  # what is saved is the state as it is: none read
    torch.export.save(program, tmp_path / "program.pt2")
    check_elsewhere("export", "gemma3", lowering, tmp_path)


AOTI = [
    pytest.param("mistral", "aten", marks=pytest.mark.slow),
    *(pytest.param("gemma3", lowering, marks=pytest.mark.extended) for lowering in LOWERINGS),
]


@pytest.mark.parametrize(("family", "lowering"), AOTI)
def test_an_aotinductor_package_runs_in_a_process_without_transformers(
    family: str, lowering: str, tmp_path: Path
) -> None:
    if missing_for_inductor():
        pytest.skip("Inductor needs a C++ compiler and Python headers")
    program = exported(family, lowering)
    module_of(program)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    check_elsewhere("aoti", family, lowering, tmp_path)


def test_importing_the_operators_imports_no_transformers() -> None:
    code = """
import sys
import swa_pass, swa_pass.ops
assert "transformers" not in sys.modules and "swa_pass.api" not in sys.modules
assert set(swa_pass.__all__) <= set(dir(swa_pass))
from swa_pass import apply
assert apply is swa_pass.apply is swa_pass.api.apply and "transformers" in sys.modules
for name in swa_pass.__all__:
    getattr(swa_pass, name)
assert not hasattr(swa_pass, "no_such_name")
"""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_full_store_is_an_error_by_name_and_nothing_is_written(lowering: str) -> None:
    ids, module = token_ids(LIMIT), module_of(exported("gemma3", lowering))
    head = feed(module, ids[:, :40], [40])
    with pytest.raises(RuntimeError, match=r"more than max_length=64 tokens.*reset the state"):
        module(ids[:, :30])
    check("gemma3", torch.cat([head, feed(module, ids[:, 40:], [1] * (LIMIT - 40))], 1), ids)
    with pytest.raises(RuntimeError, match="max_length=64"):
        module(ids[:, :1])


def test_sizes_that_the_state_has_no_room_for() -> None:
    module, starts = module_of(exported("gemma3", "ops", **ROWS)), torch.zeros(4, dtype=torch.int64)
    for shape, size in (((4, 2), r"input_ids.*\[0\] <= 3"), ((1, LIMIT + 1), r"input_ids.*\[1\] <= 64")):
        with pytest.raises((AssertionError, RuntimeError), match=size):
            module(torch.ones(shape, dtype=torch.int64), starts[: shape[0]])
    module(torch.ones(1, 2, dtype=torch.int64), starts[:1])
    with pytest.raises(RuntimeError, match=r"number of rows changed.*Reset the state"):
        module(torch.ones(2, 1, dtype=torch.int64), starts[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"layers 1 are global.*pass max_length"),
        ({"max_length": 0}, r"max_length=0"),
        ({"max_length": 64, "lowering": "onnx"}, r"lowering='onnx': use one of 'ops', 'aten'"),
        ({"max_length": 64, "batch": 0}, r"batch .* at least 1; got 0"),
        ({"max_length": 64, "slack": -1}, r"slack must be >= 0 tokens, got -1"),
        ({"max_length": 64, "logits_to_keep": 2}, r"logits_to_keep=2: use 0"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swa_pass.export(stock_of("gemma3"), **options)


def test_models_that_cannot_be_exported() -> None:
    with pytest.raises(TypeError, match="transformers models"):
        swa_pass.export(torch.nn.Linear(2, 2))
    model = copy.deepcopy(stock_of("mistral"))
    with pytest.raises(ValueError, match="training mode"):
        swa_pass.export(model.train())
    handle = model.eval().model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks on its submodules"):
        swa_pass.export(model)
    handle.remove()
    chunked = families.build(families.BY_NAME["llama4_text"])
    with pytest.raises(RuntimeError, match=r"cannot be exported with its cache: layers .*: chunked attention"):
        swa_pass.export(chunked, max_length=64)
    mixed = tiny("gemma3", layer_types=[S, F])
    mixed.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        swa_pass.export(mixed, max_length=64)
