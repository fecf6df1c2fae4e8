"""The model card of a run (README.md in its output folder), and the upload of both to the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, constants
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import HFValidationError

from ..adapters.files import ADAPTER_FILES, COMFYUI_WEIGHTS
from ..adapters.loading import expert_folder, loading_options
from ..adapters.settings import ADAPTER_NAMES
from ..batching.run_data import RunData
from ..buckets.assignment import count_rejections
from ..buckets.sizes import Size
from ..conditions.names import FRAME_BY_FRAME, REFERENCE
from ..conditions.shares import AUDIO, NO_AUDIO, VIDEO, read_conditions
from ..configuration.outputs import HubConfig
from ..configuration.run import TrainingConfig
from ..errors import BucketingError, HubError
from ..files import complete_file
from ..models.calls import IMAGES
from ..models.experts import TrainedComponent, transformers_of
from ..models.index import MODULAR_INDEX, copy_index, read_index
from ..models.loading import dtypes
from ..models.recipe import Recipe
from ..report.charts import save_charts
from ..runs.logs import Logs
from ..runs.recount import count_replaced
from ..runs.review import FEWEST_STEPS, loss_charts
from ..settings import names_of, settings_in

LOSSES = "loss.png"
"""File of the loss figure in the output folder."""

_TEMPLATE = Path(__file__).with_name("templates") / "card.md"
_OURS = "<!-- Written by hf_bucketing; the next run in this folder replaces it, unless this line is removed. -->"
_FILE_OF = {"transformer_file": "transformer", "vae_file": "VAE"}
"""What a card calls the part of a pipeline whose weights are those of a file."""

_CONDITION_MODALITIES = {
    VIDEO: "sound for their video",
    AUDIO: "video for their sound",
    NO_AUDIO: "video without their sound",
}
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
        partial.write_text(str(_card(logs, run, figure=figure)), encoding="utf-8")
    files = [file.relative_to(folder).as_posix() for file in run.samples]
    return [REPOCARD_NAME, *([] if figure is None else [figure]), *files], f"Model card: {path}"


def _card(logs: Logs, run: Run, *, figure: str | None) -> ModelCard:
    config, recipe, sizes = run.config, run.recipe, trained_sizes(run.data)
    fps = (recipe.sound_fps if recipe.audio else None) or frame_rate(run.data)
    shares = () if config.objective.condition is None else read_conditions(config.objective.condition).all
    conditions = {kind for share in shares for kind in share.kinds}
    call = _call(run, sizes[0][0], fps)
    tools = {value.partition("(")[0] for value in call.values() if value.startswith(("load_image(", "load_video("))}
    tools |= set() if makes_images(recipe) else {"encode_video" if recipe.audio else "export_to_video"}
    return ModelCard.from_template(
        _metadata(run, folder=logs.folder),
        template_path=str(_TEMPLATE),
        ours=_OURS,
        name=run.repository or logs.folder.resolve().name,
        base=without_folders(config.pretrained_model_name_or_path),
        files={_FILE_OF[name]: Path(file).name for name, file in config.weight_files.items()},
        adapters=config.adapters,
        kind=ADAPTER_NAMES[config.adapters.adapter],
        adapted={name: expert_folder(name, trained=config.trained_component) for name in _adapted(config)},
        by_peft=config.adapters.lora_rank is not None and not config.adapters.has_pairs,
        loading=partial(loading_options, config.trained_component),
        comfyui=COMFYUI_WEIGHTS,
        recipe=recipe,
        images=makes_images(recipe),
        modalities=[text for kind, text in _CONDITION_MODALITIES.items() if kind in conditions],
        samples=run.samples,
        dtype=next(iter(dtypes(torch.bfloat16))),
        call=call,
        tools=sorted(tools),
        fps=fps,
        counts=_counts(logs, run.data),
        data=run.data,
        sizes=sizes,
        losses=logs.losses,
        figure=figure,
        settings=_settings(config),
        versions={name: importlib.import_module(name).__version__ for name in _VERSIONS},
        code=_code,
        number="{:,}".format,
    )


def _metadata(run: Run, *, folder: Path) -> ModelCardData:
    """Return the YAML of a card, by which the hub finds it and shows its samples."""
    config, recipe = run.config, run.recipe
    adapted, base = config.adapters.lora_rank is not None, config.pretrained_model_name_or_path
    task = f"{'image' if recipe.takes_image else 'text'}-to-{'image' if makes_images(recipe) else 'video'}"
    on_hub = not Path(base).exists()
    kinds = [config.adapters.adapter] if adapted else []
    files = {file.relative_to(folder).as_posix(): prompt for file, prompt in run.samples.items()}
    return ModelCardData(
        base_model=without_folders(base) if on_hub else None,
        base_model_relation=("adapter" if adapted else "finetune") if on_hub else None,
        library_name="diffusers",
        pipeline_tag=task,
        tags=[task, "diffusers", "diffusers-training", *kinds, "hf_bucketing"],
        widget=[{"text": prompt, "output": {"url": file}} for file, prompt in files.items()] or None,
    )


def _adapted(config: TrainingConfig) -> tuple[str, ...]:
    """Return the names of the transformers that have adapters."""
    return () if config.adapters.lora_rank is None else transformers_of(config.trained_component)


def _call(run: Run, size: Size, fps: float) -> dict[str, str]:
    """Return the arguments of the pipeline's call as code, those among them without which it cannot be called."""
    recipe = run.recipe
    call = {"prompt": _code(next(iter(run.samples.values()), "what it shows"))}
    images = IMAGES[: recipe.num_images(recipe.config)] if recipe.takes_image else ()
    call |= {image: f'load_image("{image}.png")' for image in images}
    arguments = recipe.call_arguments()
    for name in filter(arguments.__contains__, recipe.required_conditions()):
        moving = name in FRAME_BY_FRAME and not recipe.family.images_only
        call[arguments[name]] = f'load_video("{name}.mp4")' if moving else f'load_image("{name}.png")'
    if recipe.needs_reference:  # as others of its pipeline do not
        assert recipe.reference_code is not None
        call[arguments[REFERENCE]] = recipe.reference_code[1]
    values = {**recipe.size_arguments(size), **(recipe.sound_arguments(fps) if recipe.audio else {})}
    return call | {name: str(value) for name, value in values.items()}


def _code(value: Any) -> str:
    """Return a value as code; texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def makes_images(recipe: Recipe) -> bool:
    """Return whether the pipeline makes images; some models of videos have one that does."""
    return recipe.family.images_only or "ToImage" in recipe.pipeline_class


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


def _settings(config: TrainingConfig) -> str:
    hidden = {*names_of(HubConfig), "output_dir", "resume_from_checkpoint"}
    values, defaults = config.flat(), {setting.name: setting.default for setting in settings_in(TrainingConfig)}
    changed = {
        name: without_folders(value)
        for name, value in values.items()
        if name not in hidden and value != defaults.get(name)
    }
    text: str = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=1000)
    return text


def without_folders(value: Any) -> Any:
    """Return a setting with the last part of each path in it, instead of folders of this machine.

    Example:
        >>> without_folders(["/home/me/clips/a.png", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 3])
        ['a.png', 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers', 3]
    """
    if isinstance(value, (list, tuple)):
        return [without_folders(item) for item in value]
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, str) and (os.path.isabs(value) or value.startswith("~") or os.path.exists(value)):
        return Path(value).resolve().name
    return value


_NO_NAME = 'expected "name" or "owner/name" of letters, digits, -, _ and .'


def open_repository(config: HubConfig, *, folder: Path) -> str:
    """Create the repository unless it exists, and check that files may be uploaded to it; none is.

    Args:
        config ([`HubConfig`]): Its name, and whether it is private.
        folder (`Path`): Output folder, whose name it has by default.

    Returns:
        `str`: Its name with its owner's, as `"owner/name"`.

    Raises:
        HubError: If the hub cannot be reached or does not allow it.
    """
    name, api = config.hub_model_id or folder.resolve().name, HfApi()
    try:
        repository = api.create_repo(name, private=config.hub_private_repo, exist_ok=True).repo_id
        # Every upload begins with this request. The hub answers it only to those who may write.
        api.preupload_lfs_files(repository, [CommitOperationAdd(constants.REPOCARD_NAME, b"text")])
    except HFValidationError as error:
        raise HubError(f"{name} cannot name a repository, {_NO_NAME}; give `hub_model_id`.") from error
    except Exception as error:  # releases of huggingface_hub raise errors of three HTTP libraries
        raise HubError(
            f"The repository {name} cannot be written on {constants.ENDPOINT}: {_first_line(error)}.",
            advice=[
                "log in with `hf auth login`, or set HF_TOKEN to a token that may write to it",
                "name another repository as `hub_model_id`",
                "train without `push_to_hub`",
            ],
        ) from error
    return str(repository)


def result_parts(folder: Path, *, adapters: bool, trained: TrainedComponent = "transformer") -> list[str]:
    """Return the names of the files and folders in an output folder that hold the adapters, or the pipeline."""
    if adapters:
        if trained == "both":
            return [expert_folder(name, trained=trained) for name in transformers_of(trained)]
        return [name for name in ADAPTER_FILES if (folder / name).is_file()]
    index = read_index(str(folder))
    return [*(name for name, entry in index.components.items() if entry.is_below(folder)), index.file_name]


def upload(folder: Path, repository: str, parts: Sequence[str]) -> str:
    """Upload parts of an output folder, and nothing else of it; return where they are, as a message.

    Args:
        folder (`Path`): Output folder.
        repository (`str`): Repository that [`open_repository`] returned.
        parts (sequence of `str`): Files and folders, relative to the output folder.

    Raises:
        HubError: If the upload fails; the message says how to repeat it.
    """
    if MODULAR_INDEX in parts:
        copy_index(folder, folder, place=repository)
    patterns = [f"{part}/*" if (folder / part).is_dir() else part for part in parts]
    try:
        HfApi().upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=patterns, commit_message="End of training"
        )
    except Exception as error:  # as above
        included = [word for pattern in patterns for word in ("--include", pattern)]
        command = shlex.join(["hf", "upload", repository, str(folder), ".", *included])
        raise HubError(
            f"Training ended and its result is complete in {folder}, but its upload to {repository} failed: "
            f"{_first_line(error)}. Repeat the upload alone with: {command}"
        ) from error
    return f"Uploaded to {constants.ENDPOINT}/{repository}"


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}, {line}"
