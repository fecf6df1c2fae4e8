"""What a run tells while it trains: logs, trackers, status, and a progress bar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from tqdm.auto import tqdm

from ..adapters.settings import SETTINGS
from ..batching.run_data import RunData, StepRows, unreadable_log
from ..batching.steps import TARGETS, Computed, StepLosses
from ..buckets.arrays import FloatArray, IntArray
from ..caching.views import CACHED_VIEW
from ..command_line.config_file import CONFIG_FILE
from ..conditions.shares import read_conditions
from ..configuration.run import TrainingConfig
from ..devices import DeviceTimer, to_device
from ..files import complete_file, writing
from ..loaders.collators import PLANNED
from ..loaders.faults import FaultLog
from ..loaders.planned import StepCount
from ..packing.attention.dispatch import choices
from ..placement.sharding import SHARDED
from ..runs.page import write_live_page
from ..runs.run_log import COST_MODEL, TABLE, RunLog, Status, read_log, write_status
from .data_changes import keep_lock
from .held_out_loss import unreadable_message
from .optimizer_steps import SkippedSteps, describe_unencoded
from .step_metrics import PendingMetrics, StepFlops, StepMetrics
from .terminal import TIMED_STEPS, time_left
from .trackers import start_trackers

logger = get_logger(__name__)


class _Batch(NamedTuple):
    """A batch whose losses, and whether each sample was encoded, `(2, n)`, the device may not have computed yet."""

    losses: torch.Tensor
    rows: list[int]
    counted: IntArray
    timer: DeviceTimer
    entry: dict[str, Any]


class OpenStep(NamedTuple):
    """An optimizer step after its last backward pass, of which nothing is read yet.

    Attributes:
        batches (list): Its batches in this process.
        metrics ([`PendingMetrics`]): Its metrics.
        late (`bool`): Whether it is read after its update is launched, and not before.
    """

    batches: list[_Batch]
    metrics: PendingMetrics
    late: bool

    @property
    def place(self) -> dict[str, int]:
        """Its epoch, and the place of its last batch there."""
        return {name: self.batches[-1].entry[name] for name in ("epoch", "step")}


class RunReport:
    """What a run tells while it trains: logs, trackers, status, and a progress bar.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        data ([`RunData`]): What it draws from.
        accelerator (`Accelerator`): Its accelerator.
        keep (mapping, *optional*): State of the logs in the checkpoint that is resumed.
        flops ([`StepFlops`], *optional*): Operations of its steps, where they are logged.
    """

    def __init__(
        self,
        config: TrainingConfig,
        data: RunData,
        accelerator: Accelerator,
        *,
        keep: Mapping[str, int] | None,
        flops: StepFlops | None = None,
    ) -> None:
        self.flops = flops
        self.config, self.data, self.accelerator, self.folder = config, data, accelerator, Path(config.output_dir)
        degree, condition = config.memory.context_parallel_degree, config.objective.condition
        self.conditions: tuple[str, ...] = ()
        if condition is not None:
            self.conditions = read_conditions(condition).dropping_references(config.objective.reference_dropout).names
        self.log = RunLog(
            self.folder,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            degree=degree,
            keep=keep,
        )
        self.metrics = StepMetrics(
            accelerator,
            max_tokens=config.batches.token_limit,
            degree=degree,
            groups={
                "source": data.sources,
                "target": TARGETS if config.preservation.base_predictions else (),
                "condition": self.conditions,
            },
            peak_tflops=None if flops is None else flops.peak,
        )
        self._window: list[_Batch] = []
        self._ended: list[tuple[_Batch, FloatArray]] = []
        self._first_seconds: list[float] = []
        self.skipped = SkippedSteps(
            accelerator,
            limit=config.optimizer.max_skipped_steps,
            folder=self.folder,
            name_rows=lambda rows: data.name_rows(rows),
        )
        self._unencoded = config.faults.log(unreadable_log(config))

    def start(
        self, global_step: int, planned: StepCount, *, to_repeat: str, resumed: Mapping[str, Any] | None
    ) -> None:
        """Write the settings and the buckets, and begin the progress bar after the finished steps.

        Args:
            global_step (`int`): Finished optimizer steps.
            planned ([`StepCount`][hf_bucketing.loaders.planned.StepCount]): Optimizer steps of the run.
            to_repeat (`str`): Settings by which another run does the same, as YAML.
            resumed (mapping, *optional*): What the log says of a resume, if this is one.
        """
        if self.accelerator.is_main_process:
            if resumed is None:
                (self.folder / COST_MODEL).unlink(missing_ok=True)  # of an earlier run, whose logs go too
                keep_lock(self.config)
            else:
                self.log.write_step("resumes", global_step, resumed)
            settings = json.dumps(self.config.flat(), indent=2) + "\n"
            for name, text in ((SETTINGS, settings), (CONFIG_FILE, to_repeat)):
                with complete_file(self.folder / name) as partial:
                    partial.write_text(text, encoding="utf-8")
            self._write_table()
        start_trackers(self.accelerator, self.config)
        self.bar = tqdm(
            total=planned.steps,
            initial=global_step,
            desc=f"{self.config.batches.batching} steps",
            disable=not self.accelerator.is_local_main_process,
        )

    def _write_table(self) -> None:
        """Write the sizes of the buckets."""
        table = self.folder / "logs" / TABLE
        table.unlink(missing_ok=True)
        sizes = self.data.way.table_json(self.data.table)
        if sizes is not None:
            with complete_file(table) as partial:
                partial.write_text(sizes)

    def batch(
        self,
        losses: StepLosses,
        rows: StepRows,
        weights: torch.Tensor,
        batch: Mapping[str, Any],
        *,
        epoch: int,
        step: int,
        timer: DeviceTimer,
    ) -> None:
        """Add a batch to the metrics, without a wait for the device.

        Args:
            losses ([`StepLosses`]): Losses, noise levels and targets of its samples.
            rows ([`StepRows`]): What its samples count for; those of weight 0 are not reported.
            weights (`torch.Tensor` of shape `(n,)`): Weight of each sample in the loss of the optimizer step.
            batch (mapping): The batch.
            epoch (`int`): Its epoch.
            step (`int`): Its place in the epoch.
            timer ([`DeviceTimer`][hf_bucketing.devices.DeviceTimer]): What measures its time, started when it came.
        """
        timer.stop()
        counted = np.flatnonzero((rows.weights > 0).numpy())
        index, tokens = np.array(batch["index"]), rows.tokens[counted]
        groups = {} if rows.sources is None else {"source": rows.sources[counted]}
        if self.config.preservation.base_predictions:
            groups["target"] = losses.targets[counted]
        if self.conditions:
            places = [self.conditions.index(drawn.name) for drawn in losses.drawn]
            groups["condition"] = np.array(places, np.int64)[counted]
        values, noise_levels = losses.values, losses.noise_levels
        if len(counted) < len(index):
            there = to_device(torch.from_numpy(counted), values.device)
            values, noise_levels, weights = values[there], noise_levels[there], weights[there]
        cost = float(self.data.cost_model.cost(tokens).sum())
        flops = self._flops_of(losses, rows)
        self.metrics.add(values, noise_levels, weights=weights, tokens=tokens, cost=cost, groups=groups, flops=flops)
        entry = {
            "epoch": epoch,
            "step": step,
            "bucket_id": batch.get("bucket_id"),
            "index": index[counted].tolist(),
            "sources": groups["source"].tolist() if "source" in groups else None,
            "planned": np.array(batch[PLANNED])[counted].tolist() if PLANNED in batch else None,
            "views": np.array(batch[CACHED_VIEW])[counted].tolist() if CACHED_VIEW in batch else None,
        }
        encoded = torch.ones_like(losses.values) if losses.encoded is None else losses.encoded
        both = torch.stack([losses.values.detach(), encoded.to(losses.values)])
        self._window.append(_Batch(both, index.tolist(), counted, timer, entry))

    def _flops_of(self, losses: StepLosses, rows: StepRows) -> tuple[float, float]:
        """Return the operations of a batch, see [`StepFlops.of_batch`]; zeros where they are not logged."""
        if self.flops is None:
            return 0.0, 0.0
        computed = Computed(rows.tokens) if losses.computed is None else losses.computed
        together = self.accelerator.distributed_type in SHARDED  # then each batch is predicted, see `Step`
        base = bool(self.config.preservation.base_predictions) and (together or bool(losses.targets.any()))
        return self.flops.of_batch(computed, (rows.weights > 0).numpy(), base=base)

    def finish(
        self, factor: float, *, grad_norm: torch.Tensor | float | None, stop: int, late: bool = False
    ) -> OpenStep:
        """Gather the metrics of the optimizer step that ends, for [`read`][RunReport.read].

        See [`StepMetrics.finish`][hf_bucketing.training.step_metrics.StepMetrics].
        """
        window, self._window = self._window, []
        metrics = self.metrics.finish(
            factor,
            seconds=lambda: sum(batch.timer.seconds() for batch in window),
            losses=[batch.losses for batch in window],
            grad_norm=grad_norm,
            stop=stop,
            late=late,
        )
        return OpenStep(window, metrics, late)

    def read(self, step: OpenStep) -> dict[str, float]:
        """Return the metrics of an optimizer step, of which [`samples`][RunReport.samples] logs the rest."""
        metrics, read = step.metrics.read()
        self._ended = [(batch, values) for batch, (values, _) in zip(step.batches, read, strict=True)]
        for batch, (values, encoded) in zip(step.batches, read, strict=True):
            self.skipped.add(batch.rows, values, (encoded > 0) | (self._unencoded is not None))
            if self._unencoded is not None:
                rows = [row for row, ok in zip(batch.rows, encoded, strict=True) if not ok]
                self._report_unencoded(rows, self._unencoded, epoch=batch.entry["epoch"])
        return metrics

    def _report_unencoded(self, rows: list[int], log: FaultLog, *, epoch: int) -> None:
        """Count and name samples that cannot be encoded, as those that cannot be read."""
        for row, name in zip(rows, self.data.name_rows(rows), strict=True):
            message = describe_unencoded([name])
            logger.warning(f"{message} It counts for nothing.", main_process_only=False)
            log.report(epoch=epoch, index=row, reason=message)
        if not rows:
            log.consecutive = 0

    def samples(self) -> None:
        """Log the samples of the optimizer step that was read last.

        Call it after the update of the weights is launched: until then the device has nothing to compute.
        """
        for batch, values in self._ended:
            self.log.write_samples(**batch.entry, loss=values[batch.counted].tolist())
        self._ended = []

    def step(self, global_step: int, entry: Mapping[str, Any]) -> None:
        """Log an optimizer step, move the progress bar, and say once how long the run takes."""
        self._track(global_step, entry)
        with writing(self.folder / "logs"):
            self.log.write_step("losses", global_step, entry)
        self.bar.update()
        postfix = {"tokens_per_s": f"{entry['tokens_per_second']:.0f}", "epoch": entry["epoch"]}
        if "model_tflops" in entry:
            postfix["tflops"] = f"{entry['model_tflops']:.3g}"
        self.bar.set_postfix(loss=f"{entry['train_loss']:.4f}", **postfix)
        if len(self._first_seconds) < TIMED_STEPS:
            self._first_seconds.append(entry["seconds"])
            left = self.bar.total - global_step
            if len(self._first_seconds) == TIMED_STEPS and left > 0:
                logger.info(time_left(self._first_seconds, steps=left))

    def held_out(self, global_step: int, entry: Mapping[str, Any]) -> None:
        """Log a held-out loss, and warn if samples cannot be read."""
        values = {
            f"validation_loss_by_noise/{level['quantiles'][0]:.2f}": level["loss"] for level in entry["by_noise"]
        }
        self._track(global_step, {"validation_loss": entry["validation_loss"], **values})
        if self.accelerator.is_main_process:
            before = [line["unreadable"] for line in read_log(self.folder, "validation", last=1)]
            if message := unreadable_message(entry["unreadable"], *before or [None]):
                logger.warning(message)
            logger.info(f"Held-out loss {entry['validation_loss']:.4f} after optimizer step {global_step}")
        self.log.write_step("validation", global_step, entry)

    def status(self, status: Status, global_step: int, planned: StepCount) -> None:
        """Say how the run ended, or that it runs."""
        if self.accelerator.is_main_process:
            steps = {"global_step": global_step, "max_train_steps": planned.steps}
            write_status(self.folder, status, **steps, lines=self.log.state_dict(), attention=choices())
            if status != "running" and self.config.reporting.page_steps is not None:
                write_live_page(self.folder)  # which no longer refreshes itself

    def page(self, global_step: int) -> None:
        """Write the page of the run, if it is due after this optimizer step."""
        every = self.config.reporting.page_steps
        if every is not None and global_step % every == 0 and self.accelerator.is_main_process:
            write_live_page(self.folder)

    def _track(self, global_step: int, values: Mapping[str, Any]) -> None:
        """Give values to the trackers, which may write files in threads of their own."""
        with writing(self.folder / "logs"):
            self.accelerator.log(dict(values), step=global_step)
