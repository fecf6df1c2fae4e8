"""Audio that LTX-2 is trained on with its video: packs against the stock transformer, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import LTX2Pipeline

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.ltx2.packing import FAMILY
from hf_bucketing.packing import packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from tests.models.cases import Samples, assert_same_gradients, gradients, largest_difference
from tests.models.families import CASES
from tests.pretended_device import module_on_device, on_cpu, on_device, pretended_device

UNUSED = tuple(FAMILY.unused_in(None, audio=True))
LENGTHS = (5, 0, 9, 1, 0, 12)
"""Audio tokens of each sample; the second and the fifth have no audio."""


class AudioSamples(Samples):
    """Samples of a case with audio, at another noise level than their video."""

    def __init__(self, name: str, lengths: tuple[int, ...] = LENGTHS) -> None:
        super().__init__(torch.float64, case=CASES[name])
        self.model = self.case.model(torch.float64)
        draw = torch.Generator().manual_seed(1)
        text_dim = FAMILY.audio_text_dim(self.model)
        self.audio = Audio(
            latents=[torch.randn(length, 6, generator=draw, dtype=torch.float64) for length in lengths],
            timesteps=torch.tensor([300.0, 1.0, 0.0, 999.0, 5.0, 640.0]),
            video_timesteps=self.conditioning.get("sigma", self.timesteps),
            text=[torch.randn(len(text), text_dim, generator=draw, dtype=torch.float64) for text in self.text],
        )

    def one_alone(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the video and the audio that the stock model predicts of a sample, called as its pipeline does."""
        model, latent = self.model, self.latents[sample]
        sides = {"patch_size": model.config.patch_size, "patch_size_t": model.config.patch_size_t}
        frames, height, width = latent.shape[1:]
        fps, tokens = float(self.conditioning["fps"][sample]), self.audio.latents[sample]
        silent = not len(tokens)
        video, audio = model(
            hidden_states=LTX2Pipeline._pack_latents(latent[None], **sides),
            audio_hidden_states=tokens.new_zeros(1, 1, 6) if silent else tokens[None],
            encoder_hidden_states=self.text[sample][None],
            audio_encoder_hidden_states=self.audio.text[sample][None],
            timestep=self.timesteps[sample][None],
            audio_timestep=self.audio.timesteps[sample][None],
            sigma=self.audio.video_timesteps[sample][None],
            audio_sigma=self.audio.timesteps[sample][None],
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

    def packed(self, strip_length: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        batch = self.pack(enable_packing(self.model, strip_length=strip_length), audio=self.audio)
        strips, audio = packed_forward_with_audio(self.model, batch)
        return batch.unpack(strips), audio


def test_audio_is_refused_where_processes_share_the_pack() -> None:
    samples = AudioSamples("ltx2")
    samples.model._parallel_config = SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_degree=2))
    with pytest.raises(PackingError, match="The 2 processes that share this pack have a part of its video each"):
        samples.packed()


def loss_of(videos: Any, audios: Any) -> torch.Tensor:
    parts = [video.square().mean() for video in videos] + [audio.square().mean() for audio in audios if len(audio)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("name", ["ltx2", "ltx2 interleaved patches", "ltx2.3", "ltx2.5"])
def test_video_and_audio_of_a_pack_are_those_of_each_sample_alone(name: str) -> None:
    samples = AudioSamples(name)
    videos, audios = zip(*map(samples.one_alone, range(len(LENGTHS))), strict=True)
    expected = gradients(samples.model, loss_of(videos, audios))
    packed_videos, packed_audios = samples.packed()
    assert largest_difference(videos, packed_videos) <= 1e-11
    assert [len(audio) for audio in packed_audios] == list(LENGTHS)
    present = [sample for sample, length in enumerate(LENGTHS) if length]
    assert largest_difference(*([side[sample] for sample in present] for side in (audios, packed_audios))) <= 1e-11
    others, unused = gradients(samples.model, loss_of(packed_videos, packed_audios)), UNUSED
    assert_same_gradients(expected, others, 1e-6, without_gradient=unused)


def test_a_step_without_any_audio_isolates_video_and_leaves_no_weight_without_a_gradient() -> None:
    """Another process, whose samples have audio, would wait for them."""
    samples = AudioSamples("ltx2.3", lengths=(0,) * len(LENGTHS))
    expected = samples.alone(samples.model)
    videos, audios = samples.packed()
    assert largest_difference(expected, videos) <= 1e-11
    samples.model.zero_grad()
    (loss_of(videos, []) + sum(audio.sum() for audio in audios)).backward()
    lacking = [name for name, parameter in samples.model.named_parameters() if parameter.grad is None]
    assert [name for name in lacking if not any(part in name for part in UNUSED)] == []


def test_recomputed_blocks_read_the_audio_of_their_own_pack() -> None:
    samples = AudioSamples("ltx2.3")
    plain = gradients(samples.model, loss_of(*samples.packed()))
    disable_packing(samples.model)
    samples.model.enable_gradient_checkpointing()
    samples.model.train()
    assert_same_gradients(plain, gradients(samples.model, loss_of(*samples.packed())), 1e-9, without_gradient=UNUSED)


STACKED = (0, 4)
"""Samples of one size whose texts are equally long."""


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("name", ["ltx2", "ltx2.3", "ltx2.5"])
def test_a_stack_is_what_its_samples_are_alone_also_recomputed(name: str, length: int) -> None:
    samples = AudioSamples(name, lengths=(length,) * len(LENGTHS))
    videos, audios = zip(*map(samples.one_alone, STACKED), strict=True)
    expected = gradients(samples.model, loss_of(videos, audios))
    rows = stack_of(samples)
    for checkpointing in (False, True):
        if checkpointing:
            samples.model.enable_gradient_checkpointing()
            samples.model.train()
        output, heard = FAMILY.run_with_audio(samples.model, rows)
        assert largest_difference(videos, output) <= 1e-11
        assert [len(audio) for audio in heard] == [length] * len(STACKED)
        if length:
            assert largest_difference(audios, heard) <= 1e-11
        found = gradients(samples.model, loss_of(output, heard) + sum(audio.sum() * 0 for audio in heard))
        lacking = [name for name, parameter in samples.model.named_parameters() if parameter.grad is None]
        assert [name for name in lacking if not any(part in name for part in UNUSED)] == []
        assert largest_difference(expected.values(), found.values()) <= 1e-9


def stack_of(samples: AudioSamples) -> Rows:
    chosen, audio = list(STACKED), samples.audio
    return Rows(
        latents=torch.stack([samples.latents[row] for row in chosen]),
        timesteps=samples.timesteps[chosen],
        text=torch.stack([samples.text[row] for row in chosen]),
        patch=FAMILY.patch(samples.model.config),
        conditioning={name: values[chosen] for name, values in samples.conditioning.items()},
        audio=Audio(
            latents=[audio.latents[row] for row in chosen],
            timesteps=audio.timesteps[chosen],
            video_timesteps=audio.video_timesteps[chosen],
            text=[audio.text[row] for row in chosen],
        ),
    )


def test_a_pack_with_audio_waits_for_no_device() -> None:
    samples = AudioSamples("ltx2.3")
    expected = [output.detach() for outputs in samples.packed() for output in outputs]
    samples.model = module_on_device(samples.case.model(torch.float64))
    samples.latents, samples.text, samples.timesteps = on_device((samples.latents, samples.text, samples.timesteps))
    samples.conditioning["sigma"] = on_device(samples.conditioning["sigma"])
    parts = {name: on_device(list(getattr(samples.audio, name))) for name in ("latents", "text")}
    levels = {name: on_device(getattr(samples.audio, name)) for name in ("timesteps", "video_timesteps")}
    samples.audio = replace(samples.audio, **parts, **levels)
    packing = enable_packing(samples.model, strip_length=4)
    with pretended_device() as waits:
        for _ in range(2):  # positions of a size are made in the first pack
            waits.clear()
            batch = samples.pack(packing, audio=samples.audio)
            strips, audio = packed_forward_with_audio(samples.model, batch)
            loss_of([strips], audio).backward()
        assert not waits
        outputs = on_cpu([*batch.unpack(strips), *audio])
    present = [pair for pair in zip(expected, outputs, strict=True) if pair[0].numel()]
    assert largest_difference(*zip(*present, strict=True)) <= 1e-11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": [torch.zeros(3, 5)] * 6}, r"The audio of sample 0 has shape \(3, 5\); expected \(tokens, 6\)"),
        ({"timesteps": torch.zeros(2)}, r"as many audios, timesteps of audio and of video, .* got \[6, 2, 6, 6\]"),
        ({"text": [torch.zeros(2, 16)] * 6}, r"text for the audio of sample 0 .* expected \(7, 16\)"),
    ],
)
def test_audio_that_does_not_fit_its_pack_is_refused(change: dict[str, Any], message: str) -> None:
    samples = AudioSamples("ltx2")
    packing = enable_packing(samples.model)
    with pytest.raises(PackingError, match=message):
        samples.pack(packing, audio=replace(samples.audio, **change))


def test_models_without_audio_refuse_it_and_packs_without_audio_give_none() -> None:
    audio = AudioSamples("ltx2").audio
    wan = Samples(case=CASES["wan"])
    packing = enable_packing(wan.case.model())
    with pytest.raises(PackingError, match="WanTransformer3DModel generates no audio beside its video; omit `audio`"):
        wan.pack(packing, audio=audio)
    with pytest.raises(PackingError, match="This pack holds no audio"):
        packed_forward_with_audio(packing.transformer, wan.pack(packing))
