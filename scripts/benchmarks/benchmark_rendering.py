"""Time renderings of prompts in several sizes: one call of the pipeline after another, and all calls in packs.

python scripts/benchmarks/benchmark_rendering.py --output scripts/benchmarks/results/rendering.json

A Wan of random weights renders each prompt in each size with guidance, in turns in both ways, at several widths. On a
GPU, small forwards leave most of it idle, and packs fill it; a processor works as hard on one sample as on many.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark_tools import accelerator_and_versions, benchmark_parser, report, seconds_of
from diffusers import WanPipeline

from hf_bucketing import Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.rendering import Call, render_together
from hf_bucketing.synthetic.pipelines import wan

PROMPTS = ("a red square", "a blue circle on grey", "two green triangles")
SIZES = (Size(9, 64, 64), Size(9, 48, 80), Size(5, 80, 64), Size(1, 96, 96))


def make_recipe(folder: Path, *, heads: int, layers: int, device: str) -> Recipe:
    """Return the recipe of a Wan of random weights, which is saved and loaded as any other."""
    torch.manual_seed(0)
    transformer = wan.transformer(num_attention_heads=heads, num_layers=layers, ffn_dim=96 * heads)
    WanPipeline(**wan.components(), transformer=transformer).save_pretrained(folder)
    recipe = recipe_of(str(folder)).load(str(folder))
    recipe.pipeline.set_progress_bar_config(disable=True)
    recipe.pipeline.to(device)
    recipe.transformer.eval()
    return recipe


def calls_of(recipe: Recipe, *, steps: int) -> list[Call]:
    """Return one call for each prompt and size."""
    calls = []
    for prompt in PROMPTS:
        for size in SIZES:

            def run(recipe: Recipe, prompt: str = prompt, size: Size = size) -> Any:
                noise = torch.Generator().manual_seed(0)
                return recipe.render(prompt, size, num_inference_steps=steps, guidance_scale=3.0, generator=noise)

            calls.append(Call(recipe.spec.grid(size), run))
    return calls


def measure(heads: int, *, layers: int, steps: int, max_tokens: int, runs: int, device: str) -> dict[str, float]:
    """Return the median seconds of both ways at a width, and how many times faster packs are."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), heads=heads, layers=layers, device=device)
    calls = calls_of(recipe, steps=steps)

    def alone() -> list[Any]:
        return [call.run(recipe) for call in calls]

    def together() -> list[Any]:
        return render_together(recipe, calls, strip_length=16, max_tokens=max_tokens)

    check_equal(alone, together)
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    one_by_one, packed = seconds_of(alone, together, runs=runs, synchronize=wait)
    return {
        "width": 24 * heads,
        "one by one s": one_by_one.median,
        "in packs s": packed.median,
        "times faster": one_by_one.median / packed.median,
    }


def check_equal(alone: Callable[[], list[Any]], together: Callable[[], list[Any]]) -> None:
    """Raise if renderings in packs are others than those one by one, whose time would say nothing."""
    for one, packed in zip(alone(), together(), strict=True):
        torch.testing.assert_close(torch.from_numpy(packed), torch.from_numpy(one), rtol=0, atol=1e-2)


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.set_defaults(runs=3)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 8], help="Attention heads, of 24 channels.")
    parser.add_argument("--layers", type=int, default=6, help="Blocks of the transformer.")
    parser.add_argument("--steps", type=int, default=4, help="Steps of the scheduler.")
    parser.add_argument("--max_tokens", type=int, default=1024, help="Most tokens of a pack.")
    return parser


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = accelerator_and_versions("torch", "diffusers")
    options = {"layers": args.layers, "steps": args.steps, "max_tokens": args.max_tokens}
    figures |= {"renderings": len(PROMPTS) * len(SIZES), **options}
    figures["widths"] = [measure(heads, **options, runs=args.runs, device=device) for heads in args.heads]
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
