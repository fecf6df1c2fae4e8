r"""Sample a clip or an image from a fine-tuned pipeline, with stock diffusers alone, and write it as mp4 or png.

Several prompts, seeds, strengths of adapters or numbers of steps make one file with all of them side by side.

%(prog)s trained --prompt "a red circle moving left" --output clip.mp4
%(prog)s trained-i2v --image first.png --prompt "it moves left" --output clip.mp4
%(prog)s Wan-AI/Wan2.1-T2V-1.3B-Diffusers --adapter trained=0.8 --adapter style.safetensors \
    --compare_base --prompt "a dog" "a cat" --seed 0 1 --output grid.mp4
%(prog)s FLUX.2-klein --adapter trained --reference before.png --prompt "make it night" \
    --output after.png
%(prog)s trained-vace --control depth.mp4 --reference cat.png --prompt "it runs" \
    --output clip.mp4
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..adapters.settings import parse_adapter
from ..buckets import Size
from ..command_line.flags import FlagParser
from ..errors import FlagError
from ..files import check_writable
from ..models.experts import TrainedComponent
from .renderings import Cell, RenderGrid, labelled_grid

if TYPE_CHECKING:
    from PIL import Image

    from ..models.recipe import Recipe
    from ..models.weight_files import TransformerFile

DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("pipeline", help="Pipeline, on the hub or in a folder.")
    _add_adapters(parser)
    parser.add_argument("--output", required=True, help="File to write: mp4, or png for a single frame.")
    _add_conditions(parser)
    _add_prompts(parser)
    _add_loading(parser)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], common=True, help="Seeds of the noise.")
    return parser


def _add_adapters(parser: FlagParser) -> None:
    """Add the flags of adapters and their strengths."""
    parser.add_argument(
        "--adapter",
        "--lora_weights",
        action="append",
        type=parse_adapter,
        default=[],
        metavar="PATH[=STRENGTH]",
        common=True,
        help="Adapters for this pipeline: the folder of a run, a file or a repository, and their strength, such as "
        "trained=0.8. The flag may be repeated (default: none).",
    )
    parser.add_argument(
        "--strength",
        type=float,
        nargs="+",
        default=[1.0],
        help="Factor of the strengths of all adapters; several are compared, and 0 is the base model.",
    )
    parser.add_argument(
        "--compare_base",
        action="store_true",
        common=True,
        help="Render without the adapters too, from the same noise.",
    )
    parser.add_argument(
        "--trained_component",
        choices=get_args(TrainedComponent),
        default="transformer",
        help="Transformers that the adapters are for, where the pipeline has two; MiniMax-H3 renders with references "
        "by its transformer_ref.",
    )


def _add_conditions(parser: FlagParser) -> None:
    """Add the flags of images and videos that the pipeline is given."""
    parser.add_argument(
        "--image",
        help="Image, or video whose first frame counts, to begin the clip with, where the pipeline takes it.",
    )
    parser.add_argument("--last_image", help="The same to end the clip with.")
    parser.add_argument("--control", help="Control video or image, such as depth, where the pipeline takes one.")
    parser.add_argument("--mask", help="Video or image that is white where the clip is generated, beside --control.")
    parser.add_argument("--face", help="Video or image of a face in each frame of --control, where one is animated.")
    parser.add_argument("--background", help="Video that stays where --mask is black, where a face is animated.")
    parser.add_argument(
        "--reference",
        nargs="+",
        default=[],
        help="References of any sizes, images or for in-context models videos, where the pipeline takes some.",
    )
    parser.add_argument(
        "--reference_pixels",
        type=int,
        help="Largest area of a reference in pixels, as the data set was prepared with (default: as the pipeline "
        "makes them).",
    )
    parser.add_argument(
        "--reference_downscale_factor",
        type=int,
        help="How many times larger the clip is than its references, where they lie over it (default: they have "
        "sizes of their own).",
    )


def _add_prompts(parser: FlagParser) -> None:
    """Add the flags of prompts, and of the arguments of the pipeline's call."""
    parser.add_argument(
        "--prompt",
        nargs="+",
        default=["a red circle moving left on a dark background"],
        common=True,
        help="Prompts to render.",
    )
    parser.add_argument(
        "--negative_prompt", help="What to steer away from, where there is guidance (default: the empty prompt)."
    )
    parser.add_argument("--height", type=int, default=64, common=True, help="Height in pixels.")
    parser.add_argument("--width", type=int, default=112, common=True, help="Width in pixels.")
    parser.add_argument(
        "--num_frames", type=int, common=True, help="Number of frames (default: 17; 1 of pipelines of images)."
    )
    parser.add_argument("--fps", type=int, default=8, common=True, help="Frame rate of the file.")
    parser.add_argument(
        "--with_audio",
        action="store_true",
        help="Write the sound that the pipeline makes with the clip, as long as the clip at --fps.",
    )
    parser.add_argument(
        "--num_inference_steps", type=int, nargs="+", default=[20], common=True, help="Scheduler steps."
    )
    parser.add_argument(
        "--guidance_scale",
        type=float,
        common=True,
        help="Scale of classifier-free guidance, or of distilled guidance (default: 1.0, which means none); pipelines "
        "whose guider names it take none.",
    )
    parser.add_argument(
        "--true_cfg_scale",
        type=float,
        help="Scale of classifier-free guidance of pipelines whose --guidance_scale is that of a distilled model "
        "(default: 1.0, which means none).",
    )
    parser.add_argument(
        "--max_sequence_length", type=int, help="Text tokens, as in training (default: the pipeline's)."
    )


def _add_loading(parser: FlagParser) -> None:
    """Add the flags of weights, precision and memory."""
    parser.add_argument(
        "--transformer_file",
        help="File with the weights of the transformer, as in training (default: those of the pipeline).",
    )
    parser.add_argument(
        "--vae_file", help="File with the weights of the VAE, as in training (default: those of the pipeline)."
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


def main(args: argparse.Namespace) -> None:
    import diffusers
    import torch

    from ..adapters.loading import load_adapters, set_strengths
    from ..models.index import read_index
    from ..models.loading import Loading, call_parameters, load_pipeline, tile
    from ..models.recipe import Recipe
    from ..models.registry import find_recipe

    check_writable(args.output)
    if args.offload != "none" and not torch.accelerator.is_available():
        raise FlagError("Omit --offload: this machine has no accelerator, so that everything is on the CPU already.")
    grid = grid_of(args)
    index = read_index(args.pipeline)
    pipeline_class, recipe = getattr(diffusers, index.class_name), find_recipe(index.class_name) or Recipe
    if index.is_modular and args.offload != "none":
        raise FlagError(f"Omit --offload: a {index.class_name}, as a modular pipeline, has no such offload.")
    blocks = recipe.blocks(args.trained_component)
    parameters = call_parameters(pipeline_class, blocks)
    arguments: dict[str, Any] = {**recipe.call_defaults, **duration_of(args, parameters)}
    arguments |= images_of(args, parameters, pipeline_class.__name__)
    arguments |= condition_arguments(args, arguments, pipeline_class.__name__)
    if args.with_audio and (not recipe.makes_audio() or args.output.endswith(".png") or len(grid.cells) > 1):
        raise FlagError(f"Omit --with_audio: a {pipeline_class.__name__} makes no sound for {args.output}.")
    arguments |= recipe.sound_arguments(args.fps) if args.with_audio else {}
    arguments |= guidance_of(args, parameters, pipeline_class.__name__)
    arguments |= length_of(args, parameters, pipeline_class.__name__)
    loading = Loading(
        dtype=getattr(torch, DTYPES[args.dtype]), transformer_file=transformer_file_of(args), vae_file=args.vae_file
    )
    pipeline = load_pipeline(pipeline_class, args.pipeline, trained=(), loading=loading, replaced={}, blocks=blocks)
    load_adapters(pipeline, args.adapter, trained=args.trained_component)
    if args.vae_tiling:
        tile(pipeline.vae, args.pipeline)
    if args.offload == "model":
        pipeline.enable_model_cpu_offload()
    elif args.offload == "sequential":
        pipeline.enable_sequential_cpu_offload()
    else:
        # A build of torch for CUDA names it also where no driver is.
        pipeline.to((torch.accelerator.is_available() and torch.accelerator.current_accelerator()) or "cpu")
    results: dict[Cell, Any] = {}
    for strength in grid.strengths:
        if args.adapter:
            set_strengths(pipeline, args.adapter, factor=strength)
        results |= {
            cell: rendered(args, cell, pipeline, arguments) for cell in grid.cells if cell.strength == strength
        }
    write(args, grid, results, pipeline, recipe)


def transformer_file_of(args: argparse.Namespace) -> TransformerFile | None:
    """Return the file of the transformer's weights, if one is named."""
    from ..formats import is_gguf
    from ..models.weight_files import TransformerFile

    file = args.transformer_file
    if file is None:
        return None
    if args.trained_component == "both":
        raise FlagError("--transformer_file holds one transformer; name it by --trained_component transformer.")
    if is_gguf(file) and args.offload == "sequential":
        raise FlagError(f"Give --offload model in place of sequential: the packed weights of {file} move as a whole.")
    return TransformerFile(path=file, component=args.trained_component)


def grid_of(args: argparse.Namespace) -> RenderGrid:
    """Return what is rendered."""
    if not args.adapter and (args.compare_base or args.strength != [1.0]):
        raise FlagError("Omit --compare_base and --strength: there is no --adapter.")
    strengths = [0.0, *args.strength] if args.compare_base else args.strength
    values = (args.prompt, args.seed, strengths, args.num_inference_steps)
    prompts, seeds, strengths, steps = ([*dict.fromkeys(named)] for named in values)  # each once
    return RenderGrid(prompts=prompts, seeds=seeds, strengths=strengths, steps=steps)


def rendered(args: argparse.Namespace, cell: Cell, pipeline: Any, arguments: Mapping[str, Any]) -> Any:
    """Return what the pipeline's call returns for a rendering."""
    import torch

    return pipeline(
        prompt=cell.prompt,
        height=args.height,
        width=args.width,
        num_inference_steps=cell.steps,
        generator=torch.Generator().manual_seed(cell.seed),
        output_type="np",
        **arguments,
    )


def write(
    args: argparse.Namespace, grid: RenderGrid, results: Mapping[Cell, Any], pipeline: Any, recipe: type[Recipe]
) -> None:
    """Write the file: one rendering, or all of them side by side."""
    from ..media import write_image, write_video

    clips = [(recipe.frames_of(results[cell]) * 255).round().astype("uint8") for cell in grid.cells]
    levels = clips[0] if len(clips) == 1 else labelled_grid(clips, rows=grid.rows, columns=grid.columns)
    if args.output.endswith(".png"):
        write_image(args.output, levels[0])
    else:
        sound = recipe.sound_of(pipeline, results[grid.cells[0]]) if args.with_audio else None
        write_video(args.output, levels, fps=args.fps, sound=sound)
    compared = f", {len(grid.rows)} × {len(grid.columns)} side by side," if len(clips) > 1 else ""
    print(f"Wrote {len(levels)} frames of {args.width}×{args.height} pixels{compared} to {args.output}")


def guidance_of(args: argparse.Namespace, parameters: Mapping[str, bool], class_name: str) -> dict[str, Any]:
    """Return scales of guidance and the negative prompt as arguments of the pipeline's call."""
    scales = [name for name in ("guidance_scale", "true_cfg_scale") if name in parameters]
    for name in ("guidance_scale", "true_cfg_scale", "negative_prompt"):
        if getattr(args, name) is not None and name not in parameters:
            raise FlagError(f"Omit --{name}: a {class_name} takes none.")
    arguments: dict[str, Any] = {"guidance_scale": 1.0} if "guidance_scale" in scales else {}
    arguments |= {name: getattr(args, name) for name in scales if getattr(args, name) is not None}
    guided = not scales or arguments.get(scales[-1], 1.0) > 1  # that of the guider, or the true one
    if args.negative_prompt is not None and not guided:
        raise FlagError(f"--negative_prompt has no effect without guidance; give --{scales[-1]} above 1.")
    if args.negative_prompt is not None or (args.true_cfg_scale is not None and guided):
        arguments["negative_prompt"] = args.negative_prompt or ""  # without one, some pipelines do not guide
    return arguments


def length_of(args: argparse.Namespace, parameters: Mapping[str, bool], class_name: str) -> dict[str, int]:
    """Return the argument of the pipeline that says how many tokens a prompt may have, if it was given."""
    if args.max_sequence_length is None:
        return {}
    if "max_sequence_length" not in parameters:
        raise FlagError(f"Omit --max_sequence_length: a {class_name} takes none.")
    return {"max_sequence_length": args.max_sequence_length}


def duration_of(args: argparse.Namespace, parameters: Mapping[str, bool]) -> dict[str, int]:
    """Return the argument of the pipeline's call for the number of frames, if it has one."""
    from ..models.calls import DURATIONS

    name = next((name for name in DURATIONS if name in parameters), None)
    is_png = args.output.endswith(".png")
    if name is None:
        if args.num_frames not in (None, 1):
            raise FlagError(f"Omit --num_frames: {args.pipeline} makes images.")
        return {}
    frames = (1 if is_png else 17) if args.num_frames is None else args.num_frames
    if is_png and frames > 1:
        raise FlagError(f"--output {args.output} holds one frame, not {frames}; name an mp4, or omit --num_frames.")
    return {name: frames}


def images_of(args: argparse.Namespace, parameters: Mapping[str, bool], class_name: str) -> dict[str, Image.Image]:
    """Return the images given, cropped to the size of the clip, as arguments of the pipeline's call."""
    from ..media import MediaSource, load_first_frame
    from ..models.calls import IMAGES

    named = {name: getattr(args, name) for name in IMAGES if getattr(args, name) is not None}
    for name in named:
        if name not in parameters:
            raise FlagError(f"Omit --{name}: a {class_name} takes none.")
    for name in images_needed(args, parameters, class_name):
        if name not in named:
            raise FlagError(f"A {class_name} begins with an image, and some end with one; give --{name}.")
    size = Size(1, args.height, args.width)
    return {name: load_first_frame(MediaSource.from_cell(file), size) for name, file in named.items()}


def images_needed(args: argparse.Namespace, parameters: Mapping[str, bool], class_name: str) -> Sequence[str]:
    """Return the arguments of the pipeline's call for the images without which it cannot run."""
    from ..models.calls import IMAGES
    from ..models.loading import read_config
    from ..models.registry import find_recipe

    recipe = find_recipe(class_name)
    if recipe is not None:  # some pipelines that need an image have a default of None
        return IMAGES[: recipe.num_images(read_config(args.pipeline, "transformer"))] if recipe.takes_image else ()
    return [name for name in IMAGES if parameters.get(name)]


def condition_arguments(args: argparse.Namespace, duration: Mapping[str, Any], class_name: str) -> dict[str, Any]:
    """Return what else the pipeline is shown as arguments of its call, given those for its duration."""
    from ..conditions.names import FACE
    from ..models.calls import DURATIONS
    from ..models.registry import find_recipe

    recipe = find_recipe(class_name)
    files = {name: getattr(args, name) for name in ("control", "mask", "face", "background", "reference")}
    if recipe is not None:
        recipe.check_renders(references=len(args.reference), trained=args.trained_component)
    for name, file in files.items():
        if file and (recipe is None or name not in recipe.call_arguments()):
            raise FlagError(f"Omit --{name}: a {class_name} takes none.")
        if not file and recipe is not None and name in recipe.required_conditions():
            raise FlagError(f"A {class_name} needs a {name}; give --{name}.")
    if recipe is None:
        return {}
    frames = args.num_frames or next((duration[name] for name in DURATIONS if name in duration), 17)
    size = Size(1 if recipe.family.images_only else frames, args.height, args.width)
    references = files.pop("reference")
    conditions = {
        name: pictures_of(file, size, fps=args.fps, keeps_shape=name == FACE) for name, file in files.items() if file
    }
    arguments = recipe.shown_arguments(conditions)
    return arguments | (references_of(args, references, size, recipe) if references else {})


def references_of(args: argparse.Namespace, files: Sequence[str], size: Size, recipe: type[Recipe]) -> dict[str, Any]:
    """Return references, in the sizes in which a model is trained with them, as arguments of the pipeline's call."""
    from ..media import MediaSource
    from ..media.sample import load_references
    from ..models.first_frame import pictures
    from ..models.index import read_index

    rule = recipe.reference_rule(read_index(args.pipeline).settings)
    rule = rule.in_pixels(recipe.read_spec(args.pipeline).multiples)
    rule = rule.within(args.reference_pixels, args.reference_downscale_factor)
    sources = [MediaSource.from_cell(file) for file in files]
    loaded = load_references(sources, size, rule, fps=args.fps if size.frames > 1 else 0.0)
    return recipe.reference_arguments([pictures(pixels.transpose(0, 1)) for pixels in loaded], size)


def pictures_of(file: str, size: Size, *, fps: float, keeps_shape: bool) -> list[Image.Image]:
    """Return the frames of a control or the like at a clip's size, or of the file's own; an image serves all."""
    from ..media import MediaSource, View, load_first_frame, probe
    from ..media.sample import load_face, load_sample
    from ..models.first_frame import pictures

    source = MediaSource.from_cell(file)
    if keeps_shape:
        return pictures(load_face(source, size, fps=fps).transpose(0, 1))
    if not probe(source).fps:
        return [load_first_frame(source, size)] * size.frames
    pixels, _ = load_sample(source, View(size=size, fps=fps))
    return pictures(pixels.transpose(0, 1))
