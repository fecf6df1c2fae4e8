"""One config file means the same to the planner and to the trainer."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from hf_bucketing.columns import PreparedDataset
from hf_bucketing.commands import plan
from hf_bucketing.commands.script_settings import plan_of_flags
from hf_bucketing.configuration.run import configured_precision
from hf_bucketing.errors import BucketingError
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.settings import settings_in
from hf_bucketing.training import TrainingConfig
from tests.conftest import run_command_here

PHASE = re.compile(r"^ +([a-z ]+: weights .+)$", re.MULTILINE)


@pytest.mark.cases(slow=("mixed_precision*",))
@pytest.mark.parametrize(
    "settings",
    ["", "mixed_precision: bf16\ntrain_batch_size: 2\nema_decay: 0.9\n"],
)
def test_a_plan_and_a_dry_run_of_one_file_say_the_same(
    settings: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    """Such a file planned one sample in bf16 and trained four in float32."""
    file = tmp_path / "run.yaml"
    folders = (
        f"pretrained_model_name_or_path: {pipeline_dir}\ndataset_dir: {prepared_dir}\noutput_dir: {tmp_path}/out\n"
    )
    file.write_text(f"{folders}lora_rank: 16\ngradient_checkpointing: true\n{settings}")
    trained = run_command_here("train", "--config", file, "--dry_run").stdout
    prepared = PreparedDataset.load(prepared_dir)
    counts = Counter(prepared.dataset["bucket_id"])
    samples = 2 if "size: 2" in settings else 4
    tokens = {
        bucket: min(count, samples) * prepared.table.num_tokens([bucket], spec=prepared.spec)[0]
        for bucket, count in counts.items()
    }
    size = prepared.table.size(max(tokens, key=tokens.get))
    flags = [pipeline_dir, "--config", file, "--sample_size", *size, "--device", "cpu", "--gpu_memory", 1]
    args = plan.make_parser().parse_args([*map(str, flags)])
    planned = plan_memory(str(pipeline_dir), plan_of_flags(args, mixed_precision=args.mixed_precision or "no"))
    assert (planned.shape.samples, planned.shape.size) == (samples, size)
    assert [f"{phase}: {parts}" for phase, parts in planned.phases.items()] == PHASE.findall(trained)
    assert len(planned.phases) == 5


def test_a_plan_has_the_defaults_of_a_run() -> None:
    planned = {setting.name: setting.default for setting in settings_in(PlanConfig)}
    for setting in settings_in(TrainingConfig):
        if setting.name in planned:
            assert planned[setting.name] == setting.default, setting.name


def test_a_plan_without_a_precision_has_that_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "none.yaml"))
    assert configured_precision() == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "FP16")
    assert configured_precision() == "fp16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    file = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(file))
    config = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nuse_cpu: true\n"
    file.write_text(f"{config}num_processes: 1\n")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_json_config_file", str(file))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_yaml_config_file", str(file))
    assert configured_precision() == "bf16"


def test_what_only_a_run_can_choose_is_no_plan(pipeline_dir: Path) -> None:
    with pytest.raises(BucketingError, match='`max_tokens="auto"` is found by a run'):
        plan_memory(str(pipeline_dir), PlanConfig.from_flat(max_tokens="auto"))
    with pytest.raises(BucketingError, match='`sharding="deepspeed"` is not planned, only under DDP and FSDP2'):
        PlanConfig.from_flat(sharding="deepspeed", num_processes=2)
