r"""Sample a clip from a fine-tuned pipeline, with stock diffusers alone, and write it as mp4.

python scripts/sample_video.py trained --prompt "a red circle moving left" --output clip.mp4
"""

import argparse
import inspect

import torch
from diffusers import DiffusionPipeline

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import FlagError
from hf_bucketing.files import check_writable
from hf_bucketing.hub import from_hub
from hf_bucketing.media import write_video
from hf_bucketing.models.recipe import dtypes, tile

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("pipeline", help="Text-to-video pipeline, on the hub or in a folder.")
    parser.add_argument("--lora_weights", help="Folder of LoRA weights trained on this pipeline (default: none).")
    parser.add_argument("--output", required=True, help="File to write (mp4).")
    parser.add_argument("--prompt", default="a red circle moving left on a dark background", help="Prompt to render.")
    parser.add_argument("--height", type=int, default=64, help="Height in pixels.")
    parser.add_argument("--width", type=int, default=112, help="Width in pixels.")
    parser.add_argument("--num_frames", type=int, default=17, help="Number of frames.")
    parser.add_argument("--fps", type=int, default=8, help="Frame rate of the file.")
    parser.add_argument("--num_inference_steps", type=int, default=20, help="Scheduler steps.")
    parser.add_argument(
        "--guidance_scale", type=float, default=1.0, help="Scale of classifier-free guidance; 1.0 means none."
    )
    parser.add_argument(
        "--max_sequence_length", type=int, help="Text tokens, as in training (default: the pipeline's)."
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="float32",
        help="Precision of text encoder and transformer; the VAE has float32.",
    )
    parser.add_argument(
        "--offload",
        choices=["none", "model", "sequential"],
        default="none",
        help="What waits on the CPU until it is called: nothing, whole models, or single layers, in the least memory "
        "and most slowly.",
    )
    parser.add_argument(
        "--vae_tiling",
        action="store_true",
        help="Decode tile by tile, which takes less memory and changes results slightly.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the noise.")
    return parser


def main(args: argparse.Namespace) -> None:
    check_writable(args.output)
    if args.offload != "none" and not torch.accelerator.is_available():
        raise FlagError("Omit --offload: this machine has no accelerator, so that everything is on the CPU already.")
    with from_hub(args.pipeline):
        pipeline = DiffusionPipeline.from_pretrained(args.pipeline, **dtypes(DTYPES[args.dtype]))
    if args.lora_weights:
        with from_hub(args.lora_weights):
            pipeline.load_lora_weights(args.lora_weights)
    if args.vae_tiling:
        tile(pipeline.vae, args.pipeline)
    if args.offload == "model":
        pipeline.enable_model_cpu_offload()
    elif args.offload == "sequential":
        pipeline.enable_sequential_cpu_offload()
    else:
        pipeline.to(torch.accelerator.current_accelerator() or "cpu")
    parameters = inspect.signature(pipeline.__call__).parameters
    duration = {"num_frames" if "num_frames" in parameters else "video_length": args.num_frames}
    text = {"max_sequence_length": args.max_sequence_length} if args.max_sequence_length else {}
    frames = pipeline(
        args.prompt,
        height=args.height,
        width=args.width,
        num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale,
        generator=torch.Generator().manual_seed(args.seed),
        output_type="np",
        **duration,
        **text,
    ).frames[0]

    write_video(args.output, (frames * 255).round().astype("uint8"), fps=args.fps)
    print(f"Wrote {len(frames)} frames of {args.width}×{args.height} pixels to {args.output}")


if __name__ == "__main__":
    run_script(main, make_parser)
