"""Two processes, each with its own packs, have the gradients of one process with all samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from hf_bucketing.models import enable_packing
from tests.conftest import ROOT, launch_flags
from tests.models.cases import Samples, assert_same_gradients, gradients, make_model
from tests.packing.distributed_worker import CASES, SHARES
from tests.processes import launch_forked

CONFIGS = ROOT / "hf_bucketing" / "accelerate_configs"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Run distributed_worker.py in two processes, once for all cases, and return what the first process wrote."""
    folder = tmp_path_factory.mktemp("distributed")
    command = ["-m", "tests.packing.distributed_worker", folder, CONFIGS / "fsdp2.yaml"]
    launch_forked(launch_flags(2), command, num_processes=2, env={"ACCELERATE_USE_CPU": "true"}, cwd=ROOT)
    return {case: torch.load(folder / f"{case}.pt") for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradients_of_one(case: str, results: dict[str, dict]) -> None:
    result = results[case]
    assert result["num_processes"] == 2
    assert result["sharded"] == case.startswith("fsdp2") == ("FSDPCheckpointWrapper" in result["kinds"])
    assert (result["graphs"] > 0) == case.endswith("compiled")
    model = make_model(torch.float64)
    alone = gradients(model, Samples(torch.float64).loss_alone(model))
    packing = enable_packing(model, strip_length=4)
    packs = [Samples(torch.float64, order=share) for share in SHARES]
    losses = [samples.loss_packed(model, packing) * len(samples.latents) / 6 for samples in packs]
    assert_same_gradients(gradients(model, *losses), result["gradients"], 1e-10)
    assert_same_gradients(alone, result["gradients"], 1e-5)  # Wan's norms compute in float32 at all times


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_the_configurations(config: Path) -> None:
    loaded = load_config_from_file(str(config))
    assert (
        loaded.distributed_type.value == {"ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}[config.stem]
    )
    assert loaded.mixed_precision == "bf16"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_activation_checkpointing_of_fsdp_sees_its_own_pack(in_flight: int) -> None:
    model = make_model()
    cases = [Samples(), Samples(seed=2, order=(5, 3, 0, 2))][:in_flight]
    expected = gradients(model, *(samples.loss_alone(model) for samples in cases))
    packing = enable_packing(model, strip_length=4)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.blocks))
    summed = gradients(model, *[samples.loss_packed(model, packing) for samples in cases])
    summed = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in summed.items()}
    assert_same_gradients(expected, summed, 1e-4)
