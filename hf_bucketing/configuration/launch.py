"""How a run is launched, and what its settings and its launch exclude."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ..conditions.shares import read_conditions
from ..placement.conflicts import READ_FULL_WEIGHTS, Combination, Sharding, check_combination
from ..placement.settings import Precision
from ..settings import check_at_least, check_literals, setting
from .run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Processes of a run, which accelerate's configuration and the command that launches it name.

    Args:
        sharding (`"ddp"`, `"fsdp2"`, `"fsdp"`, `"deepspeed"` or `"deepspeed stage 3"`): How several processes share
            the training: each holds everything, or a part. Memory is planned for the first two.
        num_processes (`int`): Processes, one per GPU.
        device (`"cuda"` or `"cpu"`): Device of the run. On a GPU, a constant of 1 GiB stands for the CUDA context,
            and AdamW works on all weights at once.
        loads_once (`bool`): Whether one process loads the weights and sends the others their shares.
        grouped (`bool`): Whether accelerate's parallelism_config groups the processes.
        dynamo (`bool`): Whether accelerate compiles what it prepares.
        wraps_blocks (`bool`): Whether FSDP checkpoints all blocks (`fsdp_activation_checkpointing`).

    Raises:
        BucketingError: On an impossible value.
    """

    sharding: Sharding = setting("ddp", chosen=True)
    num_processes: int = setting(1, common=True, chosen=True)
    device: Literal["cuda", "cpu"] = "cuda"
    loads_once: bool = setting(False, flag=False)
    grouped: bool = setting(False, flag=False)
    dynamo: bool = setting(False, flag=False)
    wraps_blocks: bool = setting(False, flag=False)

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "num_processes")


def configured_precision() -> Precision:
    """Return the precision of runs that name none: that of accelerate's own configuration, or "no"."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    configured = load_config_from_file(None).mixed_precision if Path(default_config_file).is_file() else "no"
    return cast("Precision", str(os.environ.get("ACCELERATE_MIXED_PRECISION") or configured or "no").lower())


def check_run(run: RunConfig, launch: LaunchConfig, *, precision: str, planned: bool = False) -> None:
    """Raise BucketingError for settings that cannot be combined with each other or with the launch.

    Args:
        run ([`RunConfig`]): Settings of the run.
        launch ([`LaunchConfig`]): Its processes.
        precision (`str`): Mixed precision, theirs or that of accelerate's configuration.
        planned (`bool`): Whether only memory is planned. A plan for the CPU is made for GPUs all the same.
    """
    flat, batches, condition = run.flat(), run.batches, run.objective.condition
    accumulates = run.gradient_accumulation_steps > 1
    check_combination(
        Combination(
            memory=run.memory,
            adapters=run.adapters.lora_rank is not None,
            kind=run.adapters.adapter,
            lora_format=run.adapters.lora_format,
            optimizer=run.optimizer.optimizer,
            lora_plus=run.optimizer.lora_plus_ratio is not None,
            mixed_precision=precision,
            sharding=launch.sharding,
            num_processes=launch.num_processes,
            on_cpu=launch.device == "cpu" and not planned,
            experts=run.trained_component == "both",
            file=run.transformer_file,
            joined=tuple(name for name in READ_FULL_WEIGHTS if flat[name] is not None),
            searches=batches.max_tokens == "auto",
            loads_once=launch.loads_once,
            grouped=launch.grouped,
            dynamo=launch.dynamo,
            replaces=run.faults.on_error != "raise",
            strip_length=batches.strips,
            weighs_late=accumulates and condition is not None and read_conditions(condition).weighs,
            wraps_blocks=launch.wraps_blocks,
            planned=planned,
        )
    )
