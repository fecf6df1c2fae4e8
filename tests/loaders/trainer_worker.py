"""Two runs of transformers.Trainer, the second from a checkpoint: `accelerate launch trainer_worker.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

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


class BucketTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_sampler=make_sampler("bucket"), collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def train(output: Path, *, save_steps: int, resume_from: str | None = None) -> list[list[int]]:
    """Train; return the rows of each step of this process."""
    settings = TrainingArguments(
        output_dir=str(output), num_train_epochs=EPOCHS, save_steps=save_steps, use_cpu=True,
        report_to="none", disable_tqdm=True, logging_strategy="no", max_grad_norm=0, remove_unused_columns=False,
    )  # fmt: skip
    model = Recorder()
    trainer = BucketTrainer(
        model=model,
        args=settings,
        train_dataset=list(range(len(IDS))),
        data_collator=lambda rows: {"rows": torch.tensor(rows)},
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return model.seen


def main() -> None:
    output = Path(sys.argv[1])
    saved = 10
    whole = train(output / "whole", save_steps=saved)
    plans = [list(make_sampler("bucket").plan(epoch).batches()) for epoch in range(EPOCHS)]
    steps = len(plans[0]) // 2
    assert steps < saved < 2 * steps, "saved within the second epoch"
    together = gather_object([whole])
    for epoch, plan in enumerate(plans):
        own = slice(epoch * steps, (epoch + 1) * steps)
        seen = [rows for step in zip(*(process[own] for process in together), strict=True) for rows in step]
        assert seen == [batch.tolist() for batch in plan], epoch
    rest = train(output / "rest", save_steps=1000, resume_from=str(output / "whole" / f"checkpoint-{saved}"))
    assert rest == whole[saved:], (rest, whole[saved:])


if __name__ == "__main__":
    main()
