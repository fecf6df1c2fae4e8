"""Two runs of transformers.Trainer, the second from a checkpoint: `accelerate launch trainer_worker.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_bucketing import PackBatchSampler
from hf_bucketing.loaders import EqualEpochs, PlannedBatchSampler
from tests.loaders.loader_worker import IDS, make_sampler

EPOCHS = 3


class Recorder(torch.nn.Module):
    """A model that remembers the rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(rows.tolist())
        return {"loss": self.linear(rows[:, None].float()).mean()}


class PlannedTrainer(Trainer):
    sampler: PlannedBatchSampler

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def packs() -> PackBatchSampler:
    return PackBatchSampler(
        10 + 7 * np.arange(len(IDS)) % 50,
        max_tokens=70,
        strip_length=1,
        strategy="sequential",
        seed=7,
        num_processes=2,
    )


def train(output: Path, sampler: PlannedBatchSampler, *, resume_from: Path | None = None, **settings: Any):
    """Train; return the rows of each step of this process."""
    arguments = TrainingArguments(
        output_dir=str(output), use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
        max_grad_norm=0, remove_unused_columns=False, **settings,
    )  # fmt: skip
    model = Recorder()
    trainer = PlannedTrainer(
        model=model,
        args=arguments,
        train_dataset=range(len(IDS)),
        data_collator=lambda rows: {"rows": torch.tensor(rows)},
    )
    trainer.sampler = sampler
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return model.seen


def check(output: Path, make, **settings: Any) -> None:
    """Train on three epochs of a sampler, and resume inside the second."""
    saved = 20 if make is packs else 10
    hosted = EqualEpochs if make is packs else lambda sampler: sampler
    whole = train(output / "whole", hosted(make()), save_steps=saved, **settings)
    plans = [make().plan(epoch) for epoch in range(EPOCHS)]
    steps = [plan.num_steps for plan in plans]
    assert steps[0] < saved < steps[0] + steps[1]
    assert (len(set(steps)) > 1) == (make is packs)
    seen = [rows for step in zip(*gather_object([whole]), strict=True) for rows in step]
    assert seen == [batch.tolist() for plan in plans for batch in plan.batches()]
    rest = train(
        output / "rest",
        hosted(make()),
        resume_from=output / "whole" / f"checkpoint-{saved}",
        save_steps=999,
        **settings,
    )
    assert rest == whole[saved:]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    check(folder / "bucket", lambda: make_sampler("bucket"), num_train_epochs=EPOCHS)
    check(folder / "pack", packs, max_steps=packs().total_steps(EPOCHS))
