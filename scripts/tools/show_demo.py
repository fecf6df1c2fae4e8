"""Render prompts before and after training with stock diffusers, draw the frames in one figure, and measure them.

python scripts/tools/show_demo.py --before demo/tiny-wan --after demo/bucket demo/pack --figure demo/before_after.png
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import check_writable, complete_file
from hf_bucketing.synthetic.media import Clip, render

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PROMPTS = (
    ("a red square moving right on a dark background", Clip(9, 64, 112, 4)),
    ("a blue circle moving down on a dark background", Clip(9, 112, 64, 4)),
)
"""What is rendered, and at which size; the figure compares it with such a clip of the data set."""
SHOWN = 5
"""Frames of each clip in the figure."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--before", required=True, type=Path, help="Pipeline that the runs fine-tuned.")
    parser.add_argument("--after", required=True, type=Path, nargs="+", help="Fine-tuned pipelines, one per run.")
    parser.add_argument("--figure", required=True, type=Path, help="PNG file to draw; clips are written beside it.")
    parser.add_argument("--num_inference_steps", type=int, default=20, help="Scheduler steps.")
    parser.add_argument("--guidance_scale", type=float, default=2.0, help="Scale of classifier-free guidance.")
    parser.add_argument("--max_sequence_length", type=int, default=32, help="Text tokens, as in training.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the noise, the same for all pipelines.")
    parser.add_argument("--min_recognised", type=int, default=0, help="Clips after training that must agree.")
    return parser


def main(args: argparse.Namespace) -> None:
    from diffusers import DiffusionPipeline

    from hf_bucketing.media import write_video
    from hf_bucketing.synthetic.media import look_at

    check_writable(args.figure)
    rows = {"in the data": [drawn(prompt, clip) for prompt, clip in PROMPTS]}
    for folder in (args.before, *args.after):
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        name = "before training" if folder == args.before else f"after, {folder.name}"
        rows[name] = [rendered(pipeline, prompt, clip, args) for prompt, clip in PROMPTS]
        write_video(args.figure.with_name(f"{folder.name}.mp4"), rows[name][0], fps=PROMPTS[0][1].fps)
    seen = {name: [look_at(frames) for frames in clips] for name, clips in rows.items()}
    for number, (prompt, _) in enumerate(PROMPTS):
        print(f"{prompt!r} shows")
        for name, measures in seen.items():
            verdict = "as the prompt says" if measures[number].agrees(prompt) else "not what the prompt says"
            print(f"  {name:16} {measures[number]}: {verdict}")
    draw(rows, args.figure)
    trained = [measures for name, measures in seen.items() if name.startswith("after")]
    count = sum(
        measure.agrees(prompt) for clips in trained for measure, (prompt, _) in zip(clips, PROMPTS, strict=True)
    )
    if count < args.min_recognised:
        sys.exit(f"{count} clips after training show what their prompt says, fewer than {args.min_recognised}.")
    of = sum(map(len, trained))
    print(f"{count} of {of} clips after training show what their prompt says. Look at them: {args.figure}")


def drawn(prompt: str, clip: Clip) -> np.ndarray:
    """Return the frames of the data set's clip for a prompt, `(frames, height, width, 3)`."""
    _, color, shape, _, direction, *_ = prompt.split()
    return np.stack(list(render(clip, shape=shape, color=color, direction=direction)))


def rendered(pipeline: "DiffusionPipeline", prompt: str, clip: Clip, args: argparse.Namespace) -> np.ndarray:
    """Return the frames that a pipeline renders for a prompt, `(frames, height, width, 3)`."""
    import torch

    result = pipeline(
        prompt=prompt,
        height=clip.height,
        width=clip.width,
        num_frames=clip.frames,
        num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale,
        max_sequence_length=args.max_sequence_length,
        generator=torch.Generator().manual_seed(args.seed),
        output_type="np",
    )
    return (result.frames[0] * 255).round().astype("uint8")


def draw(rows: dict[str, list[np.ndarray]], path: Path) -> None:
    """Draw a row of frames for each prompt and pipeline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.35 * len(rows) * len(PROMPTS) * 0.95), layout="constrained")
    parts = figure.subfigures(len(PROMPTS), 1, height_ratios=[1.0, 1.55])
    for number, ((prompt, _), part) in enumerate(zip(PROMPTS, parts, strict=True)):
        part.suptitle(f"“{prompt}”", fontsize=13)
        axes = part.subplots(len(rows), 1)
        for axis, (name, clips) in zip(axes, rows.items(), strict=True):
            frames = clips[number]
            picks = frames[np.linspace(0, len(frames) - 1, SHOWN).round().astype(int)]
            gap = np.full((frames.shape[1], 4, 3), 255, np.uint8)
            strip = np.concatenate([piece for frame in picks for piece in (frame, gap)][:-1], axis=1)
            axis.imshow(strip, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=12)
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=100, format="png", bbox_inches="tight")


if __name__ == "__main__":
    run_script(main, make_parser)
