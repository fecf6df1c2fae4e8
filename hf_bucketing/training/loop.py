"""The training loop."""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import diffusers
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, disable_fsdp_ram_efficient_loading, set_seed
from diffusers.training_utils import cast_training_params
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..adapters.lora import SETTINGS, checkpoint_adapters_only, save_lora, start_adapters
from ..buckets.table import BucketTable
from ..command_line.config_file import CONFIG_FILE, ConfigFile, write_config
from ..errors import BucketingError, Interrupted
from ..files import check_folder_writable, complete_file, writing
from ..loaders.collators import PLANNED
from ..loaders.resume import resume
from ..lock import check_unlocked, locked
from ..losses.reduction import global_mean
from ..models.enable import disable_packing
from ..models.loading import PARTS, pipeline_folder, read_config
from ..optimizers.adamw import apply_settings, make_optimizer, make_schedule
from ..placement.context_parallel import ContextParallel
from ..placement.offload import offload_blocks
from ..placement.quantization import leave_frozen_weights_to_each_process
from ..placement.sharding import (
    block_by_block,
    configure_deepspeed,
    fingerprints_of,
    loads_once,
    rendering_in_lockstep,
    resharded,
    sending_weights,
    sharded_adapters,
)
from ..placement.shards import SHARDED, averaged
from ..placement.trust import refuse_code_in_shards
from ..settings import changed
from .agreement import check_shared
from .card import Run, write_card
from .checkpoint import (
    Progress,
    find_checkpoint,
    gather_weights,
    list_checkpoints,
    load_state,
    save_checkpoint,
    save_pipeline,
    without_accelerates_lines,
)
from .config import TrainingConfig
from .data import UNREADABLE, make_data, make_held_out_data
from .estimate import describe_memory, fill_max_tokens, out_of_memory
from .held_out_loss import HeldOutLoss, in_evaluation, unreadable_message
from .hub import open_repository, result_parts, upload
from .loss_window import LossWindow
from .on_resume import applied_changes, check_weights, resumed_config, settings_of
from .opened import OpenedRun, check_settings, open_run, trained_dtype
from .run_data import ModelTokens, RunData
from .run_log import COST_MODEL, TABLE, RunLog, Status, StepMetrics, read_log, write_cost_model, write_status
from .script_settings import settings_to_repeat
from .skipped import SkippedSteps, check_finite
from .steps import StepLosses, check_cached, check_positions, make_step
from .stopping import StopSignals
from .streamed import OpenedStream, make_streamed_data, open_stream
from .validation import Validation, images_of, parse_sizes

_DECIDE_STEPS = ("num_train_epochs", "gradient_accumulation_steps", "num_processes")
"""What the number of optimizer steps depends on, beside the plan, which a resumed run must have as it was."""

LOCK = "run.lock"
"""File in the output folder of a run that names the host and the process that train."""

logger = get_logger(__name__)


def train(config: TrainingConfig, *, file: ConfigFile | None = None) -> None:
    """Fine-tune the transformer of a text-to-video pipeline, and save it to `config.output_dir`.

    Runs in every process that `accelerate launch` starts. The settings of the run are saved as config.yaml, with what
    `file`, the YAML file that they come from, says about other scripts.

    Raises:
        BucketingError: If the data, the settings or the checkpoint do not fit.
    """
    trainer = Trainer(config, file=file)
    if config.dry_run:
        trainer.accelerator.print("\n".join(trainer.describe()))
        trainer.release()
    else:
        trainer.run()


class Trainer:
    """One run: all that is prepared once, and the progress that checkpoints hold."""

    def __init__(self, config: TrainingConfig, *, file: ConfigFile | None = None) -> None:
        self.given, self.file, self.folder = config, file, Path(config.output_dir)
        check_folder_writable(self.folder)
        self.accelerator = make_accelerator(config)
        if self.accelerator.is_main_process and not config.dry_run:
            check_unlocked(self.folder / LOCK, what=f"The run in {self.folder}")
        set_seed(config.seed)
        run = open_run(self._find_checkpoint(config), self.accelerator)
        self.calls = run.called
        self.validation = self._plan_validation(run)
        self.repository = None
        if config.hub.push_to_hub and not config.dry_run and self.accelerator.is_main_process:
            self.repository = open_repository(config.hub, folder=self.folder)
        stream = open_stream(run.config, self.accelerator) if config.stream.streaming else None
        self._load(run)
        run = replace(run, config=self._prepare_model(run.config))
        self.step = make_step(run.config, self.recipe)
        self.config = fill_max_tokens(run, self.step)
        self.opened = replace(run, config=self.config)
        self._make_data(stream)
        self.global_step = self.stopped = 0
        self._prepare()

    def _find_checkpoint(self, config: TrainingConfig) -> TrainingConfig:
        """Find the checkpoint to resume, if any; return the settings, what is left open as in its run."""
        name = config.checkpoints.resume_from_checkpoint
        if name is not None or config.checkpoints.checkpointing_steps is not None:
            self._check_shared()
        self.checkpoint = None if name is None else find_checkpoint(self.folder, name)
        if self.checkpoint is None:
            return config
        config = resumed_config(self.checkpoint.progress.settings, config, self.accelerator)
        return changed(config, init_from_adapters=None)  # the checkpoint holds the adapters

    def _plan_validation(self, run: OpenedRun) -> Validation | None:
        """Return what is rendered, with its images and sizes, if prompts are given."""
        config, recipe = run.config, run.recipe
        if not config.validation.validation_prompts:
            return None
        sizes = parse_sizes(config.validation.validation_sizes, run.spec)
        each = recipe.num_images(read_config(config.pretrained_model_name_or_path, config.trained_component))
        return Validation(
            config=config.validation,
            images=images_of(config.validation, each=each, pipeline_class=recipe.pipeline_class),
            sizes=sizes,
            seed=config.seed,
            folder=self.folder / "validation",
        )

    def _load(self, run: OpenedRun) -> None:
        """Load the pipeline, and check that a resumed run began with the same weights."""
        config = run.config
        self.source = config.pretrained_model_name_or_path
        if config.adapters.lora_rank is None:  # the result is a whole pipeline
            self.source = str(pipeline_folder(self.source))
        self.recipe = run.recipe.load(
            self.source,
            max_sequence_length=config.max_sequence_length,
            trained=config.trained_component,
            loading=run.loading,
        )
        self.weights = fingerprints_of(self.recipe, self.accelerator)
        if self.checkpoint is not None:
            saved = self.checkpoint.progress.weights
            check_weights(saved, self.weights, source=config.pretrained_model_name_or_path)

    def _make_data(self, stream: OpenedStream | None) -> None:
        """Make the loaders of trained and of held-out samples, and check that the model takes their samples."""
        run, config, tokens = self.opened, self.config, ModelTokens.of(self.recipe)
        with self.accelerator.main_process_first():  # the others find its columns in the cache
            if self.accelerator.is_main_process and self.checkpoint is None and not config.dry_run:
                (self.folder / "logs" / UNREADABLE).unlink(missing_ok=True)
            self.data: RunData
            if stream is None:
                self.data = make_data(config, run.spec, tokens, prepared=run.prepared)
            else:
                self.data = make_streamed_data(config, run.spec, tokens, opened=stream)
            held_out = make_held_out_data(config, run.spec, tokens, prepared=run.prepared, held_out=run.held_out)
        self.data.check_same(self.accelerator)
        self.step.empty_text = self.data.empty_text
        for data in filter(None, (self.data, held_out)):
            data.check_buckets(functools.partial(self._check_buckets, data))
            self.recipe.check_conditions(data.conditions)
            check_cached(self.recipe, data)
        self.held_out = None
        if held_out is not None:
            self.held_out = HeldOutLoss(
                data=held_out, config=config.held_out, workers=config.loader, on_error=config.faults.on_error
            )

    def _check_shared(self) -> None:
        """Raise BucketingError on all processes unless all of them see the output folder."""
        advice = (
            "checkpoints, which all processes write, need an `output_dir` on a disk that all machines share, or omit "
            "`checkpointing_steps` and `resume_from_checkpoint`"
        )
        check_shared(self.accelerator, self.folder, advice=advice)

    def _prepare_model(self, config: TrainingConfig) -> TrainingConfig:
        """Add adapters, if any, and move what is called; return the settings with the alpha of the adapters.

        What is trained is set to training, for dropout and the drop of tokens; frozen parts stay in evaluation.
        """
        recipe, accelerator = self.recipe, self.accelerator
        if config.adapters.lora_rank is not None:
            adapters = start_adapters(recipe.pipeline, config.adapters, component=recipe.trained)
            cast_training_params(recipe.transformer, dtype=trained_dtype(config))
            config = changed(
                config,
                lora_alpha=adapters.lora_alpha,
                lora_targets=adapters.lora_targets,
                lora_format=adapters.lora_format,
            )
            checkpoint_adapters_only(
                accelerator, recipe.pipeline, component=recipe.trained, lora_format=adapters.lora_format
            )
        if config.memory.gradient_checkpointing:
            recipe.transformer.enable_gradient_checkpointing()
        if config.memory.offload_blocks:
            offload_blocks(recipe.transformer, config.memory.offload_blocks, device=accelerator.device)
        recipe.transformer.train()  # before max_tokens="auto" tries steps
        leave_frozen_weights_to_each_process(recipe.transformer)
        recipe.to(accelerator.device, *self.calls)
        return config

    def _check_buckets(self, data: RunData, counts: Mapping[int, int]) -> None:
        """Raise BucketingError if the model cannot take samples of some buckets, each given with its number."""
        check_positions(self.step, data.table, counts, data.spec)
        self.recipe.check_frames(data.table, np.repeat(list(counts), list(counts.values())).astype(np.int64))

    def _prepare(self) -> None:
        """Let accelerate prepare what is trained, and register what its checkpoints hold."""
        config, transformer = self.config, self.recipe.transformer
        optimizer = make_optimizer(transformer.parameters(), config.optimizer)
        adapted = config.adapters.lora_rank is not None
        with (
            sharded_adapters(transformer, self.accelerator) if adapted else nullcontext(),
            sending_weights(transformer, self.accelerator),
            block_by_block(transformer, self.accelerator),
        ):
            prepared = self.data.prepare(
                self.accelerator, transformer, optimizer, degree=config.memory.context_parallel_degree
            )
        self.transformer, self.optimizer, loader = prepared
        self.context_parallel = ContextParallel(
            self.recipe.transformer,
            self.accelerator,
            degree=config.memory.context_parallel_degree,
            packed=config.batches.batching == "pack",
        )
        self.window = LossWindow(self.accelerator)
        self.trained = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        self.ema = None
        if config.ema_decay is not None:
            self.ema = averaged(self.trained, decay=config.ema_decay, accelerator=self.accelerator)
        self.loader = resume(self.accelerator, loader)
        self._count_steps()
        self.schedule_steps = self.max_train_steps
        # Stepped here, once per optimizer step: a prepared scheduler would step once per process.
        self.lr_scheduler = make_schedule(optimizer, config.optimizer, num_training_steps=self.schedule_steps)
        self.accelerator.register_for_checkpointing(self.lr_scheduler)

    def _count_steps(self) -> None:
        """Set the optimizer steps of the run: exactly if all epochs that are left can be planned in a second or so."""
        self.max_train_steps, self.exact = self.config.max_train_steps or 0, True
        if self.config.max_train_steps is None:
            steps, self.exact = self.data.steps_left(self.loader, self.config, finished=self.global_step)
            self.max_train_steps = self.global_step + steps

    @property
    def _planned_steps(self) -> str:
        return str(self.max_train_steps) if self.exact else f"about {self.max_train_steps}"

    def describe(self) -> list[str]:
        """Return the plan, its cost and the memory that it needs, as lines of text."""
        heading = "***** Dry run: nothing is trained *****" if self.config.dry_run else "***** Running training *****"
        accelerator, steps = self.accelerator, self._planned_steps
        lines = [heading, *self.data.describe(self.config, accelerator=accelerator, max_train_steps=steps)]
        if self.held_out is not None:
            lines += self.held_out.describe()
        transformer = self.recipe.transformer
        return lines + describe_memory(self.opened, self.data, transformer=transformer)

    def run(self) -> None:
        """Train from the start or from a checkpoint, and save the pipeline.

        Raises:
            BucketingError: If another run writes into the output folder.
        """
        lock = locked(self.folder / LOCK, what=f"The run in {self.folder}")
        with lock if self.accelerator.is_main_process else nullcontext():
            self._run()

    def _run(self) -> None:
        keep = self._resume()
        accelerator = self.accelerator
        self.log = RunLog(
            self.folder,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            degree=self.config.memory.context_parallel_degree,
            held_out=self.held_out is not None,
            keep=keep,
        )
        if accelerator.is_main_process:
            if self.checkpoint is None:
                (self.folder / COST_MODEL).unlink(missing_ok=True)  # of an earlier run, whose logs go too
            settings = json.dumps(self.config.flat(), indent=2) + "\n"
            for name, text in ((SETTINGS, settings), (CONFIG_FILE, self._settings_to_repeat())):
                with complete_file(self.folder / name) as partial:
                    partial.write_text(text, encoding="utf-8")
            self._log_start()
        if self.config.report_to != "none":
            accelerator.init_trackers("text-to-video", config=_as_trackers_take_it(self.config))
        for line in self.describe():
            logger.info(line)
        self.bar = tqdm(
            total=self.max_train_steps,
            initial=self.global_step,
            desc=f"{self.config.batches.batching} steps",
            disable=not accelerator.is_local_main_process,
        )
        self.metrics = StepMetrics(
            accelerator,
            max_tokens=self.config.batches.token_limit,
            degree=self.config.memory.context_parallel_degree,
            sources=() if self.data.sources is None else self.data.sources.names,
        )
        self.skipped = SkippedSteps(accelerator, limit=self.config.optimizer.max_skipped_steps, folder=self.folder)
        self._write_status("running")
        try:
            with logging_redirect_tqdm(), StopSignals() as self.signals:
                while self.global_step < self.max_train_steps and not self.stopped:
                    self._run_epoch(self.loader.epoch)
            self.bar.close()
            if self.stopped:
                self.log.close()
                self.release()
                place = f"Training was at optimizer step {self.global_step} of {self._planned_steps}"
                raise Interrupted(
                    f"{place} ({signal.Signals(self.stopped).name}); checkpoint-{self.global_step} is saved in "
                    f"{self.folder}, continue with --resume_from_checkpoint latest.",
                    self.stopped,
                )
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

    def _write_status(self, status: Status) -> None:
        if self.accelerator.is_main_process:
            steps = {"global_step": self.global_step, "max_train_steps": self.max_train_steps}
            write_status(self.folder, status, **steps, lines=self.log.state_dict())

    def _log_start(self) -> None:
        """Log the sizes of the buckets, and the resume if this is one."""
        table = self.folder / "logs" / TABLE
        table.unlink(missing_ok=True)
        if isinstance(self.data.table, BucketTable):
            with complete_file(table) as partial:
                partial.write_text(self.data.table.to_json())
        if self.checkpoint is not None:
            changes = applied_changes(self.checkpoint.progress.settings, self.config, self.accelerator)
            entry = {"epoch": self.loader.epoch, "num_processes": self.accelerator.num_processes, "changes": changes}
            self.log.write_resume(self.global_step, entry)

    def _settings_to_repeat(self) -> str:
        """Return the settings of the run as YAML by which a run in another folder does the same from its start."""
        script = f"accelerate launch --num_processes {self.accelerator.num_processes} scripts/train_text_to_video.py"
        settings = settings_to_repeat(
            self.config,
            self.file,
            mixed_precision=self.accelerator.mixed_precision,
            init_from_adapters=self.given.adapters.init_from_adapters,
            resume_from_checkpoint=None,
        )
        return write_config(settings, comment=f"To repeat the run:\n{script} --config THIS_FILE --output_dir OTHER")

    def _resume(self) -> dict[str, int] | None:
        """Load the checkpoint to resume, if any; return the state of the logs at that time."""
        if self.checkpoint is None:
            return None
        refuse_code_in_shards(self.checkpoint.path)
        with without_accelerates_lines():
            load_state(self.accelerator, self.checkpoint.path)
        progress = self.checkpoint.progress
        self.global_step = progress.global_step
        if self.ema is not None:
            self.ema.to(self.accelerator.device)
        self._count_steps()  # their number depends on the number of processes
        self.schedule_steps = self.max_train_steps
        now, saved = self._checkpoint_settings(), progress.settings
        if not self.exact and all(saved.get(name) == now[name] for name in _DECIDE_STEPS):
            self.schedule_steps = saved["schedule_steps"]  # another estimate would be another schedule
        schedule = make_schedule(
            self.lr_scheduler.optimizer, self.config.optimizer, num_training_steps=self.schedule_steps
        )
        self.lr_scheduler.lr_lambdas = schedule.lr_lambdas
        apply_settings(self.config.optimizer, self.lr_scheduler)
        logger.info(f"Resumed after optimizer step {self.global_step}, in epoch {self.loader.epoch}")
        if changes := applied_changes(progress.settings, self.config, self.accelerator):
            logger.info(f"Settings changed since {self.checkpoint.path.name}: {', '.join(changes)}")
        return progress.log

    def _run_epoch(self, epoch: int) -> None:
        if not self.exact:  # the estimate becomes exact before the last epochs
            self._count_steps()
            self.bar.total = self.max_train_steps
        if self.loader.step == 0:
            self.log.write_plan(epoch, self.data.epoch_summary(self.loader))
        num_batches, factor = self.loader.step, 1.0
        for batch in self.loader:
            start = time.perf_counter()
            num_batches += 1
            step = self.loader.step - 1
            rows = self.data.rows_of(self.loader, batch, epoch=epoch)
            weights = self.window.weigh(rows)
            with self.accelerator.accumulate(self.transformer):
                losses = self._train_on(batch, weights, epoch=epoch)
                norm = None
                if self.accelerator.sync_gradients:
                    factor = self.window.finish(self.trained)
                    max_norm = self.config.optimizer.max_grad_norm
                    norm = self.accelerator.clip_grad_norm_(self.transformer.parameters(), max_norm)
                # Reading the losses waits until the device has done all that was started before.
                counted = (rows.weights > 0).numpy()
                loss = losses.values.detach().float().cpu().numpy()
                seconds = time.perf_counter() - start
                index = np.array(batch["index"])
                self.skipped.add(index.tolist(), loss)
                tokens = rows.tokens[counted]
                cost = float(self.data.cost_model.cost(tokens).sum())
                sources = None if rows.sources is None else rows.sources[counted]
                if not counted.all():
                    losses, weights = StepLosses(*(values[counted] for values in losses)), weights[counted]
                self.metrics.add(*losses, weights=weights, tokens=tokens, cost=cost, seconds=seconds, sources=sources)
                self.log.write_samples(
                    epoch=epoch,
                    step=step,
                    bucket_id=batch.get("bucket_id"),
                    index=index[counted].tolist(),
                    loss=loss[counted].tolist(),
                    sources=None if sources is None else sources.tolist(),
                    planned=batch.get(PLANNED),
                )
                if self.accelerator.sync_gradients:
                    metrics = self.metrics.finish(factor, grad_norm=norm, stop=self.signals.number)
                    entry = self._apply_step(metrics, epoch=epoch, step=step)
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self._finish_step(entry)
            if self.stopped or self.global_step == self.max_train_steps:
                return
        for line in self.data.after_epoch(self.loader, self.accelerator, num_batches=num_batches):
            logger.info(line)

    def _train_on(self, batch: Mapping[str, Any], weights: torch.Tensor, *, epoch: int) -> StepLosses:
        """Run forward and backward on a batch."""
        try:
            losses = self.step(self.transformer, batch, epoch=epoch)
            loss = global_mean(losses.values, weights.to(losses.values), accelerator=self.accelerator, total=1.0)
            self.accelerator.backward(loss)
        except (RuntimeError, MemoryError) as error:
            message = out_of_memory(error, batch, self.config)
            if message is None:
                raise
            raise BucketingError(message) from error
        return losses

    def _apply_step(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> dict[str, Any]:
        """Change the weights, unless loss or gradients are not finite; return what to log of the step.

        The metrics are those of all processes, so that all decide alike. They are gathered before the weights change.
        """
        skipped = self.skipped.check(self.global_step + 1, metrics, epoch=epoch, step=step)
        if skipped is None:
            self.optimizer.step()
            if not self.accelerator.optimizer_step_was_skipped:
                self.lr_scheduler.step()
                if self.ema is not None:
                    self.ema.step(self.trained)
        else:
            self.log.write_skipped(self.global_step + 1, skipped)
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # which lowers the scale, and may unscale again
        entry = {**metrics, "lr": self.lr_scheduler.get_last_lr()[0], "epoch": epoch}
        return entry if skipped is None else {**entry, "skipped": True}

    def _finish_step(self, entry: dict[str, Any]) -> None:
        self.global_step += 1
        stop = int(entry.pop("stop", 0))
        self._track(entry)
        with writing(self.folder / "logs"):
            self.log.write_loss(self.global_step, entry)
        self.bar.update()
        shown = {"tokens_per_s": f"{entry['tokens_per_second']:.0f}", "epoch": entry["epoch"]}
        self.bar.set_postfix(loss=f"{entry['train_loss']:.4f}", **shown)
        last = self.global_step == self.max_train_steps
        if stop and not last:
            self.stopped = stop
        due = self.global_step % self.config.held_out.validation_loss_steps == 0
        if self.held_out is not None and (due or last) and not self.stopped:
            self._log_held_out(self.held_out)  # before a checkpoint, which counts the lines of logs
        every = self.config.checkpoints.checkpointing_steps
        if self.stopped:  # what else is due at this step is omitted, as launchers and schedulers wait for seconds
            self._save_early()
        elif every and self.global_step % every == 0:
            self._save_checkpoint()
        due = self.global_step % self.config.validation.validation_steps == 0
        if self.validation is not None and due and not self.stopped:
            self._validate()

    def _save_checkpoint(self) -> None:
        self._check_weights(f"checkpoint-{self.global_step} is not saved and earlier ones are kept")
        progress = Progress(
            global_step=self.global_step,
            log=self.log.state_dict(),
            settings=self._checkpoint_settings(),
            weights=self.weights,
        )
        limit = self.config.checkpoints.checkpoints_total_limit
        save_checkpoint(self.accelerator, self.folder, progress, limit=limit)
        if self.accelerator.is_main_process:
            logger.info(write_cost_model(self.folder))

    def _checkpoint_settings(self) -> dict[str, Any]:
        """Return the settings of the run for its checkpoint, with the length of its learning rate schedule."""
        chosen = {"num_processes": self.accelerator.num_processes, "schedule_steps": self.schedule_steps}
        return {**settings_of(self.config, self.accelerator), **chosen}

    def _check_weights(self, what: str) -> None:
        """Raise BucketingError on all processes unless the weights and their averages are finite."""
        averages = [] if self.ema is None else self.ema.shadow_params
        check_finite([*self.trained, *averages], self.accelerator, what=what)

    def _save_early(self) -> None:
        """Save the adapters, if there are any, and a checkpoint of a run that got a signal to stop.

        Raises:
            BucketingError: If weights are not finite; or, after the adapters, if machines do not share the folder.
        """
        if self.config.adapters.lora_rank is not None:
            self._check_weights("nothing is saved")
            with self._averages():
                self._save_adapters()
        if self.config.checkpoints.checkpointing_steps is None:
            self._check_shared()
        self._save_checkpoint()

    def _save_adapters(self) -> None:
        recipe, lora_format = self.recipe, self.config.adapters.lora_format
        save_lora(recipe.pipeline, self.folder, component=recipe.trained, lora_format=lora_format)

    def _track(self, values: dict[str, Any]) -> None:
        """Give values of the present step to the tracker, which may write files in a thread of its own."""
        with writing(self.folder / "logs"):
            self.accelerator.log(values, step=self.global_step)

    def _log_held_out(self, held_out: HeldOutLoss) -> None:
        """Compute the held-out loss on all processes, of the averaged weights if there are any, and log it."""
        # DDP has nothing to do without gradients, and the bare model computes in the same precision.
        sharded = self.accelerator.distributed_type in SHARDED
        transformer = self.transformer if sharded else self.recipe.transformer
        with self._averages(), in_evaluation(self.transformer), resharded(self.recipe.transformer):
            entry = held_out.compute(self.step, transformer, self.accelerator)
        values = {
            f"validation_loss_by_noise/{level['quantiles'][0]:.2f}": level["loss"] for level in entry["by_noise"]
        }
        self._track({"validation_loss": entry["validation_loss"], **values})
        if self.accelerator.is_main_process:
            before = [line["unreadable"] for line in read_log(self.folder, "validation", last=1)]
            if message := unreadable_message(entry["unreadable"], *before or [None]):
                logger.warning(message)
            logger.info(f"Held-out loss {entry['validation_loss']:.4f} after optimizer step {self.global_step}")
        self.log.write_validation(self.global_step, entry)

    @contextmanager
    def _averages(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, in place of the last ones inside a `with` block."""
        if self.ema is None:
            yield
            return
        self.ema.store(self.trained)
        self.ema.copy_to(self.trained)
        try:
            yield
        finally:
            self.ema.restore(self.trained)

    def _validate(self) -> None:
        """Render the prompts in the main process, with the averaged weights if there are any.

        Where no process holds all weights, all of them render.
        """
        if self.accelerator.is_main_process or self.accelerator.distributed_type in SHARDED:
            assert self.validation is not None
            idle = set(PARTS) - {"trained", *self.calls}
            lent = self.recipe.lent_to(self.accelerator.device, *idle)
            removed, averages = self.context_parallel.removed(), self._averages()
            with averages, removed, self.step.unpacked(), lent, rendering_in_lockstep(self.recipe):
                self.validation.render(self.recipe, self.accelerator, step=self.global_step)
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        accelerator, recipe = self.accelerator, self.recipe
        accelerator.wait_for_everyone()
        self._check_weights("no result is saved")
        if 0 < self.global_step == self.skipped.in_a_row:
            raise BucketingError(
                f"Loss or gradients were not finite in all {self.global_step} optimizer steps, so nothing was learned "
                "and no result is saved. Lower `learning_rate`, or check the samples."
            )
        if self.ema is not None:
            self.ema.copy_to(self.trained)
        if self.config.adapters.lora_rank is not None:
            self._save_adapters()
        else:
            weights = gather_weights(accelerator, self.transformer)
            if accelerator.is_main_process:
                self.context_parallel.remove()
                if self.config.batches.batching == "pack":
                    disable_packing(self.transformer)
                save_pipeline(recipe, self.folder, source=Path(self.source), weights=weights)
        logger.info(f"Saved to {self.folder}")
        parts: list[str] = []
        if accelerator.is_main_process:
            logger.info(write_cost_model(self.folder))
            samples = {} if self.validation is None else self.validation.last_files(self.global_step)
            run = Run(self.config, recipe, self.data, self.repository, samples)
            card, message = write_card(self.folder, run)
            logger.info(message)
            parts = result_parts(self.folder, adapters=self.config.adapters.lora_rank is not None) + card
        self.log.close()
        self.release()
        if self.repository is not None:  # the other processes have ended meanwhile, and time out nowhere
            logger.info(upload(self.folder, self.repository, parts))

    def release(self) -> None:
        """Release everything that was prepared, and end the process group."""
        # DDP must go before its process group: as its last owner, DDP would destroy the group while it holds Python's
        # interpreter lock and waits for gloo's threads, which may wait for that lock to release a tensor.
        del self.transformer, self.optimizer, self.loader
        self.accelerator.free_memory()
        self.accelerator.end_training()


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Return the accelerator of a run; only the main process of a machine shows progress bars.

    Raises:
        BucketingError: On settings that cannot be combined with sharded weights.
    """
    folder = Path(config.output_dir)
    accelerator = Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        mixed_precision=config.mixed_precision,
        log_with=None if config.report_to == "none" else config.report_to,
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


def _as_trackers_take_it(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings as text and numbers."""
    values = {name: "none" if value is None else value for name, value in config.flat().items()}
    return {name: "; ".join(value) if isinstance(value, list) else value for name, value in values.items()}
