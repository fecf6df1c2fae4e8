"""Training with sharded weights gives what DDP gives, and refuses what it cannot do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import LORA_WEIGHTS
from hf_bucketing.placement import sharding
from hf_bucketing.placement.blocks import block_names
from hf_bucketing.placement.sharding import AVERAGES, refuse_code_in_shards
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from hf_bucketing.training import TrainingConfig, loop, opened
from hf_bucketing.training.loop import make_accelerator
from tests.conftest import ROOT, run_script_here
from tests.models.families import RECIPES
from tests.models.recipe_cases import stock_pipeline
from tests.placement.test_precision import unreadable
from tests.processes import launch_forked
from tests.test_trust import Bomb
from tests.training.training_cases import STABLE

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
DDP = {"ACCELERATE_USE_FSDP": "false"}
LOADED_ONCE = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
SHARDED_STATE = {**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}

ADAPTERS = {"lora_rank": 2, "train_batch_size": 2}
PACKS = {
    "lora_rank": 2,
    "batching": "pack",
    "max_tokens": 640,
    "strip_length": 16,
    "mixed_precision": "bf16",
    "ema_decay": 0.9,
    "gradient_checkpointing": True,
}
FULL = {"ema_decay": 0.9, "train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.02}
HELD_OUT = {"validation_split": 0.15, "validation_loss_steps": 2, "validation_noise_levels": 1}
PRESERVED = {"lora_rank": 2, "train_batch_size": 1, "preservation": "prior", "preservation_share": 0.3, **HELD_OUT}
RENDER = {
    "validation_prompts": ["red"],
    "validation_sizes": "1,32,48",
    "validation_steps": 2,
    "validation_inference_steps": 2,
}
RENDERED = "validation/step-{}/1x32x48-red.png"
SAVE = {"checkpointing_steps": 2}

TWO_PROCESSES = {
    "packs_ddp": (DDP, None, PACKS | RENDER | HELD_OUT),
    "packs_loaded_once": (LOADED_ONCE, None, PACKS | RENDER | SAVE | HELD_OUT),
    "packs_killed": (SHARDED_STATE, 3, PACKS | SAVE | HELD_OUT),
    "preserved_ddp": (DDP, None, PRESERVED),
    "preserved_loaded_once": (LOADED_ONCE, None, PRESERVED),
    "full_ddp": (DDP, None, FULL | RENDER | HELD_OUT),
    "full_loaded_once_killed": (LOADED_ONCE, 3, FULL | RENDER | SAVE | HELD_OUT),
}
SAME = [
    ("packs_ddp", "packs_loaded_once"),
    ("packs_ddp", "packs_killed"),
    ("full_ddp", "full_loaded_once_killed"),
    ("preserved_ddp", "preserved_loaded_once"),
]

HYBRID = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
FOUR_PROCESSES = {"ddp": (DDP, None, ADAPTERS), "hybrid": (FSDP | HYBRID, None, ADAPTERS)}


def train_all(cases: dict[str, tuple], folder: Path, pipeline: Path, prepared: Path, *, num_processes: int) -> None:
    """Run trainings one after the other in one group of processes; each writes to `folder/{name}`."""
    common = {
        **STABLE,
        "pretrained_model_name_or_path": str(pipeline),
        "dataset_dir": str(prepared),
        "report_to": "none",
        "dataloader_num_workers": 0,
        "max_sequence_length": 32,
        "max_train_steps": 4,
        "learning_rate": 5e-3,
    }
    no_weights = {"pretrained_model_name_or_path": str(unreadable(pipeline, folder / "no_weights", "transformer"))}
    described = [
        {
            "environment": environment,
            "kill_at": kill_at,
            "settings": {"output_dir": str(folder / name), **common, **settings},
            "of_others": no_weights if environment == LOADED_ONCE else {},
        }
        for name, (environment, kill_at, settings) in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(described))
    config = ROOT / "hf_bucketing" / "accelerate_configs" / "fsdp2.yaml"
    flags = ["--config_file", config, "--mixed_precision", "no", "--num_processes", num_processes]
    command = ["-m", "tests.placement.sharded_worker", folder / "cases.json"]
    cpu = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    launch_forked(flags, command, num_processes=num_processes, env=cpu, cwd=ROOT)


@pytest.fixture(scope="module")
def runs(pipeline_dir: Path, prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    train_all(TWO_PROCESSES, folder, pipeline_dir, prepared_dir, num_processes=2)
    return folder


def about(folder: Path) -> dict:
    return json.loads((folder / "about.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("ddp", "fsdp"), SAME)
def test_sharded_runs_have_the_losses_of_ddp(ddp: str, fsdp: str, runs: Path) -> None:
    assert about(runs / ddp)["type"] == "MULTI_GPU"
    assert about(runs / fsdp)["type"] == "FSDP"
    assert about(runs / ddp)["shares"] == [1, 1]
    assert about(runs / fsdp)["shares"] == pytest.approx([0.5, 0.5], abs=0.01)
    assert len(losses_of(runs / fsdp)) == 4
    assert losses_of(runs / fsdp) == pytest.approx(losses_of(runs / ddp), abs=1e-4)
    expected, found = (
        [(entry["global_step"], entry["samples"], entry["validation_loss"]) for entry in Logs(runs / name).held_out]
        for name in (ddp, fsdp)
    )
    assert [entry[:2] for entry in found] == [(0, 3), (2, 3), (4, 3)]
    for entry, wanted in zip(found, expected, strict=True):
        assert entry == pytest.approx(wanted, abs=1e-4), "the averaged weights, whole in each process or not"


@pytest.mark.slow
@pytest.mark.parametrize(("ddp", "fsdp"), SAME[:2])
def test_sharded_adapters_make_the_same_file_as_ddp(ddp: str, fsdp: str, runs: Path, pipeline_dir: Path) -> None:
    expected, found = (load_file(runs / name / LORA_WEIGHTS) for name in (ddp, fsdp))
    assert expected.keys() == found.keys()
    assert all(value.dtype == torch.float32 for value in found.values())
    for name, value in expected.items():
        assert torch.allclose(value, found[name], atol=1e-6), name
    assert metadata_of(runs / ddp / LORA_WEIGHTS) == metadata_of(runs / fsdp / LORA_WEIGHTS)
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dir)
    pipeline.load_lora_weights(str(runs / fsdp))
    assert any("lora_B" in name and value.any() for name, value in pipeline.transformer.named_parameters())


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata()


@pytest.mark.slow
def test_a_sharded_transformer_is_saved_as_stock_diffusers_loads_it(runs: Path) -> None:
    expected, found = (
        DiffusionPipeline.from_pretrained(runs / name).transformer.state_dict()
        for name in ("full_ddp", "full_loaded_once_killed")
    )
    for name, value in expected.items():
        assert torch.allclose(value, found[name], atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("ddp", "fsdp"), [SAME[0], SAME[2]])
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.every), 4])
def test_sharded_validation_renders_what_ddp_renders(ddp: str, fsdp: str, step: int, runs: Path) -> None:
    expected, found = (frame_of(runs / name / RENDERED.format(step)) for name in (ddp, fsdp))
    assert np.abs(expected - found).max() <= 2
    other = frame_of(runs / "full_ddp" / RENDERED.format(6 - step))
    assert np.abs(expected - other).max() > 2, "weights show in what is rendered"


def frame_of(image: Path) -> np.ndarray:
    return np.asarray(Image.open(image)).astype(int)


@pytest.mark.slow
def test_checkpoints_of_sharded_adapters_hold_adapters_alone(runs: Path) -> None:
    whole, parts = (runs / name / "checkpoint-2" for name in ("packs_loaded_once", "packs_killed"))
    saved = [set(torch.load(whole / "pytorch_model_fsdp.bin", weights_only=True))]
    saved.append(set(FileSystemReader(parts / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata))
    for names, checkpoint in zip(saved, (whole, parts), strict=True):
        adapters = load_file(checkpoint / LORA_WEIGHTS)
        assert all("lora_" in name for name in names)
        assert len(names) == len(adapters) == len(load_file(checkpoint / AVERAGES))


@pytest.mark.every
@pytest.mark.slow
def test_hybrid_sharding_counts_all_processes_as_data_parallel(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    train_all(FOUR_PROCESSES, tmp_path, pipeline_dir, prepared_dir, num_processes=4)
    assert about(tmp_path / "hybrid")["shares"] == pytest.approx([0.5] * 4, abs=0.01)
    assert losses_of(tmp_path / "hybrid") == pytest.approx(losses_of(tmp_path / "ddp"), abs=1e-4)
    plans = [(tmp_path / name / "logs" / "plans.jsonl").read_text() for name in ("ddp", "hybrid")]
    assert plans[0] == plans[1]
    expected, found = (load_file(tmp_path / name / LORA_WEIGHTS) for name in ("ddp", "hybrid"))
    assert all(torch.allclose(value, found[name], atol=1e-5) for name, value in expected.items())


@pytest.mark.every
@pytest.mark.parametrize("name", ["ltx2", pytest.param("latte", marks=pytest.mark.every)])
def test_a_model_that_does_not_name_its_blocks_is_sharded_block_by_block(
    name: str, media_dir: Path, tmp_path: Path
) -> None:
    case, pipeline, prepared = RECIPES[name], tmp_path / "pipeline", tmp_path / "prepared"
    make_tiny_pipeline(pipeline, family=case.tiny)
    run_script_here(
        "prepare_dataset.py",
        dataset=media_dir,
        output_dir=prepared,
        target_fps=case.target_fps,
        pretrained_model_name_or_path=pipeline,
        buckets=case.buckets,
        bucket_frames=case.bucket_frames,
        max_frames=case.bucket_frames.split(",")[-1],
    )
    full = FULL | {"max_sequence_length": case.max_sequence_length} | case.bucket_settings
    packs = PACKS | {"max_sequence_length": case.max_sequence_length, "max_tokens": 4096}
    if name == "latte":
        del packs["lora_rank"]  # its pipeline loads none
    cases = {"ddp": (DDP, None, full), "fsdp": (FSDP, None, full), "packs": (FSDP, None, packs)}
    train_all(cases, tmp_path, pipeline, prepared, num_processes=2)
    assert about(tmp_path / "ddp")["gathered"] == []
    blocks = set(block_names(stock_pipeline(pipeline, **case.components).transformer))
    assert blocks
    for run_name in ("fsdp", "packs"):
        assert blocks <= set(about(tmp_path / run_name)["gathered"])
    assert losses_of(tmp_path / "fsdp") == pytest.approx(losses_of(tmp_path / "ddp"), abs=1e-4)


@pytest.mark.parametrize("named", [None, ["Linear"]])
def test_blocks_that_accelerates_configuration_names_count_first(named: list[str] | None) -> None:
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=named)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
    transformer = torch.nn.Module()
    transformer.blocks = torch.nn.ModuleList([torch.nn.GELU(), torch.nn.GELU()])
    with sharding.block_by_block(transformer, accelerator):
        assert plugin.transformer_cls_names_to_wrap == (named or ["GELU"])
        transformer._no_split_modules = ["Own"]
        assert block_names(transformer) == ["Own"]
    assert plugin.transformer_cls_names_to_wrap == named, "the next model of the process may have other blocks"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A state that torch saves in parts, as FSDP's with SHARDED_STATE_DICT."""
    torch.distributed.checkpoint.save(
        {"optimizer": {"exp_avg": torch.ones(2), "lr": 0.1}}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True
    )
    refuse_code_in_shards(tmp_path)
    return tmp_path / "optimizer_0"


def test_code_in_the_index_of_a_sharded_state_does_not_run(parts: Path) -> None:
    (parts / ".metadata").write_bytes(pickle.dumps(Bomb(parts / "ran")))
    with pytest.raises(BucketingError, match=r"\.metadata holds more than plain values"):
        refuse_code_in_shards(parts.parent)
    assert not (parts / "ran").exists()


def test_code_in_a_value_of_a_sharded_state_does_not_run(parts: Path) -> None:
    torch.distributed.checkpoint.save(
        {"optimizer": {"exp_avg": torch.ones(2), "lr": Bomb(parts / "ran")}}, checkpoint_id=parts, no_dist=True
    )
    with pytest.raises(BucketingError, match=r"\.distcp holds more than plain values"):
        refuse_code_in_shards(parts.parent)
    assert not (parts / "ran").exists()


@pytest.mark.parametrize(
    ("version", "once", "settings", "message"),
    [
        (1, False, {"lora_rank": 2}, r"Omit `lora_rank`, or use version 2 of FSDP \(`fsdp_version: 2`"),
        (1, False, {"ema_decay": 0.9, "validation_prompts": ["red"]}, "Omit `ema_decay`, `validation_prompts`, or"),
        (
            2,
            False,
            {"quantize_base": "int8", "lora_rank": 2, "gradient_checkpointing": True},
            "Omit `quantize_base`, or use DDP: FSDP cannot",
        ),
        (
            2,
            False,
            {"offload_blocks": 1, "lora_rank": 2, "gradient_checkpointing": True},
            "Omit `offload_blocks`, or use DDP: FSDP .*`fsdp_offload_params: true`",
        ),
        (2, False, {"trained_dtype": "bf16", "mixed_precision": "bf16"}, 'Omit `trained_dtype="bf16"`, or use DDP'),
        (2, True, {"batching": "pack", "max_tokens": "auto"}, "Give a number as `max_tokens`"),
    ],
)
def test_what_sharding_cannot_do_is_refused_before_weights_are_loaded(
    version: int, once: bool, settings: dict, message: str, tmp_path: Path, monkeypatch
) -> None:
    common = {"pretrained_model_name_or_path": "m", "dataset_dir": "d", "output_dir": str(tmp_path)}
    config = TrainingConfig.from_flat(**common, report_to="none", **settings)
    make_accelerator(config)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", version == 2)
    monkeypatch.setattr(opened, "loads_once", lambda _: once)
    monkeypatch.setattr(opened, "wraps_blocks", lambda _: False)
    with pytest.raises(BucketingError, match=message):
        make_accelerator(config)


@pytest.mark.parametrize("setting", [{"lora_rank": 2}, {"ema_decay": 0.9}, {"validation_prompts": ["red"]}])
def test_stage_3_of_deepspeed_is_refused_for_what_stage_2_does(setting: dict, tmp_path: Path) -> None:
    common = {"pretrained_model_name_or_path": "m", "dataset_dir": "d", "output_dir": str(tmp_path)}
    config = TrainingConfig.from_flat(**common, report_to="none", **setting)
    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"gradient_clipping": 1.0})
    state = SimpleNamespace(deepspeed_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        state=state,
        is_fsdp2=False,
        mixed_precision="no",
        num_processes=2,
        device=torch.device("cpu"),
        torch_device_mesh=None,
    )
    opened.check_settings(config, accelerator)
    sharding.configure_deepspeed(accelerator, accumulation_steps=3, max_grad_norm=0.5)
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 3
    plugin.zero_stage = 3
    with pytest.raises(BucketingError, match=f"Omit `{next(iter(setting))}`, or use version 2 of FSDP.*stage: 2"):
        opened.check_settings(config, accelerator)


def test_adapters_averages_and_validation_run_under_version_2_of_fsdp(tmp_path: Path, monkeypatch) -> None:
    settings = {"lora_rank": 2, "ema_decay": 0.9, "validation_prompts": ["red"]}
    common = {"pretrained_model_name_or_path": "m", "dataset_dir": "d", "output_dir": str(tmp_path)}
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    monkeypatch.setattr(loop, "loads_once", lambda _: False)
    monkeypatch.setattr(opened, "loads_once", lambda _: False)
    monkeypatch.setattr(opened, "wraps_blocks", lambda _: False)
    make_accelerator(TrainingConfig.from_flat(**common, report_to="none", **settings))
