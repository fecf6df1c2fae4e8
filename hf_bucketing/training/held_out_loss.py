"""The loss of held-out samples: each counts once over all processes, with the same noise whenever it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from ..batching.rows import TrainingData
from ..batching.steps import Step
from ..batching.ways import Experts
from ..buckets.arrays import FloatArray, IntArray
from ..columns.arrays import column_array
from ..configuration.batches import LoaderConfig
from ..configuration.outputs import HeldOutConfig
from ..errors import BucketingError, MediaError
from ..loaders.collators import Row
from ..loaders.faults import OnFault
from ..randomness import ROW

logger = get_logger(__name__)

_NAMED = 5
"""Rows that a message names."""


class _Levels(NamedTuple):
    """Losses and noise levels of rows, `(n, levels)` each, of one expert, which has a share of all noise levels.

    `conditions`, `(n,)`, are those that the rows are shown, by their positions among all, and `weights` theirs.
    """

    share: float
    weights: FloatArray
    conditions: FloatArray
    losses: FloatArray
    noise: FloatArray


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Compute the loss of held-out samples.

    No global random number is drawn, and accelerate knows nothing of the loader, so that training continues as if the
    loss had not been computed.

    Args:
        data ([`TrainingData`][hf_bucketing.batching.rows.TrainingData]): Held-out rows, planned for evaluation.
        config ([`HeldOutConfig`][hf_bucketing.configuration.outputs.HeldOutConfig]): Number of noise levels.
        workers ([`LoaderConfig`][hf_bucketing.configuration.batches.LoaderConfig]): Worker processes, which end
            after each computation.
        on_error (`"raise"` or `"replace"`): Whether an unreadable sample ends the run, or does not count and is named.
    """

    data: TrainingData
    config: HeldOutConfig
    workers: LoaderConfig
    on_error: OnFault = "raise"

    def describe(self) -> list[str]:
        """Return how many samples are held out and what computing their loss costs, as lines of text."""
        plan, config = self.data.sampler.plan(), self.config
        levels, sizes = config.validation_noise_levels, len(np.unique(self.data.bucket_ids[plan.indices]))
        return [
            f"  Held out = {plan.kept} samples of {sizes} sizes, never trained on",
            f"  Held-out loss = {levels} noise levels, {plan.num_steps * levels} forwards on each process, "
            f"{'at the start, ' if config.validation_loss_on_start else ''}every {config.validation_loss_steps} "
            "optimizer steps and at the end",
        ]

    def compute(
        self, experts: Experts, transformers: Mapping[str, torch.nn.Module], accelerator: Accelerator
    ) -> dict[str, Any]:
        """Run the held-out samples and return their losses as JSON values; call it on every process.

        All processes run as many forwards; rows that only fill up the last step do not count twice. Each of two
        experts runs at its share of the noise levels.

        Args:
            experts ([`Experts`]): Forwards of the transformers.
            transformers (mapping of `str` to `torch.nn.Module`): The transformers by their names in the pipeline.
            accelerator (`Accelerator`): Accelerator of the run.

        Returns:
            `dict`: `validation_loss`, weighted as in training; `samples`, the number that counts; `unreadable`, the
            `index` of those that do not; `by_bucket`, `by_noise` and, where there are several, `by_source` and
            `by_condition`, lists of mean losses, but for `by_noise` also by noise level; and `seconds`.

        Raises:
            MediaError: If a sample cannot be read, or with `on_error="replace"` none can.
            BucketingError: If a loss is not finite.
        """
        start, index = time.perf_counter(), column_array(self.data.dataset, ROW)
        divided = experts.levels(self.config.validation_noise_levels)
        scores = [
            self._score(step, transformers[step.recipe.trained], accelerator, levels=levels)
            for step, _share, levels in divided
        ]
        (seen,) = np.nonzero(np.min([score[:, 0] for score in scores], axis=0))
        parts = [
            _Levels(share, score[seen, 0], score[seen, 1], score[seen, 2 : 2 + levels], score[seen, 2 + levels :])
            for score, (_step, share, levels) in zip(scores, divided, strict=True)
        ]
        return {
            **self._summary(seen, parts, index, conditions=experts.steps[0].condition_names),
            "unreadable": index[np.setdiff1d(self.data.sampler.plan().indices, seen)].tolist(),
            "seconds": time.perf_counter() - start,
        }

    def _score(self, step: Step, transformer: torch.nn.Module, accelerator: Accelerator, *, levels: int) -> FloatArray:
        """Return of each row its condition's weight, 0 if it does not count, the condition, its losses and levels."""
        plan = self.data.sampler.plan()
        neighbours = accelerator.num_processes // plan.num_processes  # which take the same samples
        positions = range(accelerator.process_index // neighbours, plan.num_batches, plan.num_processes)
        batches = [plan.batch(position) for position in positions]
        _, first = np.unique(plan.indices, return_index=True)
        counts = np.zeros(len(plan.indices), bool)
        counts[first] = True
        index = column_array(self.data.dataset, ROW)
        measured, times = torch.zeros(len(index), 2 + 2 * levels), torch.zeros(len(index))
        for position, rows, batch in zip(positions, batches, self._loader(batches), strict=True):
            for reason in batch.pop("unreadable", ()):
                logger.warning(reason, main_process_only=False)
            batch = send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)
            losses = step.held_out(transformer, batch, num_levels=levels)
            if accelerator.process_index % neighbours:
                continue
            mine = rows[counts[plan.offsets[position] : plan.offsets[position + 1]]]
            place = {number: place for place, number in enumerate(batch["index"])}
            read = [row for row in mine.tolist() if index[row] in place]
            columns = [*(loss.values for loss in losses), *(loss.noise_levels for loss in losses)]
            drawn = [[condition.weight, step.condition_names.index(condition.name)] for condition in losses[0].drawn]
            table = torch.cat([torch.tensor(drawn), torch.stack(columns, 1).float().cpu()], 1)
            measured[read] = table[[place[index[row]] for row in read]]
            times[read] += 1
        measured = torch.cat([measured, times[:, None]], 1)
        gathered: FloatArray = accelerator.reduce(measured.to(accelerator.device), "sum").double().cpu().numpy()
        assert gathered[:, -1].max() <= 1, "each row counts once over all processes"
        return gathered[:, :-1]

    def _loader(self, batches: list[IntArray]) -> DataLoader[Any]:
        """Return a loader of this process's batches; its workers get their seed from a generator of its own."""
        loader = self.data.loader
        collator: Callable[[list[Any]], Any] = loader.collate_fn
        if self.on_error == "replace":
            collator = ReadableRows(collator, loader.dataset)
        return DataLoader(
            loader.dataset,
            batch_sampler=[rows.tolist() for rows in batches],
            collate_fn=collator,
            generator=torch.Generator(),
            **self.workers.options(),
        )

    def _summary(
        self, rows: IntArray, parts: Sequence[_Levels], index: IntArray, *, conditions: Sequence[str]
    ) -> dict[str, Any]:
        """Return means of losses and of noise levels of rows `(n,)`."""
        finite = np.all([np.isfinite(part.losses).all(1) for part in parts], axis=0)
        if not finite.all():
            wrong = index[rows[~finite]].tolist()
            raise BucketingError(
                f"The loss of {len(wrong)} held-out samples is not finite (index {wrong[:_NAMED]}); lower "
                "`learning_rate`, or check these samples."
            )
        weights = self.data.loss_weights(rows, epoch=0).numpy()
        ids = self.data.bucket_ids[rows]
        mean, below, by_noise = 0.0, 0.0, []
        for part in parts:
            means = np.average(part.losses, axis=0, weights=weights * part.weights)
            mean += part.share * float(means.mean())
            count = len(means)
            by_noise += [
                {
                    "quantiles": [below + part.share * level / count, below + part.share * (level + 1) / count],
                    "noise_level": float(part.noise[:, level].mean()),
                    "samples": len(rows),
                    "loss": float(means[level]),
                }
                for level in range(count)
            ]
            below += part.share
        by_bucket = [
            {"bucket_id": bucket, "size": list(self.data.table.size(bucket)), **_means(ids == bucket, parts)}
            for bucket in np.unique(ids).tolist()
        ]
        summary = {"validation_loss": mean, "samples": len(rows), "by_bucket": by_bucket, "by_noise": by_noise}
        groups: dict[str, tuple[Any, Sequence[str]]] = {}
        if self.data.source_ids is not None:
            groups["source"] = self.data.source_ids[rows], self.data.sources
        if len(conditions) > 1:
            groups["condition"] = parts[0].conditions, conditions
        for group, (of_rows, names) in groups.items():
            summary[f"by_{group}"] = [
                {group: names[int(number)], **_means(of_rows == number, parts)} for number in np.unique(of_rows)
            ]
        return summary


def _means(rows: npt.NDArray[np.bool_], parts: Sequence[_Levels]) -> dict[str, Any]:
    """Return how many rows are chosen, their mean loss, and that at each noise level."""
    chosen = [part.losses[rows].mean(0) for part in parts]
    loss = sum(part.share * float(losses.mean()) for part, losses in zip(parts, chosen, strict=True))
    return {"samples": int(rows.sum()), "loss": loss, "by_noise": np.concatenate(chosen).tolist()}


@dataclass(frozen=True)
class ReadableRows:
    """Collate those rows that can be read, and say under `unreadable` why the others cannot.

    If none can, the batch holds another row of the data set, since every process runs as many forwards.

    Args:
        collator (callable): Collator of the rows.
        dataset (`Dataset`): All rows.
    """

    collator: Callable[[list[Any]], Any]
    dataset: Any

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """Return the batch of the readable rows.

        Raises:
            MediaError: If no row of the data set can be read.
        """
        try:
            batch: dict[str, Any] = self.collator(rows)
            return batch
        except MediaError:
            reasons = [self._reason(row) for row in rows]
        readable = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
        if not readable:
            readable = list(islice((row for row in self.dataset if self._reason(row) is None), 1))
        if not readable:
            raise MediaError(f"None of the {len(self.dataset)} held-out samples can be read. {reasons[0]}")
        return {**self.collator(readable), "unreadable": [reason for reason in reasons if reason is not None]}

    def _reason(self, row: Row) -> str | None:
        """Return why a row cannot be read; None if it can."""
        try:
            self.collator([row])
        except MediaError as error:
            return str(error)
        return None


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Set a model and its modules to evaluation inside a `with` block, and each to its own mode after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def unreadable_message(now: list[int], before: list[int] | None) -> str | None:
    """Return a warning if held-out samples cannot be read, or others than when the loss was computed before.

    Args:
        now (list of `int`): The `index` of samples that cannot be read.
        before (list of `int`, *optional*): The same when the loss was computed before, if it was.
    """
    if not now and not before:
        return None
    said = f"{len(now)} held-out samples cannot be read and do not count in this held-out loss (index {now[:_NAMED]})"
    if before is not None and now != before:
        said += f"; before, {len(before)} did not count, so that the two losses are means over different samples"
    return f"{said}."
