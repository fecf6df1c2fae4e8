"""The training loop."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import diffusers
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers.optimization import get_scheduler
from tqdm.auto import tqdm

from ..errors import BucketingError
from ..loading import resume
from ..losses import global_mean
from ..packing import disable_packing, enable_packing
from .checkpoint import load_checkpoint, save_checkpoint, save_pipeline
from .config import TrainingConfig
from .data import UNREADABLE, make_data
from .history import RunLog
from .objective import FlowMatching
from .steps import BucketStep, PackStep, Step
from .wan import WanRecipe

logger = get_logger(__name__)


def train(config: TrainingConfig) -> None:
    """Fine-tune the transformer of a text-to-video pipeline, and save the pipeline to `config.output_dir`.

    Runs in every process that `accelerate launch` starts.

    Raises:
        BucketingError: On data, settings or a checkpoint that do not fit; see the message.
    """
    Trainer(config).run()


class Trainer:
    """One run: what is prepared once, and the progress that checkpoints hold."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.accelerator = Accelerator(
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            mixed_precision=config.mixed_precision,
            log_with=None if config.report_to == "none" else config.report_to,
            project_config=ProjectConfiguration(project_dir=str(self.folder), logging_dir=str(self.folder / "logs")),
        )
        set_seed(config.seed)
        if not self.accelerator.is_local_main_process:
            _silence_progress_bars()
        spec = WanRecipe.read_spec(config.pretrained_model_name_or_path)
        with self.accelerator.main_process_first():  # the others find its columns in the cache
            if self.accelerator.is_main_process and config.resume_from_checkpoint is None:
                (self.folder / "logs" / UNREADABLE).unlink(missing_ok=True)
            self.data = make_data(config, spec)
        self.recipe = WanRecipe.load(
            config.pretrained_model_name_or_path, max_sequence_length=config.max_sequence_length
        )
        self.step = self._make_step()
        self._prepare()
        self.global_step = 0

    def _make_step(self) -> Step:
        recipe, config = self.recipe, self.config
        if config.gradient_checkpointing:
            recipe.transformer.enable_gradient_checkpointing()
        recipe.to(self.accelerator.device, dtype=_frozen_dtype(self.accelerator))
        objective = FlowMatching(
            num_train_timesteps=recipe.num_train_timesteps,
            shift=recipe.shift,
            weighting_scheme=config.weighting_scheme,
            seed=config.seed,
        )
        if config.batching == "bucket":
            return BucketStep(recipe, objective)
        return PackStep(recipe, objective, enable_packing(recipe.transformer, strip_length=config.strip_length))

    def _prepare(self) -> None:
        config = self.config
        optimizer = torch.optim.AdamW(
            self.recipe.transformer.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.adam_weight_decay,
            eps=config.adam_epsilon,
        )
        self.transformer, self.optimizer, loader = self.accelerator.prepare(
            self.recipe.transformer, optimizer, self.data.loader
        )
        self.loader = resume(self.accelerator, loader)
        self.max_train_steps = config.max_train_steps or self._steps_left()
        # Stepped here, once per optimizer step: a prepared scheduler would step once per process.
        self.lr_scheduler = get_scheduler(
            config.lr_scheduler,
            optimizer=optimizer,
            num_warmup_steps=config.lr_warmup_steps,
            num_training_steps=self.max_train_steps,
        )
        self.accelerator.register_for_checkpointing(self.lr_scheduler)

    def _steps_left(self) -> int:
        """Return the optimizer steps from the loader's place to the end of the last epoch."""
        left = [len(self.loader)] if self.loader.epoch < self.config.num_train_epochs else []
        later = range(self.loader.epoch + 1, self.config.num_train_epochs)
        left += [self.data.sampler.plan(epoch).num_steps for epoch in later]
        return sum(math.ceil(steps / self.config.gradient_accumulation_steps) for steps in left)

    def run(self) -> None:
        """Train from the start or from a checkpoint, and save the pipeline."""
        keep = self._resume()
        accelerator = self.accelerator
        self.log = RunLog(
            self.folder, process_index=accelerator.process_index, num_processes=accelerator.num_processes, keep=keep
        )
        if self.config.report_to != "none":
            self.accelerator.init_trackers("text-to-video", config=_flat(self.config))
        self._announce()
        self.bar = tqdm(
            total=self.max_train_steps,
            initial=self.global_step,
            desc=f"{self.config.batching} steps",
            disable=not self.accelerator.is_local_main_process,
        )
        while self.global_step < self.max_train_steps:
            self._run_epoch(self.loader.epoch)
        self.bar.close()
        self._finish()

    def _resume(self) -> dict[str, int] | None:
        """Load the checkpoint, if one is asked for and there is one; return the lines of the logs at that time."""
        name = self.config.resume_from_checkpoint
        progress = None if name is None else load_checkpoint(self.accelerator, self.folder, name)
        if progress is None:
            return None
        self.global_step = progress["global_step"]
        if self.config.max_train_steps is None:  # other ones, if the number of processes is another
            self.max_train_steps = self.global_step + self._steps_left()
        logger.info(f"Resumed after optimizer step {self.global_step}, in epoch {self.loader.epoch}")
        lines: dict[str, int] = progress["log"]
        return lines

    def _announce(self) -> None:
        plan = self.loader.plan
        mixed = f", {plan.num_mixed_steps} of them mixed" if self.config.batching == "bucket" else ""
        dropped = ", ".join(f"{count} {reason}" for reason, count in plan.drop_reasons.items()) or "none"
        logger.info("***** Running training *****")
        logger.info(f"  Num processes = {self.accelerator.num_processes}")
        logger.info(f"  Batching = {self.config.batching}, mixed precision = {self.accelerator.mixed_precision}")
        logger.info(f"  Samples per epoch = {plan.kept} kept, {plan.repeated} repeated, dropped: {dropped}")
        logger.info(f"  Steps per epoch = {plan.num_steps} on each process{mixed}")
        logger.info(f"  Optimizer steps = {self.max_train_steps}")

    def _run_epoch(self, epoch: int) -> None:
        if self.loader.step == 0:
            self.log.write_plan(epoch, self.loader.plan.summary())
        loss = torch.zeros((), device=self.accelerator.device)
        for batch in self.loader:
            step, total = self.loader.step - 1, self.loader.samples_in_window
            with self.accelerator.accumulate(self.transformer):
                values = self.step(self.transformer, batch, epoch=epoch)
                self.accelerator.backward(global_mean(values, accelerator=self.accelerator, total=total))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.transformer.parameters(), self.config.max_grad_norm)
                self.optimizer.step()
                if self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
                    self.lr_scheduler.step()
                self.optimizer.zero_grad()
            loss += values.detach().float().sum() / total
            bucket_id = batch["bucket_id"] if self.config.batching == "bucket" else None
            self.log.write_samples(epoch=epoch, step=step, bucket_id=bucket_id, index=batch["index"])
            if self.accelerator.sync_gradients:
                self._finish_step(loss, epoch=epoch, step=step, samples=total)
                loss.zero_()
            if self.global_step == self.max_train_steps:
                break

    def _finish_step(self, loss: torch.Tensor, *, epoch: int, step: int, samples: int) -> None:
        self.global_step += 1
        value = float(self.accelerator.reduce(loss, "sum"))
        if not math.isfinite(value):
            raise BucketingError(
                f"The loss is {value} at optimizer step {self.global_step}; lower the learning rate, or look at the "
                f"samples of epoch {epoch}, step {step} in {self.folder / 'logs'}."
            )
        entry = {"train_loss": value, "lr": self.lr_scheduler.get_last_lr()[0], "epoch": epoch, "samples": samples}
        self.accelerator.log(entry, step=self.global_step)
        self.log.write_loss(self.global_step, entry)
        self.bar.update()
        self.bar.set_postfix(loss=f"{value:.4f}", epoch=epoch)
        if self.config.checkpointing_steps and self.global_step % self.config.checkpointing_steps == 0:
            progress = {
                "global_step": self.global_step,
                "log": self.log.state_dict(),
            }
            save_checkpoint(self.accelerator, self.folder, progress, limit=self.config.checkpoints_total_limit)

    def _finish(self) -> None:
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if self.config.batching == "pack":
                disable_packing(self.transformer)
            save_pipeline(self.recipe.pipeline, self.folder)
            logger.info(f"Saved the pipeline to {self.folder}")
        self.log.close()
        self.accelerator.end_training()


def _frozen_dtype(accelerator: Accelerator) -> torch.dtype:
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)


def _silence_progress_bars() -> None:
    datasets.disable_progress_bars()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _flat(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings as trackers take them."""
    return {name: value if value is not None else "none" for name, value in asdict(config).items()}
