"""The table of families that make audio with video: samples with audio, and how the stock model runs one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers import LTX2Pipeline

from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from tests.models.cases import SIZES, Samples
from tests.models.families import CASES
from tests.models.families.kandinsky6 import with_audio
from tests.models.families.minimax_h3 import minimax_h3_with_audio

LENGTHS = (6, 0, 10, 2, 0, 12)
"""Audio tokens of each sample; the second and the fifth have no audio."""
STACKED = (0, 4)
"""Samples of one size whose texts are equally long."""

Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AudioCase:
    """How a family's stock model is run on a sample with audio.

    Args:
        alone: Returns the video and the audio that the model predicts of a sample, called as its pipeline does.
        channels: Channels of audio latents.
    """

    alone: Callable[[AudioSamples, int], Outputs]
    channels: int = 6


class AudioSamples(Samples):
    """Samples of a case with audio."""

    def __init__(self, name: str, lengths: tuple[int, ...] = LENGTHS) -> None:
        case = CASES[name]
        if name == "kandinsky6":  # with two samples of one size
            drawn = {
                "visual_cond": lambda draw: [draw(5, *size) for size in SIZES],
                "pooled_projections": lambda draw: draw(len(SIZES), 20),
            }
            case = replace(
                case, sizes=SIZES, conditioning=lambda draw, count: {key: make(draw) for key, make in drawn.items()}
            )
        super().__init__(torch.float64, case=case)
        self.name = name
        self.model = self.case.model(torch.float64)
        self.family = family_of(self.model)
        case, draw = AUDIO_CASES[name], torch.Generator().manual_seed(1)
        text_dim = self.family.audio_text_dim(self.model)
        texts = [torch.randn(len(text), text_dim, generator=draw, dtype=torch.float64) for text in self.text]
        self.audio = Audio(
            latents=[torch.randn(length, case.channels, generator=draw, dtype=torch.float64) for length in lengths],
            timesteps=torch.tensor([300.0, 1.0, 0.0, 999.0, 5.0, 640.0]),
            video_timesteps=self.conditioning.get("sigma", self.timesteps),
            text=texts if text_dim else None,
        )

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(self.family.unused_in(self.model, audio=True))

    def one_alone(self, sample: int) -> Outputs:
        return AUDIO_CASES[self.name].alone(self, sample)

    def packed(self, strip_length: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        batch = self.pack(enable_packing(self.model, strip_length=strip_length), audio=self.audio)
        strips, audio = packed_forward_with_audio(self.model, batch)
        return batch.unpack(strips), audio

    def stack(self) -> Rows:
        chosen, audio = list(STACKED), self.audio

        def rows_of(values: Any) -> Any:
            return values[chosen] if isinstance(values, torch.Tensor) else torch.stack([values[row] for row in chosen])

        return Rows(
            latents=rows_of(self.latents),
            timesteps=self.timesteps[chosen],
            text=rows_of(self.text),
            patch=self.family.patch(self.model.config),
            conditioning={name: rows_of(values) for name, values in self.conditioning.items()},
            audio=Audio(
                latents=[audio.latents[row] for row in chosen],
                timesteps=audio.timesteps[chosen],
                video_timesteps=audio.video_timesteps[chosen],
                text=None if audio.text is None else [audio.text[row] for row in chosen],
            ),
        )


def ltx2_alone(samples: AudioSamples, sample: int) -> Outputs:
    model, latent = samples.model, samples.latents[sample]
    sides = {"patch_size": model.config.patch_size, "patch_size_t": model.config.patch_size_t}
    frames, height, width = latent.shape[1:]
    fps, tokens = float(samples.conditioning["fps"][sample]), samples.audio.latents[sample]
    silent = not len(tokens)
    video, audio = model(
        hidden_states=LTX2Pipeline._pack_latents(latent[None], **sides),
        audio_hidden_states=tokens.new_zeros(1, 1, 6) if silent else tokens[None],
        encoder_hidden_states=samples.text[sample][None],
        audio_encoder_hidden_states=samples.audio.text[sample][None],
        timestep=samples.timesteps[sample][None],
        audio_timestep=samples.audio.timesteps[sample][None],
        sigma=samples.audio.video_timesteps[sample][None],
        audio_sigma=samples.audio.timesteps[sample][None],
        num_frames=frames,
        height=height,
        width=width,
        audio_num_frames=1 if silent else len(tokens),
        video_coords=model.rope.prepare_video_coords(1, frames, height, width, "cpu", fps=fps),
        isolate_modalities=silent,
        use_cross_timestep=True,
        return_dict=False,
    )
    grid = frames // sides["patch_size_t"], height // sides["patch_size"], width // sides["patch_size"]
    return LTX2Pipeline._unpack_latents(video, *grid, **sides)[0], audio[0] if not silent else audio[0, :0]


def called_by(call: Callable[..., Outputs], samples: AudioSamples, sample: int) -> Outputs:
    return call(
        samples.model,
        samples.latents[sample],
        samples.timesteps[sample],
        samples.text[sample],
        audio=samples.audio.latents[sample],
        audio_timestep=samples.audio.timesteps[sample],
        **{name: values[sample] for name, values in samples.conditioning.items()},
    )


LTX2 = AudioCase(alone=ltx2_alone)
AUDIO_CASES = {
    "ltx2": LTX2,
    "ltx2 interleaved patches": LTX2,
    "ltx2.3": LTX2,
    "ltx2.5": LTX2,
    "minimax-h3": AudioCase(alone=partial(called_by, minimax_h3_with_audio), channels=4),
    "kandinsky6": AudioCase(alone=partial(called_by, with_audio)),
}
