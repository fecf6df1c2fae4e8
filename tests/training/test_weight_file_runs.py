"""Runs, renderings and plans with the transformer's weights in one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from diffusers import WanPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, LORA_WEIGHTS
from hf_bucketing.adapters.kinds import adapters_of
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.options import iter_plans
from hf_bucketing.planner.settings import PlanConfig
from tests.conftest import TRAINING_SCRIPT, as_flags, launch_flags, run_command_here, run_script_here
from tests.models.weight_file_cases import matrices, original_state, scaled_float8, weights_of, write_file, write_gguf
from tests.processes import launch_forked
from tests.training.training_cases import in_process, run

LORA = {"lora_rank": 2, "max_train_steps": 2, "lora_format": "both"}


@pytest.fixture(scope="module")
def configs(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline without the weights of its transformer."""
    folder = tmp_path_factory.mktemp("without") / "pipeline"
    shutil.copytree(pipeline_dir, folder, ignore=shutil.ignore_patterns("diffusion_pytorch_model*"))
    shutil.copytree(pipeline_dir / "vae", folder / "vae", dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def file(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer's weights by their original names."""
    state = original_state("wan", weights_of(pipeline_dir))
    return write_file(tmp_path_factory.mktemp("file") / "model.safetensors", state)


@pytest.fixture(scope="module")
def gguf_file(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer's weights with blocks of eight bits."""
    pytest.importorskip("gguf")
    state = original_state("wan", weights_of(pipeline_dir))
    kinds = dict.fromkeys(matrices(state, lambda name: "blocks." in name), "Q8_0")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", state, kinds)


def assert_same_adapters(one: Path, other: Path) -> None:
    weights, others = (load_file(folder / LORA_WEIGHTS) for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=0, atol=0, msg=name)
    assert any(value.any() for name, value in weights.items() if "lora_B" in name), "they were trained"


@pytest.mark.slow
def test_a_run_with_a_file_equals_one_with_the_folder_resumes_and_names_it(
    configs: Path, file: Path, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    whole, with_file = tmp_path / "whole", tmp_path / "file"
    saved = {**LORA, "checkpointing_steps": 1}
    losses = run(in_process(pipeline_dir, prepared_dir, whole, **LORA))
    assert run(in_process(configs, prepared_dir, with_file, transformer_file=str(file), **saved)) == losses
    assert_same_adapters(whole, with_file)
    base = f"{configs.name} with model.safetensors"
    for folder in (with_file, with_file / "checkpoint-1"):
        with safe_open(folder / LORA_WEIGHTS, framework="pt") as weights:
            settings = json.loads(weights.metadata()["lora_adapter_metadata"])
        assert settings["transformer.base_model_name_or_path"] == base
        with safe_open(folder / COMFYUI_WEIGHTS, framework="pt") as weights:
            assert weights.metadata()["base_model"] == base
    assert "weights of `model.safetensors`" in (with_file / "README.md").read_text()

    resumed = {**saved, "resume_from_checkpoint": "checkpoint-1"}
    moved = file.with_name("moved.safetensors")  # the same weights elsewhere
    moved.write_bytes(file.read_bytes())
    run(in_process(configs, prepared_dir, with_file, transformer_file=str(moved), **resumed))
    assert_same_adapters(whole, with_file)
    state = original_state("wan", weights_of(pipeline_dir))
    other = write_file(tmp_path / "other.safetensors", {name: value + 1 for name, value in state.items()})
    with pytest.raises(BucketingError, match=r"other weights than those of .*other.safetensors: transformer had"):
        run(in_process(configs, prepared_dir, with_file, transformer_file=str(other), **resumed))


@pytest.mark.slow
def test_the_whole_transformer_of_a_file_is_trained_and_saved_as_a_pipeline(
    configs: Path, file: Path, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    whole, with_file = tmp_path / "whole", tmp_path / "file"
    losses = run(in_process(pipeline_dir, prepared_dir, whole, max_train_steps=2))
    assert run(in_process(configs, prepared_dir, with_file, max_train_steps=2, transformer_file=str(file))) == losses
    weights, others = weights_of(whole), weights_of(with_file)
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(("batching", "precision"), [("bucket", "bf16"), ("pack", "no")])
def test_adapters_train_on_packed_weights_as_on_the_dequantised(
    batching: str,
    precision: str,
    configs: Path,
    gguf_file: Path,
    pipeline_dir: Path,
    prepared_dir: Path,
    tmp_path: Path,
) -> None:
    from gguf import GGMLQuantizationType, quants

    state = original_state("wan", weights_of(pipeline_dir))
    kind = GGMLQuantizationType.Q8_0
    for name in matrices(state, lambda name: "blocks." in name):
        numbers = quants.dequantize(quants.quantize(state[name].numpy(), kind), kind)
        state[name] = torch.from_numpy(numbers.copy())
    plain = write_file(tmp_path / "plain.safetensors", state)
    settings = {**LORA, "batching": batching, "gradient_checkpointing": True, "checkpointing_steps": 1}
    settings |= {"mixed_precision": precision, "ema_decay": 0.9}
    settings |= {"max_tokens": 640, "strip_length": 16} if batching == "pack" else {"train_batch_size": 2}
    runs = [
        run(in_process(configs, prepared_dir, tmp_path / path.stem, transformer_file=str(path), **settings))
        for path in (gguf_file, plain)
    ]
    np.testing.assert_allclose(*runs, rtol=1e-4 if precision == "no" else 1e-2)
    resumed = {**settings, "resume_from_checkpoint": "checkpoint-1"}
    before = load_file(tmp_path / gguf_file.stem / LORA_WEIGHTS)
    run(in_process(configs, prepared_dir, tmp_path / gguf_file.stem, transformer_file=str(gguf_file), **resumed))
    after = load_file(tmp_path / gguf_file.stem / LORA_WEIGHTS)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_what_a_file_excludes_is_refused_before_weights_load(
    configs: Path, file: Path, prepared_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda *_, **__: pytest.fail("weights loaded"))
    state = original_state("wan", weights_of(pipeline_dir))
    quantized, _ = scaled_float8(state, matrices(state, lambda name: "blocks." in name))
    float8 = write_file(tmp_path / "float8.safetensors", quantized)
    for named, settings, message in (
        ("none.safetensors", {"lora_rank": 2}, "There is no file .*none.safetensors"),
        (float8, {}, r"float8.*train adapters \(`lora_rank=16`\)"),
        ("model.gguf", {}, r"model.gguf holds quantised weights.*`lora_rank=16`"),
        (
            "model.gguf",
            {"lora_rank": 2, "quantize_base": "int8", "gradient_checkpointing": True},
            "Omit .*quantised already",
        ),
    ):
        with pytest.raises(BucketingError, match=message):
            run(in_process(configs, prepared_dir, tmp_path / "run", transformer_file=str(named), **settings))


@pytest.mark.slow
def test_a_rendering_with_a_file_equals_one_with_the_folder(
    configs: Path, file: Path, gguf_file: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    def render(pipeline: Path, *flags: object) -> np.ndarray:
        size = ("--height", 32, "--width", 48, "--num_frames", 1, "--num_inference_steps", 2, "--prompt", "red")
        run_script_here("sample_video.py", pipeline, *size, *flags, "--output", tmp_path / "out.png")
        return np.asarray(Image.open(tmp_path / "out.png")).astype(int)

    whole = render(pipeline_dir)
    assert np.array_equal(render(configs, "--transformer_file", file), whole)
    vae = write_file(tmp_path / "vae.safetensors", weights_of(pipeline_dir, "vae"), prefix="first_stage_model.")
    assert np.array_equal(render(configs, "--vae_file", vae, "--transformer_file", file), whole)
    packed = render(configs, "--transformer_file", gguf_file)
    assert 0 < np.abs(packed - whole).max() < 4

    PartialState()  # the main process writes
    pipeline = WanPipeline.from_pretrained(pipeline_dir)
    add_lora(pipeline, AdapterConfig(lora_rank=2))
    torch.manual_seed(0)
    for value in adapters_of(pipeline.transformer).values():
        torch.nn.init.normal_(value, std=0.3)
    save_lora(pipeline, tmp_path / "adapter")
    strong = ("--adapter", f"{tmp_path / 'adapter'}=300")
    adapted, of_file = render(pipeline_dir, *strong), render(configs, "--transformer_file", gguf_file, *strong)
    assert np.abs(of_file - adapted).mean() < np.abs(adapted - whole).mean() / 4


@pytest.mark.slow
def test_a_vae_of_a_file_caches_trains_and_is_saved_as_that_of_the_folder(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(
        pipeline_dir,
        bare,
        ignore=lambda folder, _: ["diffusion_pytorch_model.safetensors"] * (Path(folder).name == "vae"),
    )
    state = weights_of(pipeline_dir, "vae")
    vae = write_file(tmp_path / "vae.safetensors", state, prefix="")
    other = write_file(tmp_path / "other.safetensors", {name: value + 0.1 for name, value in state.items()}, prefix="")
    settings = {"max_train_steps": 2, "vae_file": str(vae)}
    losses = run(in_process(pipeline_dir, prepared_dir, tmp_path / "whole", max_train_steps=2))
    caplog.set_level("INFO")
    assert run(in_process(bare, prepared_dir, tmp_path / "file", **settings)) == losses
    assert f"of {bare}, with the weights of {vae}, on" in caplog.text
    assert "The VAE had the weights of `vae.safetensors`" in (tmp_path / "file" / "README.md").read_text()
    saved = weights_of(tmp_path / "file", "vae")
    assert all(torch.equal(value, saved[name]) for name, value in state.items())
    assert run(in_process(bare, prepared_dir, tmp_path / "other", max_train_steps=2, vae_file=str(other))) != losses

    cached, flags = tmp_path / "cached", {"dataset_dir": prepared_dir, "cache_dir": tmp_path / "entries"}
    flags |= {"max_sequence_length": 32, "output_dir": cached, "pretrained_model_name_or_path": bare}
    run_command_here("cache", **flags, vae_file=vae)
    for pipeline, named in ((pipeline_dir, {}), (bare, {"vae_file": str(vae)})):  # the same weights
        run(in_process(pipeline, cached, tmp_path / "cached-run", max_train_steps=1, **named))
    with pytest.raises(
        BucketingError, match=r"its vae was that of \S*vae.safetensors, and that of \S*bare/vae cannot"
    ):
        run(in_process(bare, cached, tmp_path / "refused", max_train_steps=1))
    with pytest.raises(BucketingError, match=r"its vae had other weights.*--vae_file \S*other.safetensors"):
        run(in_process(bare, cached, tmp_path / "refused", max_train_steps=1, vae_file=str(other)))


PLANNED = {
    "lora_rank": 2,
    "sample_size": [9, 64, 64],
    "cached": "all",
    "device": "cpu",
    "gradient_checkpointing": True,
}


@pytest.mark.slow
def test_a_plan_counts_the_weights_of_a_file(configs: Path, gguf_file: Path, pipeline_dir: Path) -> None:
    whole = plan_memory(str(configs), PlanConfig.from_flat(**PLANNED))
    packed = plan_memory(str(configs), PlanConfig.from_flat(**PLANNED, transformer_file=str(gguf_file)))
    state = original_state("wan", weights_of(pipeline_dir))
    numbers = sum(state[name].numel() for name in matrices(state, lambda name: "blocks." in name))
    saved = whole.phases["optimizer"].weights - packed.phases["optimizer"].weights
    assert saved == pytest.approx(numbers * (4 - 34 / 32), rel=0.01), "34 bytes for 32 numbers"


def test_a_plan_refuses_to_train_float8_whole(configs: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    state = original_state("wan", weights_of(pipeline_dir))
    quantized, _ = scaled_float8(state, matrices(state, lambda name: "blocks." in name))
    file = write_file(tmp_path / "float8.safetensors", quantized)
    with pytest.raises(BucketingError, match="float8"):
        plan_memory(str(configs), PlanConfig.from_flat(device="cpu", transformer_file=str(file)))


@pytest.mark.slow
@pytest.mark.every
def test_options_of_a_packed_file_do_not_quantise_it_again(configs: Path, gguf_file: Path) -> None:
    components = read_components(str(configs), transformer_file=str(gguf_file))
    config = PlanConfig.from_flat(**PLANNED, transformer_file=str(gguf_file))
    names = [name for name, *_ in iter_plans(components, config)]
    assert names == ["as given", "--mixed_precision bf16", "--offload_activations"]


@pytest.mark.slow
@pytest.mark.every
def test_sharded_processes_of_which_one_reads_the_file_train_as_with_the_folder(
    configs: Path, file: Path, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    environment = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }
    flags = ("--lora_rank", 2, "--max_train_steps", 2, "--train_batch_size", 2)
    flags += ("--dataloader_num_workers", 0, "--report_to", "none", "--max_sequence_length", 32)

    def train(pipeline: Path, output: Path, *more: object) -> None:
        folders = as_flags(pretrained_model_name_or_path=pipeline, dataset_dir=prepared_dir, output_dir=output)
        command = [TRAINING_SCRIPT, *folders, *flags, *more]
        launch_forked(launch_flags(2), command, num_processes=2, env=environment, check=True)

    train(pipeline_dir, tmp_path / "whole")
    train(configs, tmp_path / "file", "--transformer_file", file)
    assert_same_adapters(tmp_path / "whole", tmp_path / "file")
