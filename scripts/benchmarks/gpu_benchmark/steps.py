"""Training steps: packs by kernel beside one size, eager and compiled."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from .measuring import BACKENDS, Cases, Figures, Run
from .models import Stepper, draw, make_transformer
from .scale import Grid


def lora(run: Run) -> Cases:
    """Yield eager steps of LoRA."""
    yield from cases(run, frozen=True, backends=BACKENDS)


def compiled(run: Run) -> Cases:
    """Yield steps of LoRA with compiled blocks, and packs of which each has another composition."""
    yield from cases(run, frozen=True, backends=("auto", "segments"), compiling=True)


def wide(run: Run) -> Cases:
    """Yield eager steps of all weights at the width of a larger model."""
    yield from cases(replace(run, scale=run.scale.widened()), frozen=False, backends=("auto", "segments"))


def compiled_wide(run: Run) -> Cases:
    """Yield the same with compiled blocks."""
    yield from cases(
        replace(run, scale=run.scale.widened()), frozen=False, backends=("auto", "segments"), compiling=True
    )


def cases(run: Run, *, frozen: bool, backends: Sequence[str], compiling: bool = False) -> Cases:
    """Yield steps of one size through the stock model, and packs by each backend."""
    scale = run.scale
    dtype = torch.bfloat16 if frozen else torch.float32
    trainer = Stepper(scale, make_transformer(scale, layers=scale.layers, dtype=dtype), lora=frozen)
    if compiling:
        from hf_bucketing.models.compilation import compile_blocks

        torch._dynamo.reset()  # graphs of another part's model serve blocks of this class, too
        compile_blocks(trainer.model)
    kinds = {"fixed": scale.fixed_step, "mixed": scale.mixed_step, "small": scale.small_step}
    for name, grids in kinds.items():
        if name != "mixed":
            yield f"{name}, stock", functools.partial(step, run, trainer, grids)
        for backend in backends[:1] if name == "fixed" else backends:
            yield f"{name}, {backend}", functools.partial(step, run, trainer, grids, backend)
    if compiling:
        yield "new packs, auto", functools.partial(new_packs, run, trainer)


def step(run: Run, trainer: Stepper, grids: Sequence[Grid], backend: str | None = None) -> Figures:
    """Return seconds, useful TFLOP/s and memory of a step, of one stack or of a pack by a backend."""
    take = trainer.stacked
    if backend is not None:
        trainer.use(backend)
        take = trainer.packed
    inputs, graphs = draw(run.scale, grids), graphs_compiled()
    tokens = sum(frames * rows * columns for frames, rows, columns in grids)
    figures: Figures = {"tokens": tokens, "samples": len(grids), "first_s": run.once(lambda: take(inputs))}
    with run.peak_memory(figures):
        seconds = run.medians({"step": lambda: take(inputs)})["step"]
    flops = run.scale.useful_flops(grids, layers=run.scale.layers, frozen=trainer.lora)
    return {
        **figures,
        "s": seconds,
        "tokens_per_s": tokens / seconds,
        "useful_tflops": flops / seconds / 1e12,
        "graphs": graphs_compiled() - graphs,
    }


def new_packs(run: Run, trainer: Stepper) -> Figures:
    """Return seconds and compiled graphs of packs in a row, each of another composition."""
    scale, pick = run.scale, random.Random(0)
    trainer.use("auto")
    packs = [pick.choices(scale.mixed_step, k=len(scale.mixed_step) - 1) for _ in range(scale.new_packs)]
    graphs, seconds = graphs_compiled(), []
    for number, grids in enumerate(packs):
        inputs = draw(scale, grids, seed=number)
        seconds.append(run.once(lambda inputs=inputs: trainer.packed(inputs)))
    return {"s_of_each": seconds, "graphs": graphs_compiled() - graphs}


def graphs_compiled() -> int:
    """Return how many graphs `torch.compile` has made."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
