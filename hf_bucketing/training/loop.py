"""The training loop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import diffusers
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    disable_fsdp_ram_efficient_loading,
    set_seed,
)
from tqdm.contrib.logging import logging_redirect_tqdm

from ..adapters.loading import expert_folder, fingerprints
from ..batching.checks import check_data
from ..batching.rows import make_data, make_held_out_data
from ..batching.run_data import RunData, unreadable_log
from ..batching.sample_rows import ModelTokens
from ..batching.steps import StepLosses
from ..batching.streamed import OpenedStream, make_streamed_data, open_stream
from ..batching.ways import make_experts
from ..command_line.config_file import TRAIN, ConfigFile, write_config
from ..command_line.script import StopSignals
from ..conditions.shares import most_appended
from ..configuration.on_resume import applied_changes, check_references, check_weights, resumed_config, settings_of
from ..configuration.prepared import check_same_settings
from ..configuration.run import TrainingConfig
from ..devices import DeviceTimer
from ..errors import BucketingError, Interrupted
from ..files import check_folder_writable
from ..loaders.planned import StepCount
from ..loaders.processes import check_shared
from ..loaders.resume import resume
from ..lock import check_unlocked, locked
from ..losses.per_sample import global_mean
from ..models.caption_lengths import describe_caption_lengths
from ..models.experts import transformers_of
from ..models.loading import pipeline_folder
from ..placement.sharding import SHARDED, configure_deepspeed, fingerprints_of, loads_once, refuse_code_in_shards
from ..runs.run_log import Status, write_cost_model
from ..settings import changed, marked
from .card import (
    Run,
    check_drawing,
    frame_rate,
    makes_images,
    open_repository,
    result_parts,
    trained_sizes,
    upload,
    write_card,
)
from .checkpoint import (
    Progress,
    find_checkpoint,
    list_checkpoints,
    list_results,
    load_state,
    save_checkpoint,
    without_accelerates_lines,
)
from .data_changes import LOOKED_AT, describe_changes
from .estimate import describe_memory, fill_checkpointing, fill_max_tokens
from .evaluation import Evaluation, plan_validation
from .held_out_loss import HeldOutLoss
from .opened import OpenedRun, check_settings, open_run
from .optimizer_steps import LossWindow
from .reporting import OpenStep, RunReport
from .step_metrics import count_flops
from .terminal import describe_run, next_commands
from .trackers import chosen_tracker
from .trained import TrainedModel, add_trained_parts

_DECIDE_STEPS = (*marked(TrainingConfig, "decides_steps"), "num_processes")
"""What the number of optimizer steps depends on, beside the plan, which a resumed run must have as it was."""

LOCK = "run.lock"
"""File in the output folder of a run that names the host and the process that train."""

logger = get_logger(__name__)


Kept = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function that returns what the config file of a run says about other commands, for the file that repeats it.

Its argument are the settings by which the rows were prepared and cached."""


def train(config: TrainingConfig, *, file: ConfigFile | None = None, kept: Kept | None = None) -> None:
    """Fine-tune the transformer of a text-to-video pipeline, and save it to `config.output_dir`.

    Runs in every process that `accelerate launch` starts. The settings of the run are saved as config.yaml.

    Args:
        config ([`TrainingConfig`]): Settings.
        file ([`ConfigFile`][hf_bucketing.command_line.config_file.ConfigFile], *optional*): The YAML file that they
            come from; what it says about preparing and caching must be what the rows were made with.
        kept (callable, *optional*): Function that returns what config.yaml says about other commands.

    Raises:
        BucketingError: If the data, the settings or the checkpoint do not fit.
    """
    trainer = Trainer(config, file=file, kept=kept)
    if config.dry_run:
        trainer.accelerator.print("\n".join(trainer.describe()))
        trainer.release()
    else:
        trainer.run()


def settings_to_repeat(
    config: TrainingConfig, *, made_with: Mapping[str, Any], kept: Kept | None = None, **chosen: Any
) -> dict[str, Any]:
    """Return the settings of a run as a YAML file holds them, with what another says about other commands.

    The run's own settings stand in the section of training, all of them, so that other commands which have settings of
    the same names keep those of the file.

    Args:
        config ([`TrainingConfig`]): Settings of the run, with everything that it chose itself.
        made_with (mapping): Settings by which its rows were prepared and cached, as its `dataset_dir` holds them.
        kept (callable, *optional*): As in [`train`].
        **chosen: Settings that differ from those in `config`.
    """
    others = {} if kept is None else kept(made_with)
    return {**others, **made_with, TRAIN: {**config.flat(), **chosen}}


class Trainer:
    """One run: opened, planned and prepared once, then trained step by step, and finished.

    Args:
        config ([`TrainingConfig`]): Settings.
        file ([`ConfigFile`][hf_bucketing.command_line.config_file.ConfigFile], *optional*): The YAML file that they
            come from.
        kept (callable, *optional*): As in [`train`].

    Raises:
        BucketingError: If the data, the settings or the checkpoint do not fit.
    """

    def __init__(self, config: TrainingConfig, *, file: ConfigFile | None = None, kept: Kept | None = None) -> None:
        self.requested, self.kept, self.folder = config, kept, Path(config.output_dir)
        check_folder_writable(self.folder)
        check_drawing()
        self.accelerator = make_accelerator(config)
        if self.accelerator.is_main_process and not config.dry_run:
            check_unlocked(self.folder / LOCK, what=f"The run in {self.folder}")
        set_seed(config.seed)
        opened = open_run(self._find_checkpoint(config), self.accelerator)
        check_same_settings(file, config.dataset_dir, settings=opened.made_with)
        if self.accelerator.is_main_process:
            for line in describe_changes(opened.config, opened.prepared, resumed=self.checkpoint is not None):
                logger.warning(line)
        stream = None
        if config.stream.streaming:
            taken = opened.recipe.reference_rule(trained=config.trained_component)
            stream = open_stream(opened.config, self.accelerator, taken=taken)
        prepared = opened.prepared if stream is None else stream.prepared
        assert prepared is not None, "a run has rows or a stream"
        validation = plan_validation(opened, prepared)
        self.repository = None
        if config.hub.push_to_hub and not config.dry_run and self.accelerator.is_main_process:
            self.repository = open_repository(config.hub, folder=self.folder)
        self._load(opened)
        opened = replace(opened, config=add_trained_parts(self.recipe, opened.config, self.accelerator))
        self.recipe.to(self.accelerator.device, *opened.called)
        sharded = self.accelerator.distributed_type in SHARDED
        self.experts = make_experts(opened.config, self.recipe, sharded=sharded)
        self.step = self.experts.at(0)
        self.config = fill_max_tokens(opened, self.experts)
        self.opened = replace(opened, config=self.config)
        held_out = self._make_data(stream)
        self.config = fill_checkpointing(self.opened, self.data, self.recipe)
        self.opened = replace(self.opened, config=self.config)
        self.trained = TrainedModel(self.recipe, self.config, self.data, self.accelerator)
        self.loader = resume(self.accelerator, self.trained.loader)
        self.evaluation = Evaluation(
            trained=self.trained,
            experts=self.experts,
            called=opened.called,
            held_out=held_out,
            validation=validation,
        )
        self.window = LossWindow(self.accelerator, degree=config.memory.context_parallel_degree)
        self.global_step = 0
        self.stop = self.stopped = 0  # the signal that was read, and the one that is obeyed
        self.open: OpenStep | None = None
        self.planned = self._count_steps()
        self.schedule_steps = self.planned.steps
        self.trained.start_schedule(self.schedule_steps)

    def _find_checkpoint(self, config: TrainingConfig) -> TrainingConfig:
        """Find the checkpoint to resume, if any; return the settings, what is left open as in its run."""
        name = config.checkpoints.resume_from_checkpoint
        if name is not None or config.checkpoints.checkpointing_steps is not None:
            self._check_shared()
        self.checkpoint = None if name is None else find_checkpoint(self.folder, name)
        if self.checkpoint is None:
            if results := list_results(self.folder):
                logger.warning(
                    f"{self.folder} holds the result of a finished run ({', '.join(results)}), which this run "
                    "replaces. To keep it, give another --output_dir."
                )
            return config
        config = resumed_config(self.checkpoint.progress.settings, config, self.accelerator)
        return changed(config, init_from_adapters=None)  # the checkpoint holds the adapters

    def _load(self, opened: OpenedRun) -> None:
        """Load the pipeline, check that a resumed run began with the same weights, and name too long captions."""
        config = opened.config
        if self.checkpoint is not None:
            check_references(self.checkpoint.progress.settings, config, opened.recipe.family)
        self.source = config.pretrained_model_name_or_path
        if config.adapters.lora_rank is None:  # the result is a whole pipeline
            self.source = str(pipeline_folder(self.source))
        self.recipe = opened.recipe.load(
            self.source,
            max_sequence_length=config.max_sequence_length,
            trained=config.trained_component,
            loading=opened.loading,
            audio=opened.trains_audio,
            references=most_appended(config.objective.condition) > 0,
        )
        self.weights = fingerprints_of(self.recipe, self.accelerator)
        for component in transformers_of(config.trained_component):
            folder = expert_folder(component, trained=config.trained_component)
            frozen = fingerprints(config.adapters.frozen_in(folder))
            self.weights |= {f"{component} {name}": digest for name, digest in frozen.items()}
        if self.checkpoint is not None:
            saved = self.checkpoint.progress.weights
            source = " with ".join((config.pretrained_model_name_or_path, *config.weight_files.values()))
            check_weights(saved, self.weights, source=source)
        if self.accelerator.is_main_process and opened.prepared is not None:
            model, length = config.pretrained_model_name_or_path, self.recipe.max_sequence_length
            for line in describe_caption_lengths(
                opened.prepared, opened.recipe, model, rows=LOOKED_AT, max_sequence_length=length
            ):
                logger.warning(line)

    def _make_data(self, stream: OpenedStream | None) -> HeldOutLoss | None:
        """Make the loaders of trained and of held-out samples, and check that the model takes their samples."""
        opened, config, tokens = self.opened, self.config, ModelTokens.of(self.recipe)
        with self.accelerator.main_process_first():  # the others find its columns in the cache
            if self.accelerator.is_main_process and self.checkpoint is None and not config.dry_run:
                unreadable_log(config).unlink(missing_ok=True)
            self.data: RunData
            if stream is None:
                self.data = make_data(config, opened.spec, tokens, prepared=opened.prepared)
            else:
                self.data = make_streamed_data(config, opened.spec, tokens, opened=stream)
            held_out = make_held_out_data(
                config, opened.spec, tokens, prepared=opened.prepared, held_out=opened.held_out
            )
        self.data.check_same(self.accelerator)
        for step in self.experts.steps:
            step.texts = self.data.texts
            for data in filter(None, (self.data, held_out)):
                check_data(step, data)
        if held_out is None:
            return None
        return HeldOutLoss(
            data=held_out, config=config.held_out, workers=config.loader, on_error=config.faults.on_error
        )

    def _check_shared(self) -> None:
        """Raise BucketingError on all processes unless all of them see the output folder."""
        advice = (
            "checkpoints, which all processes write, need an `output_dir` on a disk that all machines share, or omit "
            "`checkpointing_steps` and `resume_from_checkpoint`"
        )
        check_shared(self.accelerator, self.folder, advice=advice)

    def _count_steps(self) -> StepCount:
        """Return the optimizer steps of the run: exactly if all epochs left can be planned in a second or so."""
        if self.config.max_train_steps is not None:
            return StepCount(self.config.max_train_steps, True)
        left = self.data.steps_left(self.loader, self.config, finished=self.global_step)
        return left._replace(steps=self.global_step + left.steps)

    def describe(self) -> list[str]:
        """Return the plan, its cost and the memory that it needs, as lines of text."""
        heading = "***** Dry run: nothing is trained *****" if self.config.dry_run else "***** Running training *****"
        steps, held_out = str(self.planned), self.evaluation.held_out
        lines = [heading, *self.data.describe(self.config, accelerator=self.accelerator, max_train_steps=steps)]
        lines += self.config.preservation.describe()
        lines += [] if held_out is None else held_out.describe()
        transformers = [expert.transformer for expert in self.recipe.experts]
        return lines + describe_memory(self.opened, self.data, transformers=transformers)

    def run(self) -> None:
        """Train from the start or from a checkpoint, and save the pipeline.

        Raises:
            BucketingError: If another run writes into the output folder.
        """
        lock = locked(self.folder / LOCK, what=f"The run in {self.folder}")
        with lock if self.accelerator.is_main_process else nullcontext():
            self._start()
            try:
                with logging_redirect_tqdm(), StopSignals() as self.signals:
                    while self.global_step < self.planned.steps and not self.stopped:
                        self._run_epoch(self.loader.epoch)
                self.report.bar.close()
                if self.stopped:
                    self._end_early()
                self._finish()
            except KeyboardInterrupt as error:
                self._write_status("interrupted")
                if isinstance(error, Interrupted):
                    raise
                how = "there is no checkpoint yet"
                if saved := list_checkpoints(self.folder):
                    how = f"continue from {saved[-1].name} with --resume_from_checkpoint latest"
                raise Interrupted(f"Training was at optimizer step {self.global_step}; {how}.") from error
            except Exception:
                self._write_status("failed")
                raise
            self._write_status("finished")

    def _start(self) -> None:
        """Load the checkpoint to resume, if any, and begin the logs."""
        keep, changes = self._resume()
        flops = count_flops(self.opened, self.data)
        self.report = RunReport(self.config, self.data, self.accelerator, keep=keep, flops=flops)
        resumed = None
        if self.checkpoint is not None:
            place = {"epoch": self.loader.epoch, "num_processes": self.accelerator.num_processes}
            resumed = {**place, "changes": changes}
        self.report.start(self.global_step, self.planned, to_repeat=self._settings_to_repeat(), resumed=resumed)
        what = describe_run(self.config, self.accelerator, planned=self.planned, finished=self.global_step)
        for line in [what, *self.describe()]:
            logger.info(line)
        self._write_status("running")
        if self.checkpoint is None:
            self._log_held_out()

    def _log_held_out(self, *, last: bool = False) -> None:
        entry = self.evaluation.held_out_loss(self.global_step, last=last)
        if entry is not None:
            self.report.held_out(self.global_step, entry)

    def _resume(self) -> tuple[dict[str, int] | None, list[str]]:
        """Load the checkpoint to resume, if any; return the state of its logs, and the settings that changed since."""
        if self.checkpoint is None:
            return None, []
        refuse_code_in_shards(self.checkpoint.path)
        with without_accelerates_lines():
            load_state(self.accelerator, self.checkpoint.path)
        progress = self.checkpoint.progress
        self.global_step = progress.global_step
        for ema in self.trained.ema.values():
            ema.to(self.accelerator.device)
        self.planned = self._count_steps()  # their number depends on the number of processes
        self.schedule_steps = self.planned.steps
        now, saved = self._checkpoint_settings(), progress.settings
        if not self.planned.exact and all(saved.get(name) == now[name] for name in _DECIDE_STEPS):
            self.schedule_steps = saved["schedule_steps"]  # another estimate would be another schedule
        self.trained.change_schedule(self.schedule_steps)
        logger.info(f"Resumed after optimizer step {self.global_step}, in epoch {self.loader.epoch}")
        if changes := applied_changes(saved, self.config, self.accelerator):
            logger.info(f"Settings changed since {self.checkpoint.path.name}: {', '.join(changes)}")
        return progress.log, changes

    def _settings_to_repeat(self) -> str:
        """Return the settings of the run as YAML by which a run in another folder does the same from its start."""
        launch = f"hf_bucketing launch --num_processes {self.accelerator.num_processes} train"
        settings = settings_to_repeat(
            self.config,
            made_with=self.opened.made_with,
            kept=self.kept,
            mixed_precision=self.accelerator.mixed_precision,
            init_from_adapters=self.requested.adapters.init_from_adapters,
            resume_from_checkpoint=None,
        )
        return write_config(settings, comment=f"To repeat the run:\n{launch} --config THIS_FILE --output_dir OTHER")

    def _write_status(self, status: Status) -> None:
        self.report.status(status, self.global_step, self.planned)

    def _run_epoch(self, epoch: int) -> None:
        if not self.planned.exact:  # the estimate becomes exact before the last epochs
            self.planned = self._count_steps()
            self.report.bar.total = self.planned.steps
        if self.loader.step == 0:
            self.report.log.write_plan(epoch, self.data.epoch_summary(self.loader))
        num_batches = self.loader.step
        for batch in self.loader:
            timer = DeviceTimer(self.accelerator.device)
            num_batches += 1
            step = self.loader.step - 1
            self.step = self.experts.at(self.launched)
            rows = self.step.weigh(self.data.rows_of(self.loader, batch, epoch=epoch), batch, epoch=epoch)
            weights = self.window.weigh(rows)
            with self.accelerator.accumulate(*self.trained.transformers.values()):
                losses = self._train_on(batch, weights, epoch=epoch)
                last = self.accelerator.sync_gradients
                if last:
                    factor = self.window.finish(self.trained.weights[self.step.recipe.trained])
                    norm = self.trained.clip_gradients()
                self.report.batch(losses, rows, weights, batch, epoch=epoch, step=step, timer=timer)
                if last:
                    self._launch_step(factor, norm)
                self.trained.optimizer.zero_grad()
            if last:
                self._finish_step()
            if self.stopped or self.global_step == self.planned.steps:
                return
        self._settle()
        for line in self.data.after_epoch(self.loader, self.accelerator, num_batches=num_batches):
            logger.info(line)

    def _train_on(self, batch: Mapping[str, Any], weights: torch.Tensor, *, epoch: int) -> StepLosses:
        """Run forward and backward on a batch."""
        with self.trained.enough_memory_for(batch):
            transformer = self.trained.transformers[self.step.recipe.trained]
            losses = self.step(transformer, batch, epoch=epoch)
            loss = global_mean(losses.values, weights.to(losses.values), accelerator=self.accelerator, total=1.0)
            self.accelerator.backward(loss)
        return losses

    @property
    def launched(self) -> int:
        """Optimizer steps so far, with the one that is still open."""
        return self.global_step + (self.open is not None)

    def _launch_step(self, factor: float, norm: Any) -> None:
        """End an optimizer step after its last backward pass: now, or one step later if the device can update alone.

        The step before ends first, as the learning rate and the averages of this one come after it.
        """
        late = self.trained.reads_late(self.step.recipe.trained)
        step = self.report.finish(factor, grad_norm=norm, stop=self.signals.number, late=late)
        self._settle()
        if late:
            self.trained.launch_update(step.metrics.found_inf())
        self.open = step
        if not late:
            self._settle()

    def _settle(self) -> None:
        """Read the open optimizer step, if there is one, and apply, count and log it."""
        if self.open is None:
            return
        step, self.open = self.open, None
        metrics = self.report.read(step)
        try:
            entry = self._apply_step(step, metrics)
        finally:
            self.report.samples()
        self.global_step += 1
        self.stop = int(entry.pop("stop", self.stop))
        self.report.step(self.global_step, entry)

    def _apply_step(self, step: OpenStep, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Change the weights, unless loss or gradients are not finite; return what to log of the step.

        The metrics are those of all processes, so that all decide alike. They are gathered before the weights change.
        """
        trained = self.experts.at(self.global_step).recipe.trained
        skipped = self.report.skipped.check(self.global_step + 1, metrics, **step.place)
        if skipped is None:
            self.trained.update(trained, launched=step.late)
        else:
            self.report.log.write_step("skipped", self.global_step + 1, skipped)
            self.trained.leave()
        rate = float(self.trained.lr_scheduler.get_last_lr()[0])
        entry: dict[str, Any] = {**metrics, "lr": rate, "epoch": step.place["epoch"]}
        if len(self.experts.steps) > 1:
            entry["expert"] = trained
        return entry if skipped is None else {**entry, "skipped": True}

    def _is_due(self, global_step: int) -> bool:
        """Return whether anything but its log line comes after an optimizer step."""
        saves, shows = self.config.checkpoints.checkpointing_steps, self.config.reporting.page_steps
        return any(every and global_step % every == 0 for every in (saves, shows, *self.evaluation.intervals))

    def _finish_step(self) -> None:
        """Do what is due after an optimizer step, if anything is."""
        last = self.launched == self.planned.steps
        if not (last or self.stop or self._is_due(self.launched)):
            return
        self._settle()
        if self.stop and not last:  # what else is due is omitted, as launchers and schedulers wait for seconds
            self.stopped = self.stop
            self._save_early()
            return
        self._log_held_out(last=last)  # before a checkpoint, which counts the lines of logs
        every = self.config.checkpoints.checkpointing_steps
        if every and self.global_step % every == 0:
            self._save_checkpoint()
        self.evaluation.render(self.global_step, last=last)
        self.report.page(self.global_step)

    def _save_checkpoint(self) -> None:
        self.trained.check(f"checkpoint-{self.global_step} is not saved and earlier ones are kept")
        progress = Progress(
            global_step=self.global_step,
            log=self.report.log.state_dict(),
            settings=self._checkpoint_settings(),
            weights=self.weights,
        )
        limit = self.config.checkpoints.checkpoints_total_limit
        with self.trained.optimizer_in_evaluation():
            save_checkpoint(self.accelerator, self.folder, progress, limit=limit)
        if self.accelerator.is_main_process:
            write_cost_model(self.folder)

    def _checkpoint_settings(self) -> dict[str, Any]:
        """Return the settings of the run for its checkpoint, with the length of its learning rate schedule."""
        chosen = {"num_processes": self.accelerator.num_processes, "schedule_steps": self.schedule_steps}
        return {**settings_of(self.config, self.accelerator), **chosen}

    def _save_early(self) -> None:
        """Save the adapters, if there are any, and a checkpoint of a run that got a signal to stop.

        Raises:
            BucketingError: If weights are not finite; or, after the adapters, if machines do not share the folder.
        """
        if self.trained.adapted:
            self.trained.check("nothing is saved")
            self.trained.save_adapters(self.folder)
        if self.config.checkpoints.checkpointing_steps is None:
            self._check_shared()
        self._save_checkpoint()

    def _end_early(self) -> None:
        """End a run that got a signal to stop, and whose place is saved."""
        self.report.log.close()
        self.release()
        place = f"Training was at optimizer step {self.global_step} of {self.planned}"
        raise Interrupted(
            f"{place} ({signal.Signals(self.stopped).name}); checkpoint-{self.global_step} is saved in "
            f"{self.folder}, continue with --resume_from_checkpoint latest.",
            self.stopped,
        )

    def _finish(self) -> None:
        """Save the result with its card, and upload it if it is asked for."""
        accelerator, recipe = self.accelerator, self.recipe
        accelerator.wait_for_everyone()
        self.trained.check("no result is saved")
        if 0 < self.global_step == self.report.skipped.in_a_row:
            raise BucketingError(
                f"Loss or gradients were not finite in all {self.global_step} optimizer steps, so nothing was learned "
                "and no result is saved. Lower `learning_rate`, or check the samples."
            )
        self.trained.save(self.folder, source=Path(self.source))
        logger.info(f"Saved to {self.folder}")
        parts: list[str] = []
        advice: list[str] = []
        if accelerator.is_main_process:
            logger.info(write_cost_model(self.folder))
            validation = self.evaluation.validation
            samples = {} if validation is None else validation.last_files(self.global_step)
            card, message = write_card(self.folder, Run(self.config, recipe, self.data, self.repository, samples))
            logger.info(message)
            trained = self.config.trained_component
            parts = result_parts(self.folder, adapters=self.trained.adapted, trained=trained) + card
            advice = next_commands(
                self.config,
                recipe,
                size=trained_sizes(self.data)[0][0],
                fps=frame_rate(self.data),
                images_only=makes_images(recipe),
            )
        self.report.log.close()
        self.release()
        if self.repository is not None:  # the other processes have ended meanwhile, and time out nowhere
            logger.info(upload(self.folder, self.repository, parts))
        for line in advice:
            logger.info(line)

    def release(self) -> None:
        """Release everything that was prepared, and end the process group."""
        del self.loader
        self.trained.release()


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Return the accelerator of a run; only the main process of a machine shows progress bars.

    Raises:
        BucketingError: On settings that cannot be combined with sharded weights.
    """
    folder = Path(config.output_dir)
    accelerator = Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        mixed_precision=config.mixed_precision,
        dataloader_config=DataLoaderConfiguration(non_blocking=torch.cuda.is_available()),  # see LoaderConfig.options
        log_with=chosen_tracker(config.reporting.report_to),
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
    )
    check_settings(config, accelerator)
    configure_deepspeed(
        accelerator,
        accumulation_steps=config.gradient_accumulation_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    if loads_once(accelerator):  # transformers would leave text encoders empty, which nothing fills
        disable_fsdp_ram_efficient_loading()
    if not accelerator.is_local_main_process:
        datasets.disable_progress_bars()
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    return accelerator
