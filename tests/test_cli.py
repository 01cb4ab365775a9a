"""The command line: each command does its job on a folder, and says in one sentence what is wrong with bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from typer.testing import CliRunner

import swa_pass
from swa_pass.cli import app

runner = CliRunner()


def tiny_gemma() -> Gemma3ForCausalLM:
    """Two sliding layers with a window of 16, one global layer."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
        max_position_embeddings=4096,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_gemma().save_pretrained(path)
    return path


def test_help_lists_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "explain", "capacity", "bench"):
        assert command in result.output


def test_explain_as_json(folder: Path) -> None:
    result = runner.invoke(app, ["explain", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    layers = json.loads(result.stdout)["layers"]
    assert [layer["kind"] for layer in layers] == ["sliding", "sliding", "full"]
    assert [layer["window"] for layer in layers] == [16, 16, None]


def test_explain_prints_the_report(folder: Path) -> None:
    result = runner.invoke(app, ["explain", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(swa_pass.explain(Gemma3ForCausalLM.from_pretrained(folder).eval())).strip()


def test_a_model_that_would_not_fit_into_memory(tmp_path: Path) -> None:
    """Nothing is allocated: six layers of this width are 80 billion parameters."""
    config = Gemma3TextConfig(
        num_hidden_layers=6, hidden_size=16384, intermediate_size=262144, sliding_window=1024, dtype="bfloat16"
    )
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    result = runner.invoke(app, ["explain", str(tmp_path / "config.json"), "--json"])
    assert result.exit_code == 0, result.output
    layers = json.loads(result.stdout)["layers"]
    assert [layer["window"] for layer in layers] == [1024] * 5 + [None]
    assert {layer["k_dtype"] for layer in layers} == {"torch.bfloat16"}
    assert torch.get_default_dtype() == torch.float32


def test_a_folder_without_weights_is_enough(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    result = runner.invoke(app, ["capacity", str(tmp_path), "--contexts", "1024"])
    assert result.exit_code == 0, result.output
    assert "1,024" in result.stdout


def test_capacity_shows_what_the_report_says(folder: Path) -> None:
    result = runner.invoke(app, ["capacity", str(folder), "--contexts", "512,4096", "--batch", "64"])
    assert result.exit_code == 0, result.output
    report = swa_pass.explain(tiny_gemma())
    for context in (512, 4096):
        assert f"{report.kv_bytes(context, 64) / 2**20:,.1f}" in result.stdout
        assert f"{report.stock_kv_bytes(context, 64) / 2**20:,.1f}" in result.stdout


@pytest.mark.parametrize("arguments", [["explain", "nowhere"], ["capacity", "nowhere"]])
def test_a_folder_without_config_is_refused(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert "no config.json" in result.stderr


@pytest.mark.parametrize("batches", ["", "0", "1,x", "-1"])
def test_bad_batches_are_refused(batches: str) -> None:
    result = runner.invoke(app, ["demo", f"--batches={batches}"])
    assert result.exit_code == 1
    assert "whole numbers" in result.stderr


def test_bench_passes_its_options_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swa_pass.cli", "bench", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "--rounds" in done.stdout
