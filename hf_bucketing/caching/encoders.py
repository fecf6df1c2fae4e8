"""Describe the models that encoded a cache, so that a run which loads none of them can tell whether it belongs to it.

A description comes from files alone: configurations, and the headers of weights with a few numbers of each tensor,
which other weights change. What is not on this machine is compared by its place alone.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from ..formats import DTYPES
from .fingerprints import Encoder

_WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "diffusion_pytorch_model.bin",
    "pytorch_model.bin",
)
"""Files of weights, in the order in which diffusers and transformers look for them."""

_NUMBERS = 16
"""Numbers of a tensor that are read, or blocks of a file that holds no safetensors."""

_BLOCK = 4096
"""Bytes of such a block."""

_KEPT = 128
"""Tensors of which a description keeps a number, spread over all."""

_ROUNDED = 2**-7
"""Relative difference of numbers that were rounded to bfloat16 twice."""

_NAMED_SETTINGS = 3

_TEXT_MODELS = ("text_encoder", "connectors", "text_conditioner")
"""Beginnings of the names of components that make the embeddings of captions."""

_INCIDENTAL = {"architectures", "dtype", "torch_dtype", "transformers_version"}
"""Settings that change no result of an encoder; the dtype of its weights is that of their files."""


class Component(Protocol):
    """A component of a pipeline: its class, and its place."""

    @property
    def library(self) -> str:
        """Library of its class."""

    @property
    def class_name(self) -> str:
        """Name of its class."""

    @property
    def name_or_path(self) -> str:
        """Repository or folder that holds it."""

    @property
    def subfolder(self) -> str:
        """Folder in it."""

    @property
    def revision(self) -> str | None:
        """Revision of the repository."""


def describe_encoders(encoder: Encoder) -> dict[str, Any]:
    """Return what the latents and the texts of an encoder depend on, as JSON values.

    Its weights need not be loaded, only its tokenizers.
    """
    index, parts = encoder.components, encoder.pipeline.components
    media = [name for name in ("vae", "image_encoder", *(["audio_vae"] if encoder.audio else [])) if name in index]
    readers = [name for name in index if name.startswith(_TEXT_MODELS)]
    tokenizers = {name: part for name, part in parts.items() if name.startswith(("tokenizer", "processor")) and part}
    return {
        "pipeline": {"name_or_path": encoder.name_or_path, "class_name": type(encoder.pipeline).__name__},
        "latents": {
            "rule": encoder.latents_rule(),
            "media_rule": encoder.media_rule,
            "models": {name: _describe_model(index[name], encoder.file_weights(name)) for name in media},
        },
        "texts": {
            "rule": encoder.text_rule(),
            "templates": {
                name: value
                for name, value in sorted(vars(encoder.pipeline).items())
                if "template" in name and isinstance(value, str | int)
            },
            "models": {name: _describe_model(index[name]) for name in sorted(readers)},
            "tokenizers": {name: _vocabulary(part) for name, part in sorted(tokenizers.items())},
        },
    }


def differences(cached: Mapping[str, Any], running: Mapping[str, Any], *, texts: bool) -> list[str]:
    """Return in what a run's encoders differ from those of a cache, both as [`describe_encoders`] describes them.

    Args:
        cached (mapping): Those of the cache.
        running (mapping): Those of the run.
        texts (`bool`): Whether captions are cached too.
    """
    before, now = (kind["pipeline"]["class_name"] for kind in (cached, running))
    listed = []
    ours, theirs = running["latents"], cached["latents"]
    rules = ours["media_rule"], theirs["media_rule"]
    # A shorter rule belongs to a model that is shown less; what a cache lacks of it is missed before training.
    if ours["rule"] != theirs["rule"] or not (rules[0].startswith(rules[1]) or rules[1].startswith(rules[0])):
        listed.append(f"a {before} makes other latents than a {now}")
    for name in ours["models"].keys() & theirs["models"].keys():
        listed += _differing(name, theirs["models"][name], ours["models"][name])
    if not texts:
        return listed
    ours, theirs = running["texts"], cached["texts"]
    if ours["rule"] != theirs["rule"]:
        listed.append(f"a {before} prepares captions in another way than a {now}")
    for name in ours["templates"].keys() & theirs["templates"].keys():
        if ours["templates"][name] != theirs["templates"][name]:
            listed.append(f"its captions stand in another template ({name})")
    for name in sorted(ours["models"].keys() | theirs["models"].keys()):
        listed += _differing(name, theirs["models"].get(name), ours["models"].get(name))
    for name in sorted(ours["tokenizers"].keys() | theirs["tokenizers"].keys()):
        if ours["tokenizers"].get(name) != theirs["tokenizers"].get(name):
            listed.append(f"its {name} is another one")
    return listed


def _describe_model(
    component: Component, file_weights: tuple[str, Mapping[str, torch.Tensor]] | None = None
) -> dict[str, Any]:
    """Describe a model of the weights in its place, or of those of a file of its own."""
    config = _file_of(component, "config.json")
    place = posixpath.join(component.name_or_path, component.subfolder)
    place, weights = (place, None) if file_weights is None else file_weights
    return {
        "place": place,
        "library": component.library,
        "class_name": component.class_name,
        "config": None if config is None else json.loads(config.read_text(encoding="utf-8")),
        "weights": _describe_weights(component) if weights is None else _describe_state(weights),
    }


def _file_of(component: Component, name: str) -> Path | None:
    """Return a file of a component on this machine, in its folder or in the cache of the hub."""
    if Path(component.name_or_path).is_dir():
        path = Path(component.name_or_path, component.subfolder, name)
        return path if path.is_file() else None
    inner = posixpath.join(component.subfolder, name)
    cached_file = try_to_load_from_cache(component.name_or_path, inner, revision=component.revision)
    return Path(cached_file) if isinstance(cached_file, str) else None


def _describe_weights(component: Component) -> dict[str, Any] | None:
    """Describe the weights of a component; None where they cannot be read on this machine."""
    for name in _WEIGHTS:
        names = [name]
        if (index := _file_of(component, f"{name}.index.json")) is not None:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [path for path in (_file_of(component, part) for part in names) if path is not None]
        if len(files) < len(names):
            continue
        try:
            if name.endswith(".safetensors"):
                return _describe_tensors(tensor for file in files for tensor in _read_tensors(file))
            return _describe_bytes(files)
        except (OSError, SafetensorError):  # the run loads none of them
            return None
    return None


def _describe_state(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Describe weights as those of a folder that holds the same."""
    names = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
    middles = {name: value[len(value) // 2 :][:1] if value.ndim else value for name, value in state.items()}
    return _describe_tensors(
        _Tensor(name, list(value.shape), names[value.dtype], _some_of(middles[name])) for name, value in state.items()
    )


def _describe_tensors(described: Iterable[_Tensor]) -> dict[str, Any]:
    """Describe tensors, however they are divided among files."""
    tensors = sorted(described, key=lambda tensor: tensor.name)
    shapes, digest = hashlib.sha256(), hashlib.sha256()
    for tensor in tensors:
        shapes.update(f"{tensor.name} {tensor.shape}".encode())
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}".encode() + tensor.numbers.tobytes())
    kept = [tensor.numbers[0] for tensor in tensors if len(tensor.numbers)][:: -(-len(tensors) // _KEPT) or 1]
    return {
        "digest": digest.hexdigest()[:16],
        "shapes": shapes.hexdigest()[:16],
        "dtype": ", ".join(sorted({tensor.dtype for tensor in tensors})),
        "numbers": [float(f"{number:.6g}") for number in kept],
    }


class _Tensor(NamedTuple):
    """A tensor in a file, with a few of its numbers in float32."""

    name: str
    shape: list[int]
    dtype: str
    numbers: np.ndarray


def _read_tensors(file: Path) -> Iterator[_Tensor]:
    """Yield the tensors of a file, each with numbers of the middle of its first axis."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118, no dict
            part = opened.get_slice(name)
            shape = part.get_shape()
            middle = part[shape[0] // 2 : shape[0] // 2 + 1] if shape else opened.get_tensor(name)
            yield _Tensor(name, shape, part.get_dtype(), _some_of(middle))


def _some_of(middle: torch.Tensor) -> np.ndarray:
    """Return the first numbers of the middle of a tensor in float32."""
    return middle.flatten()[:_NUMBERS].to(torch.float32).numpy()


def _describe_bytes(files: Sequence[Path]) -> dict[str, Any]:
    """Describe files of another format by their sizes and blocks spread over them."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as opened:
            for place in range(_NUMBERS):
                opened.seek(max(0, size - _BLOCK) * place // (_NUMBERS - 1))
                digest.update(opened.read(_BLOCK))
    return {"digest": digest.hexdigest()[:16], "shapes": "", "dtype": "", "numbers": []}


def _vocabulary(tokenizer: Any) -> str:
    """Return a digest of the tokens and of the template of a tokenizer, or of that of a processor."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    templates = [getattr(part, "chat_template", None) for part in (tokenizer, inner)]
    about = json.dumps([sorted(inner.get_vocab().items()), templates], default=str)
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _differing(name: str, cached: Mapping[str, Any] | None, running: Mapping[str, Any] | None) -> list[str]:
    """Return in what a model of a run differs from that of a cache; None stands for a pipeline without one."""
    if cached is None or running is None:
        return [f"only {'the cache' if running is None else 'the run'} has a {name}"]
    if cached["class_name"] != running["class_name"]:
        return [f"its {name} was a {cached['class_name']} and is a {running['class_name']}"]
    if None in (cached["config"], running["config"], cached["weights"], running["weights"]):
        if cached["place"] == running["place"]:
            return []
        return [f"its {name} was that of {cached['place']}, and that of {running['place']} cannot be read here"]
    before, now = _settings(cached), _settings(running)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        values = [f"{key}={reprlib.repr(before.get(key))} and not {reprlib.repr(now.get(key))}" for key in changed]
        return [f"its {name} had other settings ({', '.join(values[:_NAMED_SETTINGS])})"]
    return [] if _same_weights(cached["weights"], running["weights"]) else [f"its {name} had other weights"]


def _same_weights(cached: Mapping[str, Any], running: Mapping[str, Any]) -> bool:
    """Return whether weights are equal or, saved in two dtypes, equal but for rounding."""
    if cached["digest"] == running["digest"]:
        return True
    if cached["shapes"] != running["shapes"] or cached["dtype"] == running["dtype"]:
        return False
    return bool(np.allclose(cached["numbers"], running["numbers"], rtol=_ROUNDED, atol=1e-6))


def _settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model as the installed libraries read it, with their defaults."""
    config = model["config"]
    if model["library"] == "transformers":
        from transformers import CONFIG_MAPPING

        kind = config.get("model_type")
        config = CONFIG_MAPPING[kind].from_dict(config).to_dict() if kind in CONFIG_MAPPING else config
    else:
        import diffusers

        if (cls := getattr(diffusers, model["class_name"], None)) is not None:
            taken = signature(cls.__init__).parameters
            config = {name: config.get(name, parameter.default) for name, parameter in taken.items()}
    return dict(_flat(json.loads(json.dumps(config, default=str))))


def _flat(config: Mapping[str, Any], *, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration and of its parts, such as `text_config.vocab_size`."""
    for name, value in config.items():
        if name[:1] == "_" or name in _INCIDENTAL:
            continue
        if isinstance(value, dict):
            yield from _flat(value, before=f"{before}{name}.")
        else:
            yield before + name, value
