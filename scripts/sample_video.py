r"""Sample a clip from a fine-tuned pipeline, with stock diffusers alone, and write it as mp4.

python scripts/sample_video.py trained --prompt "a red circle moving left" --output clip.mp4
"""

import argparse
import inspect
from pathlib import Path

import av
import torch
from diffusers import DiffusionPipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="A text-to-video pipeline, on the hub or in a folder.")
    parser.add_argument("--lora_weights", help="A folder of adapters that were trained on this pipeline.")
    parser.add_argument("--output", required=True, help="An mp4 file to write.")
    parser.add_argument("--prompt", default="a red circle moving left on a dark background")
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=112)
    parser.add_argument("--num_frames", type=int, default=17)
    parser.add_argument("--fps", type=int, default=8)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=1.0)
    parser.add_argument("--max_sequence_length", type=int, help="As in training (default: the pipeline's).")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    if args.lora_weights:
        pipeline.load_lora_weights(args.lora_weights)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
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

    partial = Path(args.output).with_suffix(".partial.mp4")
    with av.open(str(partial), "w") as container:
        stream = container.add_stream("libx264", rate=args.fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in (frames * 255).round().astype("uint8"):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    partial.replace(args.output)
    print(f"Wrote {len(frames)} frames of {args.width}×{args.height} pixels to {args.output}")


if __name__ == "__main__":
    main()
