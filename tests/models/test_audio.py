"""Audio that models are trained on with their video: packs against the stock transformer, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward_with_audio
from tests.devices import Device, on_cpu
from tests.models.audio_cases import AUDIO_CASES, LENGTHS, STACKED, AudioSamples
from tests.models.cases import Samples, assert_same_gradients, gradients, largest_difference
from tests.models.families import CASES

EACH = [name for name in AUDIO_CASES if name not in ("ltx2", "ltx2 interleaved patches", "ltx2.5")]
"""One case of each family."""


@pytest.mark.parametrize("name", [name for name in EACH if not name.startswith(("ltx2", "minimax-h3"))])
def test_audio_is_refused_where_processes_share_the_pack(name: str) -> None:
    samples = AudioSamples(name)
    samples.model._parallel_config = SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_degree=2))
    with pytest.raises(PackingError, match="The 2 processes that share this pack have a part of its video each"):
        samples.packed()


def loss_of(videos: Any, audios: Any) -> torch.Tensor:
    parts = [video.square().mean() for video in videos] + [audio.square().mean() for audio in audios if len(audio)]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("name", AUDIO_CASES)
def test_video_and_audio_of_a_pack_are_those_of_each_sample_alone(name: str) -> None:
    samples = AudioSamples(name)
    videos, audios = zip(*map(samples.one_alone, range(len(LENGTHS))), strict=True)
    expected = gradients(samples.model, loss_of(videos, audios))
    packed_videos, packed_audios = samples.packed()
    assert largest_difference(videos, packed_videos) <= 1e-11
    assert [len(audio) for audio in packed_audios] == list(LENGTHS)
    present = [sample for sample, length in enumerate(LENGTHS) if length]
    assert largest_difference(*([side[sample] for sample in present] for side in (audios, packed_audios))) <= 1e-11
    others = gradients(samples.model, loss_of(packed_videos, packed_audios))
    assert_same_gradients(expected, others, 1e-6, without_gradient=samples.unused)


@pytest.mark.parametrize("modality", [0, 1], ids=["video", "audio"])
@pytest.mark.parametrize("name", EACH)
def test_gradients_of_each_modality_are_those_of_each_sample_alone(name: str, modality: int) -> None:
    samples = AudioSamples(name)
    alone = [samples.one_alone(sample)[modality] for sample in range(len(LENGTHS))]
    expected = gradients(samples.model, loss_of([], alone))
    found = gradients(samples.model, loss_of([], samples.packed()[modality]))
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for weight, gradient in expected.items():
        limit = 1e-6 * max(gradient.norm(), 1e-6 * whole)
        assert float((gradient - found[weight]).norm()) <= limit, weight


def weights_without_gradient(samples: AudioSamples) -> list[str]:
    """Return the weights for which another process, whose samples have audio, would wait."""
    lacking = [name for name, parameter in samples.model.named_parameters() if parameter.grad is None]
    return [name for name in lacking if not any(part in name for part in samples.unused)]


@pytest.mark.parametrize("name", EACH)
def test_a_step_without_any_audio_leaves_video_alone_and_no_weight_without_a_gradient(name: str) -> None:
    samples = AudioSamples(name, lengths=(0,) * len(LENGTHS))
    expected = samples.alone(samples.model)
    videos, audios = samples.packed()
    assert largest_difference(expected, videos) <= 1e-11
    samples.model.zero_grad()
    (loss_of(videos, []) + sum(audio.sum() for audio in audios)).backward()
    assert weights_without_gradient(samples) == []


@pytest.mark.parametrize("name", EACH)
def test_recomputed_blocks_read_the_audio_of_their_own_pack(name: str) -> None:
    samples = AudioSamples(name)
    plain = gradients(samples.model, loss_of(*samples.packed()))
    disable_packing(samples.model)
    samples.model.enable_gradient_checkpointing()
    samples.model.train()
    recomputed = gradients(samples.model, loss_of(*samples.packed()))
    assert_same_gradients(plain, recomputed, 1e-9, without_gradient=samples.unused)


@pytest.mark.parametrize("length", [0, 2, 6])
@pytest.mark.parametrize("name", [name for name in AUDIO_CASES if name != "ltx2 interleaved patches"])
def test_a_stack_is_what_its_samples_are_alone_also_recomputed(name: str, length: int) -> None:
    samples = AudioSamples(name, lengths=(length,) * len(LENGTHS))
    videos, audios = zip(*map(samples.one_alone, STACKED), strict=True)
    expected = gradients(samples.model, loss_of(videos, audios))
    rows = samples.stack()
    for checkpointing in (False, True):
        if checkpointing:
            samples.model.enable_gradient_checkpointing()
            samples.model.train()
        output, heard = samples.family.run_with_audio(samples.model, rows)
        assert largest_difference(videos, output) <= 1e-11
        assert [len(audio) for audio in heard] == [length] * len(STACKED)
        if length:
            assert largest_difference(audios, heard) <= 1e-11
        found = gradients(samples.model, loss_of(output, heard) + sum(audio.sum() * 0 for audio in heard))
        assert weights_without_gradient(samples) == []
        assert largest_difference(expected.values(), found.values()) <= 1e-9


@pytest.mark.cases(fast=("pretended-ltx2.3",), slow=("*",))
@pytest.mark.parametrize("name", EACH)
def test_a_pack_with_audio_waits_for_no_device(device: Device, name: str) -> None:
    samples = AudioSamples(name)
    expected = [output.detach() for outputs in samples.packed() for output in outputs]
    samples.model = device.move_module(samples.case.model(torch.float64))
    samples.latents, samples.text, samples.timesteps = device.move((samples.latents, samples.text, samples.timesteps))
    samples.conditioning = {
        name: values if name == "fps" else device.move(values) for name, values in samples.conditioning.items()
    }
    audio = samples.audio
    samples.audio = replace(
        audio,
        latents=device.move(list(audio.latents)),
        timesteps=device.move(audio.timesteps),
        video_timesteps=device.move(audio.video_timesteps),
        text=None if audio.text is None else device.move(list(audio.text)),
    )
    packing = enable_packing(samples.model, strip_length=4)
    with device.recording() as waits:
        for _ in range(2):  # positions of a size are made in the first pack
            waits.clear()
            batch = samples.pack(packing, audio=samples.audio)
            strips, heard = packed_forward_with_audio(samples.model, batch)
            loss_of([strips], heard).backward()
        waits.check(())
        outputs = on_cpu([*batch.unpack(strips), *heard])
    present = [pair for pair in zip(expected, outputs, strict=True) if pair[0].numel()]
    assert largest_difference(*zip(*present, strict=True)) <= max(1e-11, device.rounding)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ltx2", {"latents": [torch.zeros(3, 5)] * 6}, r"audio of sample 0 .* \(3, 5\); expected \(tokens, 6\)"),
        ("ltx2", {"timesteps": torch.zeros(2)}, r"as many audios, timesteps of audio and .* got \[6, 2, 6, 6\]"),
        ("ltx2", {"text": [torch.zeros(2, 16)] * 6}, r"text for the audio of sample 0 .* expected \(7, 16\)"),
        ("ltx2", {"text": None}, "attends to a text of its own; give `text`"),
        ("minimax-h3", {"text": [torch.zeros(7, 16)] * 6}, "attends to the text of its video; omit `text`"),
        ("minimax-h3", {"latents": [torch.zeros(3, 4)] * 6}, "audio of sample 0 has 3 tokens; those of the left"),
    ],
)
def test_audio_that_does_not_fit_its_pack_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    samples = AudioSamples(name)
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
