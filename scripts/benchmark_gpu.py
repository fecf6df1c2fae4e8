r"""Measure on one GPU what cannot be measured without: parity, throughput, packing, reading, memory and quantisation.

python scripts/benchmark_gpu.py --output scripts/benchmark_results/gpu.json --figure scripts/benchmark_results/gpu.png

All parts together take less than 8 minutes, and the file is written after each of them; `--parts` chooses some.
Without a GPU the same code runs at small sizes, which shows that it runs, and nothing else.
"""

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmark_tools import accelerator_and_versions, benchmark_parser, seconds_of, write_figures
from diffusers import WanTransformer3DModel
from gpu_benchmark.figure import draw_figure
from gpu_benchmark.models import FULL, SMALL, Scale, add_adapters, load_transformer, make_transformer, save_pipeline
from gpu_benchmark.planner import SETTINGS, Setting, model_of, plan, size_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_bucketing import BucketBatchSampler, PackBatchSampler, Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.devices import Reading
from hf_bucketing.errors import PackingError
from hf_bucketing.losses import masked_mse
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.enable import packing_disabled
from hf_bucketing.optimizers.optimizer import omitted_if
from hf_bucketing.packing import PackedLayout, SegmentSpans, packed_attention, packed_forward, packed_mse

PACKAGES = ("torch", "triton", "diffusers", "accelerate", "peft", "torchao", "bitsandbytes", "flash_attn")
BACKENDS = ("varlen", "flex", "segments")
Grid = tuple[int, int, int]
Figures = dict[str, Any]


def attempt(function: Callable[[], Figures]) -> Figures:
    """Return what a function measures, or why this device cannot run it."""
    try:
        return function()
    except torch.OutOfMemoryError as error:
        refused = {"out_of_memory": str(error).splitlines()[0]}
    except PackingError as error:  # of a backend that this device has no kernel for
        refused = {"not_run": str(error)}
    free()  # after the `except` block, whose traceback keeps tensors
    return refused


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize_of(scale: Scale) -> Callable[[], object]:
    return torch.cuda.synchronize if scale.on_gpu else lambda: None


def medians(scale: Scale, functions: dict[str, Callable[[], object]], *, runs: int) -> dict[str, float]:
    """Return the median seconds of functions, run in turns after one warm-up each, with the device synchronised."""
    timed = seconds_of(*functions.values(), runs=runs, synchronize=synchronize_of(scale))
    return {name: seconds.median for name, seconds in zip(functions, timed, strict=True)}


@contextmanager
def peak_memory(scale: Scale, into: Figures, name: str) -> Iterator[None]:
    """Add the peak of allocated memory inside a `with` block, in GiB, to some figures; nothing without a GPU."""
    if scale.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    yield
    if scale.on_gpu:
        into[name] = torch.cuda.max_memory_allocated() / 2**30


# Parity: outputs and gradients in bf16 against float32.


def relative(values: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the norm of the errors ÷ the norm of the exact values, over several tensors."""
    errors = sum(float((value.float() - right).square().sum()) for value, right in zip(values, exact, strict=True))
    return math.sqrt(errors / sum(float(right.square().sum()) for right in exact))


def measure_parity(scale: Scale, runs: int) -> Figures:
    """Compare the backends in bf16 with float32: attention of packs of mixed sizes, and a model of two layers."""
    figures: Figures = {"attention": {}, "model": model_parity(scale)}
    for backend in BACKENDS:
        figures["attention"][backend] = attempt(lambda backend=backend: attention_parity(scale, backend))
    return figures


def attention_parity(scale: Scale, backend: str) -> Figures:
    worst = {"output": 0.0, "gradients": 0.0}
    for number, grids in enumerate(scale.parity_packs):
        layout = PackedLayout(
            grids=grids,
            text_lengths=(scale.text_length,) * len(grids),
            strip_length=scale.strip_length,
            device=scale.device,
        )
        for segments in (layout.self_segments, layout.cross_segments):
            tokens = random_tokens(scale, segments, seed=number)
            exact = attended_with_gradients([side.float() for side in tokens], segments, "segments")
            got = attended_with_gradients(tokens, segments, backend)
            worst["output"] = max(worst["output"], relative(got[:1], exact[:1]))
            worst["gradients"] = max(worst["gradients"], relative(got[1:], exact[1:]))
    return {f"{name}_relative_error": value for name, value in worst.items()}


def random_tokens(scale: Scale, segments: SegmentSpans, *, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = (segments.num_queries, segments.num_keys, segments.num_keys)
    shape = (scale.heads, scale.head_dim)
    return [torch.randn(count, *shape, generator=generator).to(scale.device, torch.bfloat16) for count in counts]


def attended_with_gradients(
    tokens: Sequence[torch.Tensor], segments: SegmentSpans, backend: str
) -> tuple[torch.Tensor, ...]:
    leaves = [side.detach().requires_grad_() for side in tokens]
    out = packed_attention(*leaves, segments, backend=backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(99)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, weights)


def model_parity(scale: Scale) -> Figures:
    """Compare packs in bf16, and the stock model one sample at a time in bf16, with the stock model in float32."""
    grids = scale.parity_packs[0]
    model, inputs = make_transformer(scale, layers=2), draw(scale, grids)
    exact = run_alone(scale, model, inputs, dtype=torch.float32)
    figures: Figures = {"stock": errors_against(exact, run_alone(scale, model, inputs, dtype=torch.bfloat16))}
    for backend in BACKENDS:

        def packed(backend: str = backend) -> Figures:
            packing = enable_packing(model, strip_length=scale.strip_length, backend=backend)
            try:
                return errors_against(exact, run_packed(scale, model, packing, inputs))
            finally:
                disable_packing(model)

        figures[backend] = attempt(packed)
    return figures


Inputs = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def draw(scale: Scale, grids: Sequence[Grid]) -> Inputs:
    """Draw latents of token grids, timesteps and texts."""
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(16, t, 2 * h, 2 * w, generator=generator).to(scale.device) for t, h, w in grids]
    timesteps = torch.rand(len(grids), generator=generator).to(scale.device) * 1000
    text = torch.randn(len(grids), scale.text_length, scale.text_dim, generator=generator).to(scale.device)
    return latents, timesteps, text


def run_alone(scale: Scale, model: WanTransformer3DModel, inputs: Inputs, *, dtype: torch.dtype) -> Results:
    """Return the outputs of the stock model, one sample at a time, and the gradients of its weights."""
    mixed = nullcontext() if dtype == torch.float32 else torch.autocast(scale.device, dtype)
    outputs = []
    for latent, timestep, words in zip(*inputs, strict=True):
        with mixed:
            output = model(latent[None], timestep[None], words[None], return_dict=False)[0]
        masked_mse(output.float(), latent[None]).sum().backward()
        outputs.append(output[0].detach())
    return outputs, gradients_of(model)


def run_packed(scale: Scale, model: WanTransformer3DModel, packing: Any, inputs: Inputs) -> Results:
    latents, timesteps, text = inputs
    batch = packing.pack(latents, timesteps=timesteps, text=text)
    with torch.autocast(scale.device, torch.bfloat16):
        output = packed_forward(model, batch)
    packed_mse(output.float(), batch.pack_like(latents), batch.layout).sum().backward()
    return [sample.detach() for sample in batch.unpack(output)], gradients_of(model)


def gradients_of(model: WanTransformer3DModel) -> list[torch.Tensor]:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def errors_against(exact: Results, got: Results) -> Figures:
    return {
        "output_relative_error": relative(got[0], exact[0]),
        "gradients_relative_error": relative(got[1], exact[1]),
    }


# Throughput of attention.


def measure_attention(scale: Scale, runs: int) -> Figures:
    """Compare pairs of tokens per second of each backend with one call of flash attention on as many tokens."""
    return {name: attention_case(scale, lengths, runs) for name, lengths in scale.attention_cases.items()}


def attention_case(scale: Scale, lengths: Sequence[int], runs: int) -> Figures:
    layout = PackedLayout(
        grids=tuple((1, 1, length) for length in lengths),
        text_lengths=(0,) * len(lengths),
        strip_length=scale.strip_length,
        device=scale.device,
    )
    segments, count = layout.self_segments, 1 if len(lengths) == 1 else scale.attention_batch
    tokens = random_tokens(scale, segments, seed=0)
    each = sum(lengths) // count
    batch = [side[: count * each].unflatten(0, (count, each)).transpose(1, 2).contiguous() for side in tokens]
    pairs = {"flash": count * each**2, "packed": sum(length**2 for length in lengths)}
    figures: Figures = {"tokens": sum(lengths), "num_segments": len(lengths), "flash_batch": [count, each]}
    for backend in BACKENDS:

        def compare(backend: str = backend) -> Figures:
            timed = {}
            for backward in (True, False):  # first what fewer devices can do
                functions = {
                    "packed": attend(
                        tokens, lambda q, k, v: packed_attention(q, k, v, segments, backend=backend), backward
                    ),
                    "flash": attend(batch, lambda q, k, v: flash(scale, q, k, v), backward),
                }
                seconds = medians(scale, functions, runs=runs)
                direction = "forward_backward" if backward else "forward"
                speeds = {name: pairs[name] / seconds[name] for name in seconds}
                timed[f"{direction}_s"] = seconds["packed"]
                timed[f"{direction}_of_flash_throughput"] = speeds["packed"] / speeds["flash"]
            return timed

        figures[backend] = attempt(compare)
    return figures


def attend(
    tokens: Sequence[torch.Tensor], function: Callable[..., torch.Tensor], backward: bool
) -> Callable[[], object]:
    leaves = [side.detach().requires_grad_(backward) for side in tokens]
    if not backward:
        return lambda: function(*leaves)
    weights = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(function(*leaves), leaves, weights)


def flash(scale: Scale, *tokens: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if scale.on_gpu else nullcontext():
        return F.scaled_dot_product_attention(*tokens)


# Training steps.


def measure_step(scale: Scale, runs: int) -> Figures:
    """Compare a packed training step with one of fixed size that has as many tokens and pairs of tokens."""
    counts = {
        "packed": [math.prod(grid) for grid in scale.mixed_step],
        "fixed_size": [math.prod(grid) for grid in scale.fixed_step],
    }
    figures: Figures = {f"{name}_tokens": sum(values) for name, values in counts.items()}
    figures |= {f"{name}_pairs_of_tokens": sum(value**2 for value in values) for name, values in counts.items()}
    for weights in ("lora", "full"):
        free()
        figures[weights] = attempt(lambda weights=weights: step_case(scale, weights, counts, runs))
    return figures


def step_case(scale: Scale, weights: str, counts: dict[str, list[int]], runs: int) -> Figures:
    dtype = torch.bfloat16 if weights == "lora" else torch.float32
    trainer = Stepper(scale, make_transformer(scale, layers=scale.layers, dtype=dtype), lora=weights == "lora")
    mixed, fixed = draw(scale, scale.mixed_step), draw(scale, scale.fixed_step)
    figures: Figures = {}
    with peak_memory(scale, figures, "peak_gib"):
        seconds = medians(
            scale,
            {"packed": lambda: trainer.packed(mixed), "fixed_size": lambda: trainer.stacked(fixed)},
            runs=runs,
        )
    speeds = {name: sum(counts[name]) / seconds[name] for name in seconds}
    figures |= {f"{name}_tokens_per_s": speed for name, speed in speeds.items()}
    figures["packed_of_fixed_size_tokens_per_s"] = speeds["packed"] / speeds["fixed_size"]
    return figures


class Stepper:
    """Take training steps of a Wan transformer of random weights: bf16 autocast, gradient checkpointing, AdamW."""

    def __init__(
        self,
        scale: Scale,
        model: WanTransformer3DModel,
        *,
        lora: bool,
        checkpointing: bool = True,
        pack: bool = True,
        backend: str = "auto",
    ) -> None:
        self.scale, self.model = scale, model
        if lora:
            add_adapters(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        model.train()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.packing = enable_packing(model, strip_length=scale.strip_length, backend=backend) if pack else None

    def packed(self, inputs: Inputs) -> float:
        """Take a step on one pack."""
        return self._update(self.loss_of_pack(inputs))

    def loss_of_pack(self, inputs: Inputs) -> torch.Tensor:
        latents, timesteps, text = inputs
        batch = self.packing.pack(latents, timesteps=timesteps, text=text)
        with torch.autocast(self.scale.device, torch.bfloat16):
            output = packed_forward(self.model, batch)
        return packed_mse(output, batch.pack_like(latents), batch.layout).mean()

    def stacked(self, inputs: Inputs) -> float:
        """Take a step on one stack, in which samples are padded to the largest where they differ."""
        latents, timesteps, text = inputs
        stack, real = pad_all(latents)
        with nullcontext() if self.packing is None else packing_disabled(self.model):
            with torch.autocast(self.scale.device, torch.bfloat16):
                output = self.model(stack, timesteps, text, return_dict=False)[0]
            errors = (output - stack).square() * real
            return self._update((errors.flatten(1).sum(1) / (16 * real.flatten(1).sum(1))).mean())

    def _update(self, loss: torch.Tensor) -> float:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def pad_all(latents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack latents, padded to the largest side along each axis; and ones where they are real, zeros elsewhere."""
    sides = [max(latent.shape[axis] for latent in latents) for axis in (1, 2, 3)]

    def pad(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, [p for axis in (3, 2, 1) for p in (0, sides[axis - 1] - values.shape[axis])])

    masks = [torch.ones_like(latent[:1]) for latent in latents]
    return torch.stack([pad(latent) for latent in latents]), torch.stack([pad(mask) for mask in masks])


# Steps that are read before their update, or after the next one is launched.


def measure_reading(scale: Scale, runs: int) -> Figures:
    """Compare steps of LoRA by when loss and norm are read, on one short sample and on a pack of mixed sizes.

    The optimizer is AdamW, by default or fused; read later, it is fused.
    """
    model = make_transformer(scale, layers=scale.epoch_layers, dtype=torch.bfloat16)
    steps, figures = ReadSteps(scale, model), Figures(steps=scale.read_steps)
    for name, grids in (("short", scale.mixed_step[-1:]), ("mixed", scale.mixed_step)):
        inputs = draw(scale, grids)
        functions = {
            "default_before": lambda inputs=inputs: steps.take(inputs, fused=False, late=False),
            "fused_before": lambda inputs=inputs: steps.take(inputs, fused=True, late=False),
            "fused_later": lambda inputs=inputs: steps.take(inputs, fused=True, late=True),
        }
        seconds = medians(scale, functions, runs=runs)
        figures[name] = {f"{read}_s": value / scale.read_steps for read, value in seconds.items()}
    return figures


class ReadSteps:
    """Take steps as the training loop does, of which the loss and the gradients' norm are read on the CPU."""

    def __init__(self, scale: Scale, model: WanTransformer3DModel) -> None:
        self.stepper = Stepper(scale, model, lora=True)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizers = {
            fused: torch.optim.AdamW(self.trained, lr=1e-4, fused=fused or None) for fused in (False, True)
        }

    def take(self, inputs: Inputs, *, fused: bool, late: bool) -> None:
        """Take steps on one pack, which are finite."""
        optimizer, under_way = self.optimizers[fused], None
        for _ in range(self.stepper.scale.read_steps):
            loss = self.stepper.loss_of_pack(inputs)
            loss.backward()
            numbers = torch.stack([loss.detach(), torch.nn.utils.clip_grad_norm_(self.trained, 1.0)])
            reading = Reading(numbers)
            due = under_way if late else reading
            if due is not None and not due.values()[0].isfinite().all():
                raise ValueError("A step is not finite.")
            with omitted_if((~numbers.isfinite()).any().float(), optimizer) if late else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            under_way = reading


# Padding, bucketing and packing of one mixed set.


def measure_strategies(scale: Scale, runs: int) -> Figures:
    """Train an epoch of one mixed set in padded batches, in buckets and in packs, with LoRA and fewer layers.

    `real_tokens_per_s` counts the tokens of samples without padding, in buckets at the sizes of the buckets.
    """
    sizes = scale.mixed_set()
    epochs = {"padding": padded(scale, sizes), "bucketing": bucketed(scale, sizes), "packing": packed(scale, sizes)}
    model = make_transformer(scale, layers=scale.epoch_layers, dtype=torch.bfloat16)
    trainer = Stepper(scale, model, lora=True)
    figures: Figures = {"samples": len(sizes), "layers": scale.epoch_layers, "max_tokens": scale.max_tokens}
    for name, epoch in epochs.items():

        def measure(name: str = name, epoch: list[list[Size]] = epoch) -> Figures:
            batches = [draw(scale, [scale.spec.grid(size) for size in batch]) for batch in epoch]
            take = trainer.packed if name == "packing" else trainer.stacked
            result: Figures = {"steps": len(batches), "samples": sum(map(len, epoch))}
            with peak_memory(scale, result, "peak_gib"):
                seconds = medians(scale, {name: lambda: [take(batch) for batch in batches]}, runs=runs)[name]
            real = sum(scale.spec.num_tokens(size) for batch in epoch for size in batch)
            return {
                **result,
                "seconds": seconds,
                "samples_per_s": result["samples"] / seconds,
                "real_tokens_per_s": real / seconds,
            }

        figures[name] = attempt(measure)
    return figures


def padded(scale: Scale, sizes: list[Size]) -> list[list[Size]]:
    """Return random batches of as many samples as `max_tokens` holds of the largest."""
    count = scale.max_tokens // max(map(scale.spec.num_tokens, sizes))
    order = np.random.default_rng(0).permutation(len(sizes))
    return [[sizes[row] for row in order[start : start + count]] for start in range(0, len(sizes), count)]


def bucketed(scale: Scale, sizes: list[Size]) -> list[list[Size]]:
    assigned = scale.table.assign(*np.array(sizes).T)
    sampler = BucketBatchSampler(
        assigned.bucket_id, table=scale.table, max_tokens=scale.max_tokens, spec=scale.spec, num_processes=1
    )
    return [[scale.table.size(int(assigned.bucket_id[row])) for row in batch] for batch in sampler.plan(0).batches()]


def packed(scale: Scale, sizes: list[Size]) -> list[list[Size]]:
    tokens = [scale.spec.num_tokens(size) for size in sizes]
    sampler = PackBatchSampler(tokens, max_tokens=scale.max_tokens, strip_length=scale.strip_length, num_processes=1)
    return [[sizes[row] for row in batch] for batch in sampler.plan(0).batches()]


# A quantised base under LoRA.


def measure_quantization(scale: Scale, runs: int) -> Figures:
    """Take steps of LoRA on a base in bf16, nf4, int8 and float8, and compare outputs, speed and memory."""
    figures: Figures = {}
    inputs = draw(scale, scale.mixed_step)
    with tempfile.TemporaryDirectory() as folder:
        save_pipeline(scale, Path(folder), layers=scale.epoch_layers)
        outputs: dict[str, torch.Tensor] = {}
        for kind in ("bf16", "nf4", "int8", "float8"):
            free()
            if kind == "nf4" and not scale.on_gpu:
                figures[kind] = {"not_run": "needs a GPU"}
                continue
            figures[kind] = attempt(lambda kind=kind: quantized_case(scale, Path(folder), kind, inputs, outputs, runs))
    return figures


def quantized_case(
    scale: Scale, folder: Path, kind: str, inputs: Inputs, outputs: dict[str, torch.Tensor], runs: int
) -> Figures:
    before = torch.cuda.memory_allocated() if scale.on_gpu else 0
    model = load_transformer(scale, folder, None if kind == "bf16" else kind)
    figures: Figures = {"weights_gib": (torch.cuda.memory_allocated() - before) / 2**30} if scale.on_gpu else {}
    trainer = Stepper(scale, model, lora=True)
    with torch.no_grad(), torch.autocast(scale.device, torch.bfloat16):
        batch = trainer.packing.pack(inputs[0], timesteps=inputs[1], text=inputs[2])
        outputs[kind] = packed_forward(model, batch).float()
    first = float(trainer.packed(inputs))
    with peak_memory(scale, figures, "peak_gib"):
        figures["step_s"] = medians(scale, {kind: lambda: trainer.packed(inputs)}, runs=runs)[kind]
    figures |= {"first_loss": first, "last_loss": float(trainer.packed(inputs))}
    if "bf16" in outputs:
        figures["output_relative_difference"] = relative([outputs[kind]], [outputs["bf16"]])
    return figures


# Planned and measured memory.


def measure_planner(scale: Scale, runs: int) -> Figures:
    """Compare the planner's estimate with the peak of allocated memory, for eight settings."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        save_pipeline(scale, Path(folder), layers=scale.layers)
        for name, setting in SETTINGS.items():
            free()
            planned = plan(scale, Path(folder), setting)
            figures[name] = {"planned_gib": planned, **attempt(lambda s=setting: memory_case(scale, Path(folder), s))}
            if "measured_gib" in figures[name]:
                figures[name]["planned_of_measured"] = planned / figures[name]["measured_gib"]
    return figures


def memory_case(scale: Scale, folder: Path, setting: Setting) -> Figures:
    if setting.quantize_base == "nf4" and not scale.on_gpu:
        return {"not_run": "needs a GPU"}
    inputs = draw(scale, [scale.spec.grid(size_of(scale, setting))] * setting.samples)
    before = torch.cuda.memory_allocated() / 2**30 if scale.on_gpu else 0.0
    figures: Figures = {}
    model = model_of(scale, folder, setting)  # loading may take more than training
    with peak_memory(scale, figures, "peak_gib"):
        trainer = Stepper(scale, model, lora=setting.lora, checkpointing=setting.checkpointing, pack=False)
        for _ in range(2):  # the first makes the moments
            trainer.stacked(inputs)
    return {"measured_gib": figures["peak_gib"] - before} if scale.on_gpu else {"not_run": "needs a GPU"}


PARTS: dict[str, Callable[[Scale, int], Figures]] = {
    "parity": measure_parity,
    "attention": measure_attention,
    "step": measure_step,
    "reading": measure_reading,
    "strategies": measure_strategies,
    "planner": measure_planner,
    "quantization": measure_quantization,
}


def lines_of(figures: Figures, *path: str) -> Iterator[str]:
    """Iterate over nested figures as lines of text."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from lines_of(value, *path, name)
        else:
            yield f"{' / '.join((*path, name)):80} {f'{value:.4g}' if isinstance(value, float) else value}"


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="Parts to measure.")
    parser.add_argument("--small", action="store_true", help="Small sizes, as without a GPU.")
    parser.add_argument("--max_minutes", type=float, default=8.0, help="Minutes after which no further part begins.")
    parser.add_argument("--figure", type=Path, help="PNG file for a figure; needs matplotlib.")
    return parser


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = args.small or device == "cpu"
    scale = (SMALL if small else FULL).on(device)
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the reference in float32 would have errors of its own
    figures: Figures = {
        **accelerator_and_versions(*PACKAGES),
        "scale": "small" if small else "full",
        "runs": args.runs,
        "parts": {},
    }
    start = time.perf_counter()
    for name in args.parts:
        began = time.perf_counter()
        if began - start > 60 * args.max_minutes:
            figures["parts"][name] = {"not_run": f"{args.max_minutes:g} minutes were over"}
        else:
            figures["parts"][name] = attempt(lambda name=name: PARTS[name](scale, args.runs))
            figures["parts"][name]["seconds"] = time.perf_counter() - began
        free()
        write_figures(figures, args.output)
    print("\n".join(lines_of(figures)))
    if args.figure:
        draw_figure(figures, args.figure)


if __name__ == "__main__":
    run_script(main, make_parser)
