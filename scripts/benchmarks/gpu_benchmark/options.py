"""Steps of LoRA with options of the training script: a quantised base, offloaded weights, steps that are read late."""

import functools
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from hf_bucketing.devices import Reading
from hf_bucketing.optimizers.optimizer import omitted_if
from hf_bucketing.packing import packed_forward
from hf_bucketing.placement.offload import activations_on_cpu, offload_blocks

from .measuring import Cases, Figures, Run, free, relative
from .memory import load_transformer, save_pipeline
from .models import Inputs, Stepper, draw, make_transformer


def quantization(run: Run) -> Cases:
    """Yield bases in bf16, int8, nf4 and float8: outputs beside those in bf16, losses, seconds and memory."""
    scale = run.scale
    inputs, outputs = draw(scale, scale.mixed_step), dict[str, torch.Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        save_pipeline(scale, Path(folder), layers=scale.epoch_layers)
        for kind in ("bf16", "int8", "nf4", "float8"):
            yield kind, functools.partial(quantized, run, Path(folder), kind, inputs, outputs)


def quantized(run: Run, folder: Path, kind: str, inputs: Inputs, outputs: dict[str, torch.Tensor]) -> Figures:
    scale = run.scale
    if kind == "nf4" and not scale.on_gpu:
        return {"not_run": "needs a GPU"}
    free()
    before = torch.cuda.memory_allocated() if scale.on_gpu else 0
    model = load_transformer(scale, folder, None if kind == "bf16" else kind)
    figures: Figures = {"weights_gib": (torch.cuda.memory_allocated() - before) / 2**30} if scale.on_gpu else {}
    trainer = Stepper(scale, model, lora=True)
    with torch.no_grad(), torch.autocast(scale.device, torch.bfloat16):
        batch = trainer.packing.pack(inputs[0], timesteps=inputs[1], text=inputs[2])
        outputs[kind] = packed_forward(model, batch).float()
    first = float(trainer.packed(inputs))
    with run.peak_memory(figures):
        figures["s"] = run.medians({kind: lambda: trainer.packed(inputs)})[kind]
    figures |= {"first_loss": first, "last_loss": float(trainer.packed(inputs))}
    if "bf16" in outputs:
        figures["output_relative_difference"] = relative([outputs[kind]], [outputs["bf16"]])
    return figures


def offload(run: Run) -> Cases:
    """Yield steps on a pack: weights of no blocks, half of them or all on the CPU, and activations there too."""
    layers = run.scale.layers
    offloaded = {"nothing": (0, False), "half": (-(-layers // 2), False), "all": (layers, False)}
    for name, (count, activations) in {**offloaded, "all, and activations": (layers, True)}.items():
        yield name, functools.partial(offloaded_step, run, count, activations=activations)


def offloaded_step(run: Run, count: int, *, activations: bool) -> Figures:
    scale = run.scale
    free()
    device = torch.device(scale.device)
    trainer = Stepper(scale.on("cpu"), make_transformer(scale.on("cpu"), layers=scale.layers, dtype=torch.bfloat16),
                      lora=True)  # fmt: skip
    if count:
        offload_blocks(trainer.model, count, device=device)
    trainer.model.to(device)
    trainer.scale = scale
    inputs, figures = draw(scale, scale.mixed_step), Figures()

    def step() -> None:
        with activations_on_cpu() if activations else nullcontext():
            trainer.packed(inputs)

    step()
    with run.peak_memory(figures):
        figures["s"] = run.medians({"step": step})["step"]
    return {**figures, "last_loss": float(trainer.packed(inputs))}


def reading(run: Run) -> Cases:
    """Yield steps by when loss and norm are read, on one short sample and on a pack of mixed sizes.

    The optimizer is AdamW, by default or fused; read later, it is fused.
    """
    scale = run.scale
    steps = ReadSteps(
        Stepper(scale, make_transformer(scale, layers=scale.epoch_layers, dtype=torch.bfloat16), lora=True)
    )
    for name, grids in (("short", scale.mixed_step[-1:]), ("mixed", scale.mixed_step)):

        def compare(inputs: Inputs = draw(scale, grids)) -> Figures:  # noqa: B008
            takes = {
                f"{title}_s": functools.partial(steps.take, inputs, fused=fused, late=late)
                for title, fused, late in WAYS_OF_READING
            }
            return {title: value / scale.read_steps for title, value in run.medians(takes).items()}

        yield name, compare


WAYS_OF_READING = (("default_before", False, False), ("fused_before", True, False), ("fused_later", True, True))


class ReadSteps:
    """Take steps as the training loop does, of which the loss and the gradients' norm are read on the CPU."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.optimizers = {
            fused: torch.optim.AdamW(stepper.trained, lr=1e-4, fused=fused or None) for fused in (False, True)
        }

    def take(self, inputs: Inputs, *, fused: bool, late: bool) -> None:
        """Take steps on one pack, which are finite."""
        optimizer, under_way = self.optimizers[fused], None
        for _ in range(self.stepper.scale.read_steps):
            loss = self.stepper.loss_of_pack(inputs)
            loss.backward()
            numbers = torch.stack([loss.detach(), torch.nn.utils.clip_grad_norm_(self.stepper.trained, 1.0)])
            now = Reading(numbers)
            due = under_way if late else now
            if due is not None and not due.values()[0].isfinite().all():
                raise ValueError("A step is not finite.")
            with omitted_if((~numbers.isfinite()).any().float(), optimizer) if late else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            under_way = now
