"""Memory of the machine and space on its disk, beside what GPUs need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.planner import MemoryPlan, PlanConfig, plan_memory
from hf_bucketing.planner.host import CUDA_PROCESS, PROCESS, WORKER, check_host, plan_disk, plan_host
from hf_bucketing.planner.trace import pinned_bytes
from hf_bucketing.settings import changed
from tests.conftest import ROOT

FULL = PlanConfig.from_flat(
    sample_size=[9, 64, 64], mixed_precision="no", cached="all", max_sequence_length=16, train_batch_size=1
)
LORA = changed(FULL, lora_rank=4, gradient_checkpointing=True)


def planned(pipeline: Path, config: PlanConfig, **memory: object) -> tuple[MemoryPlan, PlanConfig]:
    config = changed(config, **memory)
    return plan_memory(str(pipeline), config), config


@pytest.mark.slow
def test_each_process_loads_all_that_it_calls_at_once(pipeline_dir: Path) -> None:
    one, config = planned(pipeline_dir, changed(FULL, cached="nothing"))
    step = one.phases["optimizer"]
    loading = plan_host(one, config, num_workers=0).phases["loading"]
    assert loading.weights == round(one.experts[0].weights) + step.text_encoder + step.vae
    assert loading.processes == PROCESS + CUDA_PROCESS
    config = changed(config, num_processes=4)
    four = plan_host(plan_memory(str(pipeline_dir), config), config, num_workers=0).phases["loading"]
    assert (four.weights, four.processes) == (4 * loading.weights, 4 * loading.processes)


@pytest.mark.every
def test_what_waits_lies_in_page_locked_memory(pipeline_dir: Path) -> None:
    assert [pinned_bytes(torch.empty(count, dtype=torch.uint8)) for count in (0, 1, 2, 3, 1024, 1025)] == [
        *(0, 1, 2, 4, 1024, 2048),
    ]
    stays, config = planned(pipeline_dir, LORA)
    assert plan_host(stays, config, num_workers=0).phases["training"].weights == 0
    halves = planned(pipeline_dir, LORA, offload_blocks=stays.blocks // 2)
    waits = planned(pipeline_dir, LORA, offload_blocks=stays.blocks)
    half, whole = (plan_host(*each, num_workers=0).phases["training"].weights for each in (halves, waits))
    assert whole == pytest.approx(2 * half, abs=2)
    frozen = waits[0].experts[0].frozen_bytes
    assert frozen <= whole <= 2 * frozen
    activations, config = planned(pipeline_dir, LORA, offload_activations=True)
    there = plan_host(activations, config, num_workers=0).phases["training"].activations
    assert there > stays.phases["forward"].activations - activations.phases["forward"].activations > 0
    twice, config = planned(pipeline_dir, changed(LORA, train_batch_size=2), offload_activations=True)
    assert plan_host(twice, config, num_workers=0).phases["training"].activations == pytest.approx(2 * there, rel=0.1)


def test_workers_hold_batches_and_cached_runs_hold_none_of_pixels(pipeline_dir: Path) -> None:
    plan, config = planned(pipeline_dir, changed(FULL, cached="nothing"))
    none, two = (plan_host(plan, config, num_workers=count).phases["training"] for count in (0, 2))
    assert (none.workers, two.workers) == (0, 3 * WORKER)
    assert two.batches == 4 * none.batches == 2 * 4 * 12 * plan.shape.pixels
    cached, config = planned(pipeline_dir, FULL)
    assert plan_host(cached, config, num_workers=2).phases["training"].batches == 0


def test_a_run_on_the_cpu_holds_there_what_a_device_would(pipeline_dir: Path) -> None:
    plan, config = planned(pipeline_dir, changed(FULL, device="cpu"))
    host = plan_host(plan, config, num_workers=0)
    assert host.highest == "training"
    assert host.total == PROCESS + plan.total


def test_a_machine_with_too_little_memory_is_refused_by_name(pipeline_dir: Path) -> None:
    host = plan_host(*planned(pipeline_dir, FULL), num_workers=2)
    gib = host.total / 2**30
    assert check_host(host, cpu_memory=2 * gib).startswith("Fits in")
    assert "may take 15% more" in check_host(host, cpu_memory=1.01 * gib)
    with pytest.raises(BucketingError, match="highest in loading, and `cpu_memory` is 1 GiB"):
        check_host(host, cpu_memory=1)


@pytest.mark.slow
def test_disks_hold_one_checkpoint_more_than_are_kept(pipeline_dir: Path) -> None:
    plan, config = planned(pipeline_dir, changed(FULL, ema_decay=0.9))
    expert = plan.experts[0]
    disk = plan_disk(plan, config, checkpoints=2, cache=7)
    assert disk.checkpoint == 4 * expert.trained_bytes, "weights, two moments, and averages"
    assert disk.checkpoints == 3 * disk.checkpoint
    assert disk.result == expert.weights
    assert disk.total == disk.checkpoints + disk.result + 7
    adapters, config = planned(pipeline_dir, LORA)
    small = plan_disk(adapters, config, checkpoints=0)
    assert (small.checkpoints, small.result) == (0, adapters.experts[0].trained_bytes)
    assert small.checkpoint == 3 * small.result < disk.checkpoint / 4


def test_the_memory_of_machines_was_planned_within_15_percent() -> None:
    runs = json.loads((ROOT / "scripts" / "benchmarks" / "results" / "host_memory.json").read_text())["runs"]
    ratios = {name: run["host_planned_mb"] / run["host_measured_mb"] for name, run in runs.items()}
    assert {name: ratio for name, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}
    for case in ("FSDP2", "not cached", "dataloader_num_workers=2"):
        assert any(case in name for name in runs), case
