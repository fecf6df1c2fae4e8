"""Trainings that each process runs in test_sharding.py, one after the other in one process group.

Run by `accelerate launch … -m tests.placement.sharded_worker CASES`. CASES is a JSON file with a list of cases: the
settings of the run, those that differ in all processes but the main one, variables of the environment, and the
optimizer step in which the run is killed to be resumed, or null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.fsdp import FSDPModule

from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer


class KilledError(Exception):
    """End of a run in the middle of a step, after which only its files are left."""


class KilledTrainer(Trainer):
    """A run that ends after a number of optimizer steps."""

    kill_at: int

    def _finish_step(self) -> None:
        super()._finish_step()
        if self.global_step == self.kill_at:
            raise KilledError


def main() -> None:
    # accelerate starts FSDP on accelerators alone. This is the one place where it asks which kind there is; what
    # follows is what it does on GPUs, on CPU tensors and gloo (ACCELERATE_TORCH_DEVICE=cpu).
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.destroy_process_group = lambda *_: None  # the next case uses the group too
    cases = Path(sys.argv[1])
    for case in json.loads(cases.read_text()):
        settings = case["settings"] | (case["of_others"] if os.environ["RANK"] != "0" else {})
        if case["kill_at"] is not None:
            KilledTrainer.kill_at = case["kill_at"]
            run(KilledTrainer, settings, case["environment"])
            settings = {**settings, "resume_from_checkpoint": "latest"}
        run(Trainer, settings, case["environment"])
    sys.stderr.flush()
    (cases.parent / f"done-{os.environ['RANK']}").touch()
    while len(list(cases.parent.glob("done-*"))) < PartialState().num_processes:
        time.sleep(0.05)  # not a barrier: gloo fails in one process if another has left the same barrier and exits
    os._exit(0)  # taking gloo's threads down can deadlock (seen with torch 2.13), and there is nothing to take down


def run(kind: type[Trainer], settings: dict, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # accelerate and the trainer also write there
    AcceleratorState._reset_state()
    if PartialState._shared_state:
        PartialState().distributed_type = DistributedType.MULTI_GPU  # which the last case replaced
    GradientState._reset_state()
    trainer = kind(TrainingConfig.from_flat(**settings))
    gathered = [part for part in trainer.trained.transformer.modules() if isinstance(part, FSDPModule)]
    about = {
        "type": trainer.accelerator.distributed_type.value,
        "shares": shares(trainer),
        "gathered": sorted({type(part).__name__.removeprefix("FSDP") for part in gathered}),
    }
    try:
        trainer.run()
    except KilledError:
        trainer.report.log.close()
        trainer.release()
    if PartialState().is_main_process:
        (Path(settings["output_dir"]) / "about.json").write_text(json.dumps(about))
    PartialState().wait_for_everyone()


def shares(trainer: Trainer) -> list[float]:
    """Return the share of the transformer's numbers that each process holds."""
    held = sum(getattr(weight, "_local_tensor", weight).numel() for weight in trainer.trained.transformer.parameters())
    every = [None] * PartialState().num_processes
    for process in range(len(every)):
        every[process] = broadcast_object_list([held], from_process=process)[0]
    whole = sum(weight.numel() for weight in trainer.trained.transformer.parameters())
    return [count / whole for count in every]


if __name__ == "__main__":
    main()
