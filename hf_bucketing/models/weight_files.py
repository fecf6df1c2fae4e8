"""Weights of a transformer or of a VAE in one file, as ComfyUI and the original repositories have them.

The file is read and its names are converted by diffusers (`diffusers/loaders/single_file_model.py`); configurations
come from a pipeline. Names are converted without values first, so that a file of another model is refused before any
weight is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate.utils import set_module_tensor_to_device
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import BucketingError
from ..formats import WEIGHT_FILES, is_gguf
from .index import IndexEntry

State: TypeAlias = dict[str, torch.Tensor]


class _Kind(NamedTuple):
    """A kind of model that is read from one file.

    Attributes:
        setting: Name of the setting that gives the file.
        class_name: What the names of its classes contain.
        prefixes: What ComfyUI and checkpoints of whole pipelines write in front of its names.
        ends: Ends of the names of its files.
    """

    setting: str
    class_name: str
    prefixes: tuple[str, ...]
    ends: tuple[str, ...]

    def classes(self) -> dict[str, Any]:
        """Return how diffusers converts the names in files of the models that it reads from one, by their class."""
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

        return {
            name: rules["checkpoint_mapping_fn"]
            for name, rules in SINGLE_FILE_LOADABLE_CLASSES.items()
            if self.class_name in name
        }


_TRANSFORMER = _Kind(
    "transformer_file", "Transformer", ("model.diffusion_model.", "diffusion_model."), ends=WEIGHT_FILES
)
_VAE = _Kind("vae_file", "Autoencoder", ("first_stage_model.", "vae."), ends=WEIGHT_FILES[:1])

_SCALES = (".scale_weight", ".weight_scale")
"""Ends of the names of the scales of float8 weights, in ComfyUI's earlier and present files."""

_IGNORED = (".scale_input", ".input_scale", "scaled_fp8", "__index_timestep_zero__")
"""Ends of names that no weight of a transformer has: scales of activations, and marks of ComfyUI."""

_FORMAT = ".comfy_quant"
"""End of the names under which ComfyUI says, as JSON, how a weight is quantised."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerFile:
    """A file with the weights of one transformer of a pipeline.

    Attributes:
        path (`str`): File of safetensors, or GGUF.
        component (`str`): The transformer in the pipeline.
    """

    path: str
    component: str = "transformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWeights:
    """What a file says of its weights before they are read.

    Attributes:
        float8 (`bool`): Whether some have eight bits, and are dequantised when they are loaded.
        packed (frozenset of `str`): Linear layers of blocks whose weights stay quantised as in the file, by their
            names in diffusers; of GGUF alone.
        packed_bytes (`float`): Bytes of such a weight per number, in mean.
    """

    float8: bool = False
    packed: frozenset[str] = frozenset()
    packed_bytes: float = 0.0


def _kind_of(empty: Any) -> _Kind:
    return _VAE if _VAE.class_name in type(empty).__name__ else _TRANSFORMER


def read_weights_of(file: str, empty: Any) -> FileWeights:
    """Return what a file says of the weights of a transformer or a VAE, of which it reads the header alone.

    Args:
        file (`str`): File of safetensors or, of a transformer, GGUF.
        empty (`ModelMixin`): The model without values, see
            [`empty_component`][hf_bucketing.models.loading.empty_component].

    Raises:
        BucketingError: If there is no such file, it is cut off, its weights do not fit, or diffusers does not read
            such a model from a file.
    """
    raw = _read(file, empty, values=False)
    float8 = any(value.dtype in _FLOAT8 for value in raw.values())
    state = _converted(file, _dequantized(file, raw, torch.float32, device="meta"), empty)
    packed = {name.removesuffix(".weight"): value for name, value in state.items() if _is_packed(name, value, empty)}
    numbers = sum(_shape(value).numel() for value in packed.values())
    stored = sum(value.numel() for value in packed.values())  # of bytes
    return FileWeights(float8=float8, packed=frozenset(packed), packed_bytes=stored / max(numbers, 1))


def check_weights_can_train(weights: FileWeights | None, *, adapters: bool) -> None:
    """Raise BucketingError if a whole transformer is to be trained whose file holds float8.

    GGUF is refused with the settings, by its name.
    """
    if weights is not None and weights.float8 and not adapters:
        raise BucketingError(
            "The `transformer_file` holds weights of float8, which have three bits of precision; train adapters "
            "(`lora_rank=16`), or give the file of bfloat16 or float32 to train the whole transformer."
        )


def load_transformer(file: str, empty: Any, *, place: IndexEntry, dtype: torch.dtype, quantization: Any = None) -> Any:
    """Load a transformer from a file, as its `from_pretrained` would from the same weights.

    Weights of float8 become those of `dtype`, each multiplied by its scale in float32. Those of GGUF stay as they are
    in the linear layers of the blocks, and are dequantised elsewhere.

    Args:
        file (`str`): File of safetensors, or GGUF.
        empty (`ModelMixin`): The transformer without values.
        place ([`IndexEntry`]): Where its configuration lies.
        dtype (`torch.dtype`): Precision of the weights, except for the modules that a model keeps in float32; of GGUF
            that in which layers compute.
        quantization (any, *optional*): One of diffusers' configurations, by which the weights are quantised.

    Raises:
        BucketingError: As [`read_weights_of`].
    """
    read_weights_of(file, empty)
    state = _converted(file, _dequantized(file, _read(file, empty, values=True), dtype), empty)
    state = {name: value if _is_packed(name, value, empty) else _plain(value) for name, value in state.items()}
    if quantization is not None:
        return _quantized(empty, state, dtype=dtype, quantization=quantization)
    if is_gguf(file):
        from diffusers import GGUFQuantizationConfig

        quantization = GGUFQuantizationConfig(compute_dtype=dtype)
    model = _from_single_file(type(empty), state, place=place, dtype=dtype, quantization_config=quantization)
    for name, value in state.items():  # of which `from_pretrained` loses no digit, as `from_single_file` does
        if _is_kept(name, empty):
            set_module_tensor_to_device(model, name, "cpu", value=value.float(), dtype=torch.float32)
    return model


def read_vae_weights(file: str, empty: Any) -> State:
    """Return the weights of a VAE in a file by their names in diffusers; no value of full precision is read yet.

    Args:
        file (`str`): File of safetensors.
        empty (`ModelMixin`): The VAE without values, see
            [`empty_component`][hf_bucketing.models.loading.empty_component].

    Raises:
        BucketingError: As [`read_weights_of`].
    """
    return _converted(file, _dequantized(file, _read(file, empty, values=True), torch.float32), empty)


def load_vae(file: str, empty: Any, *, place: IndexEntry) -> Any:
    """Load a VAE from a file in float32, as its `from_pretrained` would from the same weights.

    Args:
        file (`str`): File of safetensors.
        empty (`ModelMixin`): The VAE without values.
        place ([`IndexEntry`]): Where its configuration lies.

    Raises:
        BucketingError: As [`read_weights_of`].
    """
    return _from_single_file(type(empty), read_vae_weights(file, empty), place=place, dtype=torch.float32)


def _from_single_file(model_class: Any, state: State, *, place: IndexEntry, dtype: torch.dtype, **options: Any) -> Any:
    """Return a model of converted weights, with the configuration that lies in a place."""
    with _without_advice():
        return model_class.from_single_file(
            dict(state),
            config=place.name_or_path,
            subfolder=place.subfolder,
            config_revision=place.revision,
            torch_dtype=dtype,
            **options,
        )


def _quantized(model: Any, state: State, *, dtype: torch.dtype, quantization: Any) -> Any:
    """Return a transformer without values with those of a state, quantised one after the other.

    These are the steps of `from_pretrained`; `from_single_file` takes all weights for quantised ones.
    """
    from diffusers.models.model_loading_utils import load_model_dict_into_meta
    from diffusers.quantizers import DiffusersAutoQuantizer

    quantizer = DiffusersAutoQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.validate_environment(torch_dtype=dtype, device_map=None)
    dtype, device_map = quantizer.update_torch_dtype(dtype), quantizer.update_device_map(None)
    keeps = getattr(quantizer, "use_keep_in_fp32_modules", False)
    kept = [*(model._keep_in_fp32_modules or ())] if keeps else []
    quantizer.preprocess_model(model=model, device_map=device_map, keep_in_fp32_modules=kept)
    load_model_dict_into_meta(
        model,
        state,
        dtype=dtype,
        device_map=device_map or {"": "cpu"},
        hf_quantizer=quantizer,
        keep_in_fp32_modules=kept,
        unexpected_keys=[],
    )
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return model.eval()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence diffusers, which warns that its own cast changes modules kept in float32, inside a `with` block."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read(file: str, empty: Any, *, values: bool) -> State:
    """Return the tensors of a file by the names that it gives them, without the prefix; on the meta device if asked.

    Raises:
        BucketingError: If it cannot be read.
    """
    kind = _kind_of(empty)
    if type(empty).__name__ not in kind.classes():
        raise BucketingError(
            f"Omit `{kind.setting}`: diffusers reads no {type(empty).__name__} from one file ({file}), only "
            f"{', '.join(sorted(kind.classes()))}."
        )
    if not file.endswith(kind.ends):
        raise BucketingError(f"`{kind.setting}` must be a file of {' or '.join(kind.ends)}, got {file}.")
    if not Path(file).is_file():
        raise BucketingError(f"There is no file {file} (`{kind.setting}`).")
    try:
        # Files of safetensors are mapped: no value is read yet.
        state = _read_gguf(file, values=values) if is_gguf(file) else load_file(file)
    except BucketingError:
        raise
    except ImportError as error:
        raise BucketingError(f'{file} needs the package gguf: pip install "hf_bucketing[gguf]".') from error
    except (SafetensorError, ValueError, IndexError, KeyError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketingError(f"{file} cannot be read; it is cut off or damaged: {reason}") from error
    prefix = next((prefix for prefix in kind.prefixes if any(name.startswith(prefix) for name in state)), "")
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _read_gguf(file: str, *, values: bool) -> State:
    """Return the tensors of a GGUF file as diffusers reads them; without their values on the meta device."""
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter
    from gguf import GGMLQuantizationType, GGUFReader

    plain = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    state: State = {}
    for tensor in GGUFReader(file).tensors:
        kind = tensor.tensor_type
        if kind not in plain and kind not in SUPPORTED_GGUF_QUANT_TYPES:
            raise BucketingError(f"{file} holds weights of GGUF's type {kind.name}, which diffusers does not read.")
        if values:
            value = torch.from_numpy(tensor.data.copy())
        else:
            value = torch.empty(tuple(tensor.data.shape), dtype=plain.get(kind, torch.uint8), device="meta")
        state[tensor.name] = value if kind in plain else GGUFParameter(value, quant_type=kind)
    return state


def _dequantized(file: str, state: State, dtype: torch.dtype, *, device: str = "cpu") -> State:
    """Return the tensors of a file on a device, those of eight bits in `dtype` and multiplied by their scales.

    Raises:
        BucketingError: If weights are quantised in another way, or have scales of another shape.
    """
    state = dict(state)
    formats = {name: state.pop(name) for name in list(state) if name.endswith(_FORMAT)}
    scales = {}
    for name in list(state):
        if end := next((end for end in _SCALES if name.endswith(end)), None):
            scales[f"{name.removesuffix(end)}.weight"] = state.pop(name)
        elif name.endswith(_IGNORED):
            del state[name]
    for name, value in formats.items():
        kind = json.loads(bytes(value.tolist()))["format"]
        if not kind.startswith("float8"):
            raise _other_format(file, name.removesuffix(_FORMAT), kind)
    for name, value in state.items():
        state[name] = value = value.to(device)
        if value.dtype in _FLOAT8:
            state[name] = _scaled(file, name, value, scales.get(name)).to(dtype)
        elif name in scales:
            raise _other_format(file, name, f"{value.dtype} with scales".removeprefix("torch."))
    return state


def _scaled(file: str, name: str, value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a weight of eight bits in float32, multiplied by its scale: one, or one for each row."""
    if scale is None:
        return value.float()
    if scale.numel() not in (1, len(value)):
        raise _other_format(file, name, f"float8 with scales of shape {tuple(scale.shape)}")
    return value.float() * scale.to(value.device).float().reshape(-1, *[1] * (value.ndim - 1))


def _other_format(file: str, name: str, kind: str) -> BucketingError:
    return BucketingError(
        f"{file} holds {name} as {kind}, which cannot be read; take a file of float32, float16, bfloat16 or float8 "
        "with one scale for a weight or for each of its rows, or GGUF."
    )


def _converted(file: str, state: State, empty: Any) -> State:
    """Return tensors by their names in diffusers.

    Raises:
        BucketingError: If they are not those of the transformer; the message names one.
    """
    expected, kind = empty.state_dict(), type(empty).__name__
    if not expected.keys() <= state.keys():  # they are not diffusers' own names
        if kind == "AutoencoderKLLTXVideo":  # whose converter takes a checkpoint of the whole pipeline
            state = {f"vae.{name}": value for name, value in state.items()}
        try:
            state = _kind_of(empty).classes()[kind](checkpoint=state, config=empty.config)
        except (KeyError, IndexError, ValueError, RuntimeError, AttributeError) as error:
            raise BucketingError(f"{file} does not hold the weights of a {kind}: {error!r}.") from error
    shapes = {name: tuple(_shape(value)) for name, value in state.items()}
    for name, value in expected.items():
        if name not in state:
            raise _misfit(file, f"it has no {name}", empty, missing=expected.keys() - state.keys())
        if shapes[name] != tuple(value.shape):
            raise _misfit(file, f"its {name} has shape {shapes[name]}, not {tuple(value.shape)}", empty)
    if extra := sorted(state.keys() - expected.keys()):
        raise _misfit(file, f"it has {extra[0]}, for which there is no place", empty)
    return state


def _misfit(file: str, why: str, empty: Any, *, missing: Collection[str] = ()) -> BucketingError:
    more = f", and {len(missing) - 1} others are missing" if len(missing) > 1 else ""
    return BucketingError(
        f"{file} does not fit the {type(empty).__name__} of this pipeline: {why}{more}. Name the pipeline of the same "
        "model and size (`pretrained_model_name_or_path`), whose configurations are read, or another "
        f"`{_kind_of(empty).setting}`."
    )


def _shape(value: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, of a quantised one that of its numbers."""
    return torch.Size(getattr(value, "quant_shape", value.shape))


def _is_packed(name: str, value: torch.Tensor, empty: Any) -> bool:
    """Return whether a weight stays quantised: of GGUF, one of a linear layer of a block.

    Of layers outside of the blocks, which are small, some models read the dtype.
    """
    kind = getattr(value, "quant_type", None)
    if kind is None or kind.name == "BF16" or _is_kept(name, empty) or not name.endswith(".weight"):
        return False
    in_blocks = isinstance(getattr(empty, name.partition(".")[0], None), torch.nn.ModuleList)
    return in_blocks and isinstance(empty.get_submodule(name.removesuffix(".weight")), torch.nn.Linear)


def _is_kept(name: str, empty: Any) -> bool:
    """Return whether a model keeps a weight in float32."""
    return bool({*name.split(".")} & {*(empty._keep_in_fp32_modules or ())})


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a weight as torch knows it."""
    if not hasattr(value, "quant_type"):
        return value
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    dequantized: torch.Tensor = dequantize_gguf_tensor(value)
    return dequantized
