"""Quantised frozen weights: which layers have them, what cannot be combined, and runs with them.

Runs with torchao and bitsandbytes are in quantization_cases.py and nf4_cases.py, for processes that find them: other
libraries import them wherever they are installed, so that `make test` installs them in folders of their own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import diffusers
import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.placement.quantization import (
    kept_linears,
    quantized_linears,
)
from tests.conftest import ROOT, run
from tests.training.training_cases import in_process, run as train_here


def run_cases(cases: str, package: str) -> None:
    """Run a file of tests in a process that finds a package of a folder of its own."""
    packages = os.pathsep.join([str(Path(sys.prefix) / package), *sys.path])
    tried = run([sys.executable, "-c", f"import {package}"], env={"PYTHONPATH": packages}, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr.strip().splitlines()[-1])
    command = [sys.executable, "-m", "pytest", ROOT / cases, "-p", "no:cacheprovider", "-p", "no:xdist", "-x"]
    result = run(command, env={"PYTHONPATH": packages, "PYTEST_XDIST_WORKER": ""}, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ passed", result.stdout), result.stdout


@pytest.mark.every
def test_runs_with_torchao() -> None:
    run_cases("tests/placement/quantization_cases.py", "torchao")


@pytest.mark.slow
def test_nf4_on_a_cpu() -> None:
    run_cases("tests/placement/nf4_cases.py", "bitsandbytes")


def on_meta(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(diffusers, name)()


def test_the_linear_layers_of_blocks_are_quantised_but_for_sensitive_ones() -> None:
    wan = on_meta("WanTransformer3DModel")
    assert len(quantized_linears(wan)) == 40 * 10
    assert {"blocks.0.attn1.to_q", "blocks.39.attn2.to_out.0", "blocks.7.ffn.net.0.proj"} <= set(
        quantized_linears(wan)
    )
    assert kept_linears(wan) == [
        "condition_embedder.time_embedder.linear_1",
        "condition_embedder.time_embedder.linear_2",
        "condition_embedder.time_proj",
        "condition_embedder.text_embedder.linear_1",
        "condition_embedder.text_embedder.linear_2",
        "proj_out",
    ]
    for name in ("HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel", "LTXVideoTransformer3DModel"):
        model = on_meta(name)
        shares = [sum(layer.weight.numel() for layer in quantized_linears(model).values())]
        shares.append(sum(parameter.numel() for parameter in model.parameters()))
        assert shares[0] > 0.6 * shares[1], name
        assert not any("norm" in layer for layer in quantized_linears(model)), "modulations stay as they are"


def test_a_kept_layer_never_keeps_layers_of_the_blocks_that_share_its_name() -> None:
    flux = on_meta("FluxTransformer2DModel")  # the quantisers would keep all that are called proj_out
    assert "single_transformer_blocks.0.proj_out" in quantized_linears(flux)
    assert {"x_embedder", "context_embedder", "single_transformer_blocks.0.norm.linear"} <= set(kept_linears(flux))
    assert "proj_out" not in kept_linears(flux)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": None}, r'quantize_base="int8".*train adapters \(`lora_rank=16`\)'),
        ({"gradient_checkpointing": False}, r'"int8".*gradient_checkpointing=True.*torchao.*"nf4"'),
        ({"quantize_base": "nf4"}, r'"nf4".*needs a GPU.*quantize_base="int8"'),
        ({"quantize_base": "float8"}, r'"float8".*torchao: pip install "hf_bucketing\[quantization\]"'),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_weights_load(
    settings: dict, message: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda *_, **__: pytest.fail("weights loaded"))
    common = {"lora_rank": 4, "gradient_checkpointing": True, "quantize_base": "int8"}
    with pytest.raises(BucketingError, match=message):
        train_here(in_process(pipeline_dir, prepared_dir, tmp_path, **{**common, **settings}))
