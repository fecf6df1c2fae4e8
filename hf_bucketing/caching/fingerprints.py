"""Fingerprints of parts of a pipeline: of its encoders, for caches, and of the weights that a run begins with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from ..buckets.open_table import OpenTable
from ..buckets.table import BucketTable

RULE_VERSION = 1
"""Raised when an encoder's code changes what it returns."""


class Encoder(Protocol):
    """What encodes samples and captions, such as the training recipe of a loaded pipeline."""

    @property
    def pipeline(self) -> Any:
        """The pipeline whose VAE, text encoders, tokenizers and any image encoder encode, as fingerprints see."""

    @property
    def name_or_path(self) -> str:
        """Repository or folder of the pipeline."""

    @property
    def components(self) -> Mapping[str, Any]:
        """Components of the pipeline by name, each a `Component` of caching/encoders.py."""

    def file_weights(self, component: str) -> tuple[str, Mapping[str, torch.Tensor]] | None:
        """Return the file that a component has to itself, and the weights in it by name; None if it has none."""

    def latents_rule(self) -> str:
        """Return a name of the way in which media is encoded, beside what the models and `media_rule` say."""

    def text_rule(self) -> str:
        """Return a name of the way in which captions are encoded, beside what the models say."""

    @property
    def max_sequence_length(self) -> int:
        """Text tokens per caption."""

    @property
    def text_sees_references(self) -> bool:
        """Whether `encode_text` is given the references of each caption's sample too."""

    @property
    def audio(self) -> bool:
        """Whether audio is encoded too, and captions also as audio attends to them."""

    @property
    def media_rule(self) -> str:
        """What `encode_media` depends on beside these models, if anything."""

    def check_frames(self, table: BucketTable | OpenTable, bucket_ids: npt.ArrayLike) -> None:
        """Raise BucketingError if samples are too short for the model, given their buckets."""

    def check_conditions(self, names: Collection[str]) -> None:
        """Raise BucketingError if the model is not shown a condition of the data set, or lacks one that it needs."""

    def keyframes_at(self, latent_frames: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Any]]:
        """Return what `encode_media` takes to encode frames by themselves, at these latent frames of each sample."""

    def encode_media(
        self, pixel_values: torch.Tensor, conditions: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, torch.Tensor | Sequence[Any]]:
        """Encode `(B, 3, F, H, W)` in [−1, 1], on the VAE's device, to `latents` `(B, C, f, h, w)` and conditions.

        `conditions` are those of the data set by name: lists with one tensor per sample, or a tuple of its references.
        """

    @property
    def encode_text(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]]:
        """Encode captions to embeddings `(n, length, dim)`, a mask `(n, length)` or None, and what else there is.

        One that sees references takes `references`, a tuple of pictures `(3, F, h, w)` in [−1, 1] for each caption.
        """

    def encode_null(self) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Encode the text of a dropped caption, as [`encode_text`] encodes one caption.

        Without a mask, it takes that of the caption that it replaces.
        """


def latents_fingerprint(encoder: Encoder) -> str:
    """Return sixteen hex digits that change with the VAE's class, configuration or weights, or the encoder's class.

    They also change with those of an image encoder, of the VAE of audio where audio is encoded and, as tiles do not
    see each other, with tiling.
    """
    vae, images = encoder.pipeline.vae, getattr(encoder.pipeline, "image_encoder", None)
    more = ["tiled"] if getattr(vae, "use_tiling", False) else []
    if encoder.media_rule:
        more.append(encoder.media_rule)
    if images is not None:
        more.append(_digest("image_encoder", images))
    if encoder.audio:
        more.append(_digest("audio_vae", encoder.pipeline.audio_vae))
    return _digest(type(encoder).__name__, vae, *more)


def text_fingerprint(encoder: Encoder) -> str:
    """Return sixteen hex digits that change with all that embeddings of captions depend on.

    These are the text encoder's class, configuration, weights and their dtype, those of connectors behind it, the
    tokenizer, the encoder's class and the number of text tokens.
    """
    parts = encoder.pipeline.components
    tokenizer = parts.get("tokenizer", parts.get("processor"))
    rules = _tokenizer_rules(tokenizer) | {"max_sequence_length": encoder.max_sequence_length}
    more = [
        _tokenizer_rules(part) if name.startswith("tokenizer") else _digest(name, part)
        for name, part in sorted(parts.items())
        if name.startswith(("tokenizer_", "text_encoder_", "connectors")) and part is not None
    ]
    more += ["audio"] if encoder.audio else []
    return _digest(type(encoder).__name__, encoder.pipeline.text_encoder, rules, *more)


def _tokenizer_rules(tokenizer: Any) -> dict[str, Any]:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # that of a processor
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
    }


def _digest(encoder: str, module: torch.nn.Module, *more: Any) -> str:
    digest = hashlib.sha256()
    config: Any = module.config
    config = config if isinstance(config, dict) else config.to_dict()
    # Where weights come from and which release saved them changes no result; their dtype is hashed with them.
    incidental = {"transformers_version", "torch_dtype", "dtype"}
    settings = {name: value for name, value in config.items() if name[0] != "_" and name not in incidental}
    about = [RULE_VERSION, encoder, type(module).__name__, settings, *more]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    return _with_weights(digest, module, read=lambda numbers: numbers)


_BLOCKS, _BLOCK = 16, 64
"""Parts of a tensor that a fingerprint of weights reads, and numbers in each."""


def weights_fingerprints(pipeline: Any) -> dict[str, str]:
    """Return sixteen hex digits for each model of a pipeline that change with its weights, by component.

    Read are names, dtypes, shapes and about a thousand numbers of each tensor, spread over it: other weights change
    all tensors, and a model of 14 billion weights takes a second instead of minutes. A change of a few numbers
    elsewhere is not seen. Call it on a pipeline as loaded, before adapters are added or dtypes changed.
    """
    return {
        name: _with_weights(hashlib.sha256(), component, read=_sample)
        for name, component in sorted(pipeline.components.items())
        if isinstance(component, torch.nn.Module)
    }


def _sample(numbers: torch.Tensor) -> torch.Tensor:
    """Return blocks of a tensor `(n,)`, spread over it."""
    last = len(numbers) - _BLOCK
    if len(numbers) <= _BLOCKS * _BLOCK:
        return numbers
    return torch.cat([numbers[start : start + _BLOCK] for start in range(0, last + 1, last // (_BLOCKS - 1))])


def _with_weights(
    digest: hashlib._Hash, module: torch.nn.Module, *, read: Callable[[torch.Tensor], torch.Tensor]
) -> str:
    """Return sixteen hex digits of what was hashed so far and of a module's weights, as far as `read` picks them."""
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in _plain(tensor.detach()):
            numbers = read(part.reshape(-1)).cpu().contiguous()
            digest.update(numbers.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors of which one consists: those with the numbers and scales of a quantised one, or itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))
