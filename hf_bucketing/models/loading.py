"""How pipelines are loaded: which components, in which precision, and what their configurations say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from accelerate import init_empty_weights
from accelerate.utils import compare_versions
from huggingface_hub import snapshot_download
from safetensors import safe_open

from ..errors import BucketingError
from ..formats import DTYPES, is_gguf
from ..hub import from_hub
from .index import read_index, read_json
from .weight_files import TransformerFile, load_transformer, load_vae

ModelPart: TypeAlias = Literal["trained", "transformers", "text_encoders", "vae"]
"""A part of a pipeline: the transformers to train, its other transformers, its text encoders, or what encodes media.

The text encoders include whatever else reads text, such as the connectors of LTX-2; what encodes media is the VAE, an
image encoder where there is one, and what makes sound.
"""

MODEL_PARTS: tuple[ModelPart, ...] = get_args(ModelPart)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What of a pipeline is loaded, and how. VAE and image encoder always have float32, which many VAEs need.

    Attributes:
        parts (collection of `str`): Parts to load: `"trained"`, the transformers to train, `"transformers"`, the
            others, `"text_encoders"` and `"vae"`. The weights of other parts are not opened.
        dtype (`torch.dtype`): Precision of text encoders and of transformers that are not trained, except for the
            modules that a model keeps in float32.
        trained_dtype (`torch.dtype`): Precision of the transformers to train, with the same exception.
        quantization (any, *optional*): Quantisation of these transformers, one of diffusers' configurations.
        transformer_file ([`TransformerFile`][hf_bucketing.models.weight_files.TransformerFile], *optional*): File with
            the weights of one transformer, in place of those of the pipeline.
        vae_file (`str`, *optional*): File with the weights of the VAE, in place of those of the pipeline.
        empty (`bool`): Whether the transformers to train are built without weights, on the meta device, as another
            process sends them.
        vae_tiling (`bool`): Whether the VAE works sample by sample and tile by tile, which takes less memory and
            changes results slightly: tiles do not see each other.
    """

    parts: Collection[ModelPart] = MODEL_PARTS
    dtype: torch.dtype = torch.float32
    trained_dtype: torch.dtype = torch.float32
    quantization: Any = None
    transformer_file: TransformerFile | None = None
    vae_file: str | None = None
    empty: bool = False
    vae_tiling: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the weights of the transformers to train are quantised, so that they cannot be trained."""
        file = self.transformer_file
        return self.quantization is not None or (file is not None and is_gguf(file.path))

    def widened(self, parts: Collection[ModelPart]) -> Loading:
        """Return the loading of further parts; a transformer to train that was not asked for is left without weights.

        Args:
            parts (collection of `str`): Parts to load besides.
        """
        empty = self.empty or ("trained" in parts and "trained" not in self.parts)
        return replace(self, parts={*self.parts, *parts}, empty=empty)


def load_pipeline(
    pipeline_class: Any,
    name_or_path: str,
    *,
    trained: Sequence[str],
    loading: Loading,
    replaced: Mapping[str, Any],
    blocks: Any = None,
) -> Any:
    """Load a pipeline from the hub or a folder, and freeze all but the components to train.

    Args:
        pipeline_class (`type`): Class of the pipeline.
        name_or_path (`str`): Pipeline on the hub or in a folder.
        trained (sequence of `str`): Names of the components to train.
        loading ([`Loading`]): What is loaded, and how.
        replaced (mapping of `str` to any): Components that replace those of the pipeline.
        blocks (`ModularPipelineBlocks`, *optional*): Those of a modular pipeline that are called; components of others
            are not loaded.

    Returns:
        `DiffusionPipeline` or `ModularPipeline`: The pipeline; components of parts that are not loaded are None.

    Raises:
        BucketingError: If the pipeline lacks one of these components, or cannot be loaded.
    """
    import diffusers

    index = read_index(name_or_path)
    for name in trained:
        index.check_has(name)
    omitted = {name for name in index.components if not _is_loaded(name, trained, loading)}
    replaced = {
        **replaced,
        **_read_from_files(name_or_path, trained=trained, loading=loading, omitted=omitted),
        **({name: empty_transformer(name_or_path, name) for name in trained} if loading.empty else {}),
    }
    options = dtypes(loading.dtype, **dict.fromkeys(trained, loading.trained_dtype))
    asked = {} if loading.quantization is None else dict.fromkeys(trained, loading.quantization)
    quantized = {name: quantization for name, quantization in asked.items() if name not in replaced}
    with from_hub(name_or_path):
        if index.is_modular:
            pipeline = pipeline_class(blocks=blocks, pretrained_model_name_or_path=name_or_path)
            for name in pipeline.pretrained_component_names:
                if name in index.components and name not in omitted | replaced.keys():
                    arguments = {option: values.get(name, values["default"]) for option, values in options.items()}
                    arguments |= {"quantization_config": quantized[name]} if name in quantized else {}
                    pipeline.update_components(**{name: pipeline.get_component_spec(name).load(**arguments)})
            pipeline.update_components(**replaced)
        else:
            options |= {**dict.fromkeys((*index.absent, *omitted)), **replaced}
            if quantized:
                options["quantization_config"] = diffusers.PipelineQuantizationConfig(quant_mapping=quantized)
            pipeline = pipeline_class.from_pretrained(name_or_path, **options)
    _freeze(pipeline, trained=trained, loading=loading)
    vae = getattr(pipeline, "vae", None)
    if loading.vae_tiling and vae is not None:
        tile(vae, name_or_path)
    for layer in (getattr(vae, "post_quant_conv", None), getattr(vae, "decoder", None)):
        if isinstance(layer, torch.nn.Module):
            layer.register_forward_pre_hook(_cast_latents)
    return pipeline


def _read_from_files(
    name_or_path: str, *, trained: Sequence[str], loading: Loading, omitted: Collection[str]
) -> dict[str, Any]:
    """Return the models of a pipeline whose weights lie in files, by their names; those that are loaded."""
    loaded = {}
    if loading.vae_file is not None and "vae" not in omitted:
        loaded["vae"] = vae_from_file(name_or_path, loading.vae_file)
    file = loading.transformer_file
    if file is None or file.component in omitted or (loading.empty and file.component in trained):
        return loaded
    is_trained = file.component in trained
    with from_hub(file.path):
        loaded[file.component] = load_transformer(
            file.path,
            empty_transformer(name_or_path, file.component),
            place=read_index(name_or_path).components[file.component],
            dtype=loading.trained_dtype if is_trained else loading.dtype,
            quantization=loading.quantization if is_trained else None,
        )
    return loaded


def vae_from_file(name_or_path: str, file: str) -> Any:
    """Load the VAE of a pipeline from a file, in float32.

    Raises:
        BucketingError: If the file cannot be read, or does not fit.
    """
    with from_hub(file):
        return load_vae(file, empty_component(name_or_path, "vae"), place=read_index(name_or_path).components["vae"])


def _freeze(pipeline: Any, *, trained: Sequence[str], loading: Loading) -> None:
    """Freeze all models of a pipeline but those to train; the latter too where they are quantised."""
    for name, component in pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(name in trained and not loading.is_quantized)
    if loading.quantization is not None:
        for name in trained:
            _release_mapped_files(getattr(pipeline, name))


def _cast_latents(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast latents to the dtype of the VAE, as FLUX.2's pipelines do not."""
    latents, *others = args
    return latents.to(next(layer.parameters()).dtype), *others


def call_parameters(pipeline_class: Any, blocks: Any = None) -> dict[str, bool]:
    """Return the names of the arguments that the call of a pipeline, or of these blocks, takes, and which it needs."""
    if blocks is not None:
        return {parameter.name: parameter.required for parameter in blocks.inputs}
    parameters = signature(pipeline_class.__call__).parameters.items()
    return {name: parameter.default is Parameter.empty for name, parameter in parameters}


def _is_loaded(name: str, trained: Sequence[str], loading: Loading) -> bool:
    """Return whether a component of a pipeline is loaded; those without weights always are."""
    part = part_of(name, trained=trained)
    return part is None or part in loading.parts


def empty_transformer(name_or_path: str, trained: str) -> Any:
    """Return a transformer of a pipeline whose parameters have no values.

    Raises:
        BucketingError: If the pipeline has no such transformer, or its configuration cannot be read.
    """
    read_index(name_or_path).check_has(trained)
    return empty_component(name_or_path, trained)


def empty_component(name_or_path: str, component: str) -> Any:
    """Return a model of diffusers in a pipeline, such as its VAE, whose parameters have no values.

    Raises:
        BucketingError: If the pipeline has no such component, or its configuration cannot be read.
    """
    import diffusers

    config = read_config(name_or_path, component)
    model_class = getattr(diffusers, read_index(name_or_path).components[component].class_name)
    with init_empty_weights(), torch.random.fork_rng(devices=[]):  # some draw parameters all the same
        return model_class.from_config(config)


def _release_mapped_files(transformer: torch.nn.Module) -> None:
    """Copy the weights that were not quantised: they lie in the mapped files, all of which would stay in memory."""
    for parameter in transformer.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.data = parameter.data.clone()


_WITH_TEXT_ENCODERS = (
    "connectors",
    "text_conditioner",
    "prompt_enhancer",
    "prompt_enhancer_head",
    "pe",
    "duration_head",
)


def part_of(name: str, *, trained: Sequence[str]) -> ModelPart | None:
    """Return the part to which a component of a pipeline belongs; None for those without weights.

    `trained` are the names of the transformers to train.
    """
    if name in trained:
        return "trained"
    if name.startswith("transformer") or name == "unconditional_transformer":
        return "transformers"
    if name.startswith("text_encoder") or name in _WITH_TEXT_ENCODERS:
        return "text_encoders"
    return "vae" if name in ("vae", "image_encoder", "audio_vae", "vocoder") else None


def dtypes(dtype: torch.dtype, **others: torch.dtype) -> dict[str, Any]:
    """Return the argument of a pipeline's `from_pretrained` for a dtype, with others by component.

    A VAE has float32, and so has an image encoder, as in diffusers' examples.
    """
    name = "dtype" if compare_versions("diffusers", ">=", "0.42") else "torch_dtype"
    return {name: {"default": dtype, "vae": torch.float32, "image_encoder": torch.float32, **others}}


def tile(vae: Any, name_or_path: str) -> None:
    """Make a VAE work sample by sample and tile by tile.

    Raises:
        BucketingError: If it cannot.
    """
    if not hasattr(vae, "use_tiling"):
        raise BucketingError(f"The {type(vae).__name__} of {name_or_path} has no tiling; omit `vae_tiling`.")
    vae.enable_tiling()
    if hasattr(vae, "use_slicing"):
        vae.enable_slicing()


def pipeline_folder(name_or_path: str) -> Path:
    """Return the folder of a whole pipeline, which is downloaded if it is on the hub."""
    from diffusers import DiffusionPipeline

    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    index = read_index(name_or_path)
    with from_hub(name_or_path):
        if not index.is_modular:
            return Path(DiffusionPipeline.download(name_or_path))
        subfolders = [entry.subfolder for entry in index.components.values() if entry.name_or_path == name_or_path]
        return Path(
            snapshot_download(name_or_path, allow_patterns=["*.json", *(f"{folder}/*" for folder in subfolders)])
        )


def strides_of(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Return the temporal and the spatial stride of a VAE by its configuration; for image VAEs only the latter counts.

    A VAE that names no spatial stride halves the sides between its blocks; Wan's first configurations name neither.
    """
    temporal, spatial = (  # the latter names are those of Wan's VAE
        vae.get(f"{axis}_compression_ratio", vae.get(f"scale_factor_{axis}")) for axis in ("temporal", "spatial")
    )
    return temporal or 4, spatial or 2 ** (len(vae.get("block_out_channels", (0,) * 4)) - 1)


def read_trained_config(name_or_path: str, trained: str) -> dict[str, Any]:
    """Return the configuration of a transformer of a pipeline.

    Raises:
        BucketingError: If the pipeline has no such transformer.
    """
    read_index(name_or_path).check_has(trained)
    return read_config(name_or_path, trained)


def read_configs(name_or_path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of a pipeline's VAE and transformer, without loading their classes.

    Raises:
        BucketingError: If there is no pipeline with a VAE and a transformer.
    """
    return read_config(name_or_path, "vae"), read_config(name_or_path, "transformer")


def read_config(name_or_path: str, component: str) -> dict[str, Any]:
    """Return the configuration of a component of a pipeline, without loading its class.

    Raises:
        BucketingError: If there is no pipeline with that component.
    """
    entry = read_index(name_or_path).components.get(component)
    if entry is None:
        raise BucketingError(f"{name_or_path} comes without a {component}.")
    file = Path(entry.name_or_path, entry.subfolder, "config.json")
    if file.is_file():
        with from_hub(entry.name_or_path):
            return read_json(file)

    from diffusers.configuration_utils import ConfigMixin

    class AnyModel(ConfigMixin):
        config_name = "config.json"

    with from_hub(entry.name_or_path):
        config: dict[str, Any] = AnyModel.load_config(
            entry.name_or_path, subfolder=entry.subfolder, revision=entry.revision
        )
    return config


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the precision that most weights of a model in a folder have.

    Raises:
        BucketingError: If there is no file of safetensors.
    """
    dtypes: Counter[torch.dtype] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            dtypes.update(getattr(torch, DTYPES[tensors.get_slice(name).get_dtype()]) for name in tensors.keys())  # noqa: SIM118
    if not dtypes:
        raise BucketingError(f"{folder} has no weights in files of safetensors.")
    return dtypes.most_common(1)[0][0]
