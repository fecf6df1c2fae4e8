"""The model card of a run, README.md in its output folder: settings, buckets, counts, losses, samples, how to load."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME

from ..adapters.experts import loading_options, own_folder
from ..adapters.files import COMFYUI_WEIGHTS
from ..adapters.settings import ADAPTER_NAMES
from ..batching.run_data import RunData
from ..buckets.assignment import count_rejections
from ..buckets.sizes import Size
from ..conditions.names import FRAME_BY_FRAME, REFERENCE
from ..conditions.shares import AUDIO, NO_AUDIO, VIDEO, read_conditions
from ..configuration.hub import HubConfig
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..files import complete_file
from ..models.calls import IMAGES
from ..models.experts import transformers_of
from ..models.loading import dtypes
from ..models.recipe import Recipe
from ..report.charts import save_charts
from ..runs.logs import Logs
from ..runs.recount import count_replaced
from ..runs.review import FEWEST_STEPS, loss_charts
from ..settings import names_of, settings_in

LOSSES = "loss.png"
"""File of the loss figure in the output folder."""

_OURS = "<!-- Written by hf_bucketing; the next run in this folder replaces it, unless this line is removed. -->"
_SHOWN_BUCKETS = 30

_VERSIONS = ("hf_bucketing", "diffusers", "torch", "accelerate")

_DRAWING = ("jinja2", "matplotlib")
"""Packages that draw the page and the losses of a run, and are imported when they first do."""


class Run(NamedTuple):
    """A finished run, as far as its card is about it.

    Attributes:
        config ([`TrainingConfig`]): Settings that the run ended with.
        recipe ([`Recipe`][hf_bucketing.models.recipe.Recipe]): Recipe of its pipeline.
        data ([`RunData`]): Its data.
        repository (`str`, *optional*): Repository on the hub that receives the result, if there is one.
        samples (mapping of `Path` to `str`): Files of its last renderings, and the prompt of each.
    """

    config: TrainingConfig
    recipe: Recipe
    data: RunData
    repository: str | None
    samples: Mapping[Path, str]


def check_drawing() -> None:
    """Check before a run that what draws its pages and its card is there: a checkout may come without its packages.

    Raises:
        BucketingError: If a package is missing.
    """
    if missing := [name for name in _DRAWING if importlib.util.find_spec(name) is None]:
        raise BucketingError(f"A run draws its page and its card with {missing[0]}, which is missing: pip install it.")


def write_card(folder: Path, run: Run) -> tuple[list[str], str]:
    """Draw the losses and write the card of a run, unless its folder holds a README.md that someone else wrote.

    The card names no folder of this machine: paths are shown by their last part alone.

    Args:
        folder (`Path`): Output folder, which holds the logs.
        run ([`Run`]): The run.

    Returns:
        `tuple`: The files of the card relative to the output folder, and a message about it.

    Raises:
        BucketingError: If the run left no log.
    """
    path = folder / REPOCARD_NAME
    if path.is_file() and _OURS.encode() not in path.read_bytes():
        return [REPOCARD_NAME], f"Kept {path}, which is not a card of hf_bucketing"
    logs, figure = Logs(folder), None
    if len(logs.losses) >= FEWEST_STEPS:
        save_charts(folder / LOSSES, loss_charts([logs]), columns=2)
        figure = LOSSES
    with complete_file(path) as partial:
        partial.write_text(str(ModelCard(_content(logs, run, figure=figure))), encoding="utf-8")
    files = [file.relative_to(folder).as_posix() for file in run.samples]
    return [REPOCARD_NAME, *([] if figure is None else [figure]), *files], f"Model card: {path}"


def _content(logs: Logs, run: Run, *, figure: str | None) -> str:
    config, recipe, folder = run.config, run.recipe, logs.folder
    adapted, base = config.adapters.lora_rank is not None, shown(config.pretrained_model_name_or_path)
    task = f"{'image' if recipe.takes_image else 'text'}-to-{'image' if makes_images(recipe) else 'video'}"
    on_hub = not Path(config.pretrained_model_name_or_path).exists()
    data = ModelCardData(
        base_model=base if on_hub else None,
        base_model_relation=("adapter" if adapted else "finetune") if on_hub else None,
        library_name="diffusers",
        pipeline_tag=task,
        tags=[
            task,
            "diffusers",
            "diffusers-training",
            *([config.adapters.adapter] if adapted else []),
            "hf_bucketing",
        ],
        widget=[
            {"text": prompt, "output": {"url": file.relative_to(folder).as_posix()}}
            for file, prompt in run.samples.items()
        ]
        or None,
    )
    name = run.repository or folder.resolve().name
    comfyui = config.adapters.lora_format != "diffusers"
    what = (
        f"{ADAPTER_NAMES[config.adapters.adapter]} adapters of rank {config.adapters.lora_rank} for"
        if adapted
        else "A fine-tuned version of"
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n{_OURS}\n\n# {name}\n",
        f"{what} {base}, a `{recipe.pipeline_class}`, trained with hf_bucketing on samples of many sizes. The license "
        "of the base model applies.\n",
        *([f"{' '.join(_of_audio(config))}\n"] if recipe.audio else []),
        *(["<Gallery />\n"] if run.samples else []),
        f"## Use\n\n```bash\npip install {' '.join(_packages(recipe, adapted=adapted))}\n```\n",
        f"```python\n{_code(run, name=name, base=base)}\n```\n",
        *([f"For ComfyUI, put {_comfyui_files(config)} into `models/loras`.\n"] if adapted and comfyui else []),
        f"## Data\n\n{_table(('rows', 'count'), _counts(logs, run.data))}\n",
        f"{_buckets(run)}\n",
        f"## Training\n\n{_progress(logs)}\n",
        *([f"![Training loss]({figure})\n"] if figure else []),
        f"Settings that differ from their defaults:\n\n```yaml\n{_settings(config)}```\n",
        f"Versions: {', '.join(f'{name} {importlib.import_module(name).__version__}' for name in _VERSIONS)}.\n",
    ]
    return "\n".join(parts)


def _of_audio(config: TrainingConfig) -> list[str]:
    """Return sentences on how audio is trained."""
    said = ["Video and its audio are trained together; samples without a track of sound train video alone."]
    condition = config.objective.condition
    shares = () if condition is None else read_conditions(condition).all
    kinds = {kind for share in shares for kind in share.kinds}
    shown = [text for kind, text in _SHOWN_MODALITIES.items() if kind in kinds]
    return [*said, *([f"Some samples train {' or '.join(shown)} (`condition`)."] if shown else [])]


_SHOWN_MODALITIES = {
    VIDEO: "sound for their video",
    AUDIO: "video for their sound",
    NO_AUDIO: "video without their sound",
}


def _comfyui_files(config: TrainingConfig) -> str:
    """Return the names of the files for ComfyUI; those of two transformers need different names in one folder."""
    trained = config.trained_component
    folders = [own_folder(component, trained=trained) for component in transformers_of(trained)]
    files = " and ".join(f"`{Path(folder, COMFYUI_WEIGHTS).as_posix()}`" for folder in folders)
    return files if len(folders) == 1 else f"{files}, each under a name of its own,"


def makes_images(recipe: Recipe) -> bool:
    """Return whether the pipeline makes images; some models of videos have one that does."""
    return recipe.family.images_only or "ToImage" in recipe.pipeline_class


def _packages(recipe: Recipe, *, adapted: bool) -> list[str]:
    """Return the packages that the code of a card needs; diffusers writes videos with the last ones."""
    writers = ["av"] if recipe.audio else ["imageio", "imageio-ffmpeg"]
    videos = [] if makes_images(recipe) else writers
    return ["diffusers", "transformers", "accelerate", *(["peft"] if adapted else []), *videos]


def _loaded(recipe: Recipe) -> dict[str, str]:
    """Return the images and videos without which the pipeline cannot be called, as code that loads them."""
    images = IMAGES[: recipe.num_images(recipe.config)] if recipe.takes_image else ()
    loaded = {image: f'load_image("{image}.png")' for image in images}
    for name in recipe.required:
        moving = name in FRAME_BY_FRAME and not recipe.family.images_only
        loaded[recipe.shown_as[name]] = f'load_video("{name}.mp4")' if moving else f'load_image("{name}.png")'
    return loaded


def _references(recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """Return an import and an argument of the call for a reference, where the trained transformer needs one."""
    if not recipe.needs_reference:
        return [], {}
    assert recipe.reference_code is not None, "transformers that need one, as others of their pipeline do not, have it"
    line, argument = recipe.reference_code
    return [line], {recipe.shown_as[REFERENCE]: argument}


def _code(run: Run, *, name: str, base: str) -> str:
    """Return lines of Python that load the result and call it once at the size of most samples."""
    config, recipe = run.config, run.recipe
    size = trained_sizes(run.data)[0][0]
    fps = (recipe.sound_fps if recipe.audio else None) or frame_rate(run.data)
    loaded = _loaded(recipe)
    writer = "encode_video" if recipe.audio else "export_to_video"
    tools = [*{call.partition("(")[0] for call in loaded.values()}, *([] if makes_images(recipe) else [writer])]
    adapted = config.adapters.lora_rank is not None
    imports, references = _references(recipe)
    lines = ["import torch", f"from diffusers import {recipe.pipeline_class}", *imports]
    if adapted and not config.adapters.has_pairs:
        lines.append("from peft import PeftModel")
    if tools:
        lines.append(f"from diffusers.utils import {', '.join(sorted(tools))}")
    source = base if adapted else name
    (dtype,) = dtypes(torch.bfloat16)
    precision = f"{dtype}=torch.bfloat16"
    if recipe.output is None:
        lines += ["", f'pipeline = {recipe.pipeline_class}.from_pretrained("{source}", {precision})']
    else:
        lines += ["", f'pipeline = {recipe.pipeline_class}.from_pretrained("{source}")']
        lines.append(f"pipeline.load_components({precision})")
    if adapted and not config.adapters.has_pairs:
        for component in transformers_of(config.trained_component):
            place = [f'subfolder="{own}"'] if (own := own_folder(component, trained=config.trained_component)) else []
            arguments = ", ".join([f"pipeline.{component}", json.dumps(name), *place])
            lines.append(f"PeftModel.from_pretrained({arguments})")
    elif adapted:
        if read := recipe.read_with_lora:
            lines.append(
                f"pipeline.transformer.register_to_config({', '.join(f'{k}={v!r}' for k, v in read.items())})"
            )
        file = COMFYUI_WEIGHTS if config.adapters.lora_format == "comfyui" else None
        for options in loading_options(config.trained_component, file=file):
            given = [
                f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in options.items()
            ]
            lines.append(f"pipeline.load_lora_weights({', '.join([json.dumps(name), *given])})")
    prompt = next(iter(run.samples.values()), "what it shows")
    call = {
        "prompt": json.dumps(prompt, ensure_ascii=False),
        **loaded,
        **references,
        **recipe.size_arguments(size),
        **(recipe.sound_arguments(fps) if recipe.audio else {}),
    }
    arguments = ", ".join(f"{argument}={value}" for argument, value in call.items())
    lines += ['pipeline.to("cuda")', f"result = pipeline({arguments})"]
    made = f"result.{recipe.output or ('images' if makes_images(recipe) else 'frames')}[0]"
    if makes_images(recipe):
        return "\n".join([*lines, f'{made}.save("image.png")'])
    if recipe.audio:
        sound = f"audio=result.audio[0].float().cpu(), audio_sample_rate=pipeline.{recipe.sound_rate}"
        return "\n".join([*lines, f'encode_video({made}, {fps}, "video.mp4", {sound})'])
    return "\n".join([*lines, f'export_to_video({made}, "video.mp4", fps={fps})'])


def trained_sizes(data: RunData) -> list[tuple[Size, int]]:
    """Return the sizes at which samples are trained, and how many there are of each; the most frequent first."""
    counts = sorted(data.bucket_counts().items(), key=lambda item: -item[1])
    return [(data.table.size(bucket), count) for bucket, count in counts]


def frame_rate(data: RunData) -> int:
    """Return the median frame rate of the videos that are trained, or 16 if there is none or they come as a stream."""
    rates = data.frame_rates
    return 16 if rates is None or not (rates > 0).any() else round(float(np.median(rates[rates > 0])))


def _counts(logs: Logs, data: RunData) -> list[tuple[str, int]]:
    """Return the rows of the last epoch by what became of them; of a stream, the samples that were trained."""
    rejection = data.rejections
    if rejection is None:
        return [("trained, of a stream", sum(line.get("samples", 0) for line in logs.losses))]
    *_, plan = logs.first_plans.values()
    replaced = count_replaced(logs.batches)
    return [
        ("in the data set", len(rejection)),
        *([] if data.with_audio is None else [("with audio", data.with_audio)]),
        *((f"rejected: {reason}", count) for reason, count in count_rejections(rejection).items()),
        *((f"dropped: {reason}", count) for reason, count in plan["dropped"].items() if reason != "rejected"),
        ("kept, per epoch", plan["kept"]),
        *((f"kept of {name}, per epoch", counts["kept"]) for name, counts in plan.get("sources", {}).items()),
        ("repeated to fill steps, per epoch", plan["repeated"]),
        *([("unreadable and replaced, in all epochs", replaced)] if replaced else []),
    ]


def _buckets(run: Run) -> str:
    sizes, spec = trained_sizes(run.data), run.data.spec
    title = run.data.way.size_title
    whose = "samples" if run.data.rejections is not None else "samples of its beginning"
    lines: list[tuple[object, ...]] = [
        (f"{size.frames}×{size.height}×{size.width}", count, spec.num_tokens(size))
        for size, count in sizes[:_SHOWN_BUCKETS]
    ]
    if rest := sizes[_SHOWN_BUCKETS:]:
        lines.append((f"{len(rest)} others", sum(count for _, count in rest), "–"))
    return _table((f"{title} (frames×height×width)", whose, "tokens"), lines)


def _progress(logs: Logs) -> str:
    losses = logs.losses
    samples, epochs = sum(line.get("samples", 0) for line in losses), len({line["epoch"] for line in losses})
    return f"{len(losses):,} optimizer steps with {samples:,} samples, in {epochs} epochs."


def _settings(config: TrainingConfig) -> str:
    hidden = {*names_of(HubConfig), "output_dir", "resume_from_checkpoint"}
    values, defaults = config.flat(), {setting.name: setting.default for setting in settings_in(TrainingConfig)}
    given = {
        name: shown(value) for name, value in values.items() if name not in hidden and value != defaults.get(name)
    }
    text: str = yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=1000)
    return text


def shown(value: Any) -> Any:
    """Return a setting with the last part of each path in it, instead of folders of this machine.

    Example:
        >>> shown(["/home/me/clips/a.png", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 3])
        ['a.png', 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers', 3]
    """
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {name: shown(item) for name, item in value.items()}
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith("~") or os.path.exists(value)):
        return Path(value).resolve().name
    return value


def _table(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for line in lines for cell in line)
    rows = zip(*[cells] * len(titles), strict=True)
    head = [f"| {' | '.join(titles)} |", f"|---{'|---:' * (len(titles) - 1)}|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])
