"""References in packs, compared with what the stock pipelines' own calls give."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline
from peft import LoraConfig
from PIL import Image

from hf_bucketing import BucketingError, PackingError, Size
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.families.flux2 import FAMILY, KV_FAMILY, Flux2Recipe
from hf_bucketing.models.families.ltx import SCALES
from hf_bucketing.models.families.qwen_image_21 import SLOT
from hf_bucketing.models.first_frame import pictures
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import family_of, recipe_of, recipes
from hf_bucketing.models.samples import REFERENCES
from hf_bucketing.packing import Packing, TokenDrop
from hf_bucketing.packing.batch import Rows
from hf_bucketing.packing.family import UNLIMITED
from hf_bucketing.packing.strips import patchify, token_grid, unpatchify
from hf_bucketing.packing.texts import marked_places
from tests.models.cases import FamilyCase, Samples, assert_same_gradients, each_case, gradients, largest_difference
from tests.models.families import CASES as FAMILIES, ltx, qwen_image
from tests.models.families.flux2 import make_flux2
from tests.models.pipeline_calls import (
    RecordedSample,
    Results,
    assert_equal,
    mean_squares,
    packed_outputs,
    record_call,
    results_of_calls,
    results_of_pack,
)
from tests.models.recipe_cases import samples_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A pipeline that takes references.

    Args:
        tiny: Name of its pipeline of small random weights.
        samples: Sizes in pixels of each sample, and of its references.
        options: Arguments of the pipeline's call.
        changes: Changes of the recorded arguments.
        timestep_factor: By what the model's timesteps are multiplied to be those of the scheduler.
        call: Returns the arguments of the transformer's call, given the recipe, the references' pixels and arguments
            of the pipeline's call.
        without_gradient: Parts of the names of parameters, beside those that the family names, whose gradient is zero.
        strip_step: Tokens of which strips are multiples.
        trains_all: Whether also those parameters are trained that samples without references do not reach.
    """

    tiny: str
    samples: tuple[tuple[Size, ...], ...]
    options: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    timestep_factor: float = 1000.0
    call: Callable[..., dict[str, Any]]
    without_gradient: tuple[str, ...] = ()
    strip_step: int = 1
    trains_all: bool = False


def call_of_pipeline(recipe: Recipe, references: Sequence[torch.Tensor], size: Size, **options: Any) -> dict[str, Any]:
    """Record what the pipeline passes to its transformer when it is called with references."""
    frames = [pictures(pixels.transpose(0, 1)) for pixels in references]
    shown = recipe.reference_arguments(frames, size) if references else {}
    return record_call(recipe.pipeline, **recipe.size_arguments(size), **shown, **options)


@torch.no_grad()
def call_of_qwen(
    recipe: Recipe, references: Sequence[torch.Tensor], size: Size, *, prompt: str, **options: Any
) -> dict[str, Any]:
    """Record the call of a Qwen-Image-Edit pipeline, or, as these need a picture, that of Qwen-Image without any."""
    if references:
        with qwen_image.of_small_pictures():
            return call_of_pipeline(recipe, references, size, prompt=prompt, **options)
    components = dict(recipe.pipeline.components)
    text, _ = QwenImageEditPlusPipeline(**components).encode_prompt(prompt)
    del components["processor"]
    pipeline = QwenImagePipeline(**components)
    pipeline.set_progress_bar_config(disable=True)
    return record_call(pipeline, **recipe.size_arguments(size), prompt_embeds=text, **options)


def call_of_trainer(recipe: Recipe, references: Sequence[torch.Tensor], size: Size, **options: Any) -> dict[str, Any]:
    """Add references to what the pipeline passes to its transformer, as LTX-Video's own trainer does."""
    recorded = record_call(recipe.pipeline, **recipe.size_arguments(size), **options)
    grid, fps = recipe.spec.grid(size), options["frame_rate"]
    return ltx.with_references(recipe.pipeline, recorded, references, grid=grid, fps=fps)


def images(*sizes: tuple[int, int]) -> tuple[Size, ...]:
    return tuple(Size(1, height, width) for height, width in sizes)


FLUX2 = Case(
    tiny="flux2",
    samples=(
        images((48, 32)),
        images((32, 64), (64, 80)),
        images((64, 48), (80, 64), (64, 64)),
        images((32, 32), (64, 80), (96, 64), (64, 64)),
        images((32, 80), (64, 64), (80, 64), (64, 96), (80, 80)),
    ),
    options={"max_sequence_length": 16, "guidance_scale": 2.5},
    call=call_of_pipeline,
)
KONTEXT = Case(
    tiny="flux-kontext",
    samples=(images((48, 32)), images((32, 64), (64, 80)), images((64, 64), (32, 48))),
    options=FLUX2.options,
    call=call_of_pipeline,
)
LTX = Case(
    tiny="ltx",
    samples=(
        (Size(5, 32, 64), Size(5, 32, 64)),
        (Size(1, 64, 32),),
        (Size(9, 64, 32), Size(9, 32, 16), Size(1, 32, 16)),
        (Size(5, 32, 96), Size(5, 16, 48), Size(5, 16, 48), Size(1, 16, 48)),
    ),
    options={"max_sequence_length": 16, "guidance_scale": 1.0},
    timestep_factor=1.0,
    call=call_of_trainer,
)
LTX2 = replace(
    LTX,
    tiny="ltx2-in-context",
    options={
        **LTX.options,
        "stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_guidance_scale": 1.0,
        "audio_stg_scale": 0.0,
        "audio_modality_scale": 1.0,
    },
    changes={"isolate_modalities": True},  # as in the pipeline's further call for guidance by the other modality
    call=call_of_pipeline,
)
QWEN = Case(
    tiny="qwen-image-edit",
    samples=(
        images((48, 32)),
        images((32, 64), (64, 64)),
        images((64, 48), (96, 32)),
        images((32, 80), (32, 128)),
    ),
    options={"true_cfg_scale": 1.0},
    call=call_of_qwen,
    without_gradient=FAMILIES["qwen-image"].without_gradient,
)
QWEN_PLUS = replace(
    QWEN,
    tiny="qwen-image-edit-2509",
    samples=(
        images((48, 32)),
        images((32, 64), (64, 64)),
        images((64, 48), (96, 32), (64, 64)),
        images((32, 32), (32, 128), (128, 32), (64, 64)),
        images((32, 80), (64, 64), (32, 96), (96, 32), (128, 32)),
    ),
)
QWEN_21 = Case(
    tiny="qwen-image-2.1",
    samples=(
        images((64, 32)),
        images((32, 64), (64, 64)),
        images((64, 64), (96, 32)),
        images((64, 32), (32, 128), (128, 32), (64, 64)),
        images((32, 64), (64, 32), (32, 64)),
    ),
    options={"true_cfg_scale": 1.0, "use_kv_cache": False},
    call=call_of_pipeline,
    strip_step=SLOT,
)
FLUX3 = replace(FLUX2, tiny="flux3", options={"max_sequence_length": 80}, trains_all=True)
CASES = {
    case.tiny: case
    for case in (
        FLUX2,
        replace(FLUX2, tiny="flux2-klein", options={"max_sequence_length": 16, "guidance_scale": 1.0}),
        replace(FLUX2, tiny="flux2-klein-kv", options={"max_sequence_length": 16}),
        KONTEXT,
        LTX,
        replace(LTX, tiny="ltx-condition"),
        LTX2,
        QWEN,
        QWEN_PLUS,
        replace(QWEN_PLUS, tiny="qwen-image-edit-2511"),
        QWEN_21,
        FLUX3,
    )
}
ALIKE = ("flux2-klein", "ltx", "qwen-image-edit-2511")
"""Pipelines that pass references as another one does; they run with `-m every`."""
FEW = ("flux-kontext", "ltx-condition", "qwen-image-edit")
"""Pipelines of models that many train; others do not run in `make test`."""
each_pipeline = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=() if name in FEW else pytest.mark.every if name in ALIKE else pytest.mark.slow
        )
        for name, case in CASES.items()
    ],
)


class Recorded(NamedTuple):
    """A recipe in float64, its samples as its pipeline passes them on, and what the stock model makes of them."""

    recipe: Recipe
    samples: list[RecordedSample]
    expected: Results
    without_gradient: tuple[str, ...]

    @property
    def model(self) -> Any:
        return self.recipe.transformer


@pytest.fixture(scope="module")
def recorded_of(tiny_folder: Callable[[str], Path]) -> Callable[[Case], Recorded]:
    """Return the recorded samples of a case; tests leave their model unpacked."""
    return cache(lambda case: record(case, tiny_folder(case.tiny)))


def record(case: Case, folder: Path) -> Recorded:
    recipe = load(folder)
    patch = recipe.family.patch(recipe.transformer.config)
    samples = [record_sample(case, recipe, number) for number in range(len(case.samples))]
    if case.trains_all:
        recipe.transformer.requires_grad_(True)
    unused = () if case.trains_all else recipe.family.unused(recipe.transformer)
    without_gradient = (*unused, *case.without_gradient)
    return Recorded(recipe, samples, results_of_calls(recipe.transformer, samples, patch), without_gradient)


def load(folder: Path) -> Recipe:
    recipe = recipe_of(str(folder)).load(str(folder), max_sequence_length=16)
    recipe.pipeline.to(torch.float64)
    recipe.pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    for parameter in recipe.transformer.parameters():  # some start at zero, where errors would not show
        parameter.data += 0.02 * torch.randn_like(parameter)
    return recipe


def pixels_of(case: Case, number: int) -> list[torch.Tensor]:
    """Draw the references of a sample, `(3, F, h, w)` in [−1, 1], of pixels that 8 bits hold."""
    generator = torch.Generator().manual_seed(number)
    _, *sizes = case.samples[number]
    return [(torch.randint(0, 256, (3, *size), generator=generator) / 255 * 2 - 1).double() for size in sizes]


def record_sample(case: Case, recipe: Recipe, number: int) -> RecordedSample:
    size, references = case.samples[number][0], pixels_of(case, number)
    fps = {} if recipe.family.images_only else {"frame_rate": 8.0 + number}
    options = {**case.options, **fps, "num_inference_steps": 1, "generator": torch.Generator().manual_seed(number)}
    call = {**case.call(recipe, references, size, prompt="red"[number:], **options), **case.changes}
    for name in {"timestep", "sigma"} & call.keys():  # each sample has another
        call[name] = call[name] * (0.95 - 0.2 * number)
    patch, text, mask = recipe.spec.patch, call["encoder_hidden_states"][0], call.get("encoder_attention_mask")
    grids = [recipe.spec.grid(grid_size) for grid_size in case.samples[number]]
    within_text, text_mask = "img_mask" in call, None
    if within_text:
        is_image = call["img_mask"][0, : len(text)]
        text, text_mask = text[~is_image], (1 + is_image.roll(-1).long())[~is_image]
    in_front = sum(map(math.prod, grids[1:])) if within_text else call.get("num_ref_tokens", 0)
    states = [call[name][0] for name in ("hidden_states", "image_cond_hidden_states") if name in call]
    tokens = torch.cat(states).roll(-in_front, 0).unflatten(1, (-1, *patch))
    parts = zip(tokens.split([math.prod(grid) for grid in grids]), grids, strict=True)
    latent, *shown_latents = (unpatchify(part, grid) for part, grid in parts)
    return RecordedSample(
        call=call,
        latent=latent,
        references=shown_latents,
        timestep=call["timestep"].flatten()[0] * case.timestep_factor,
        text=text if mask is None else text[mask[0].bool()],
        conditioning=conditioning_of(recipe, call, fps=options.get("frame_rate", 1.0)),
        text_mask=text_mask,
        own_last=within_text,
    )


def conditioning_of(recipe: Recipe, call: Mapping[str, Any], *, fps: float) -> dict[str, torch.Tensor]:
    names = recipe.family.conditioning(recipe.transformer)
    if SCALES in names:
        return {SCALES: recipe.conditioning(samples_of(recipe, fps=[fps]))[SCALES][0]}
    return {name: torch.tensor(fps) if name == "fps" else call[name][0] for name in names}


@contextmanager
def packed(model: Any, *, strip_length: int = 4) -> Iterator[Packing]:
    packing = enable_packing(model, strip_length=strip_length)
    try:
        yield packing
    finally:
        disable_packing(model)


@pytest.mark.slow
@each_pipeline
def test_references_are_encoded_as_the_pipeline_encodes_them(case: Case, recorded_of) -> None:
    recipe, samples, _, _ = recorded_of(case)
    limit = 1e-6 if case is LTX2 else 1e-11  # LTX-2's pipeline rounds latents to float32
    for number, sample in enumerate(samples):
        references = pixels_of(case, number)
        encoded = recipe.encode_media(torch.zeros(1, 3, 1, 32, 32).double(), {"reference": [references]})
        (latents,) = encoded[REFERENCES]
        assert len(latents) == len(references)
        assert not latents or largest_difference(latents, sample.references) <= limit


@each_pipeline
def test_a_pack_equals_the_calls_of_the_pipeline(case: Case, recorded_of) -> None:
    """Other tests have strips of four tokens."""
    recorded = recorded_of(case)
    for strip_length in (1, 7, 100):
        with packed(recorded.model, strip_length=strip_length * case.strip_step) as packing:
            results = results_of_pack(recorded.model, packing, recorded.samples)
        assert_equal(recorded.expected, results, without_gradient=recorded.without_gradient)


@each_pipeline
def test_stacks_equal_the_calls_of_the_pipeline(case: Case, recorded_of) -> None:
    recipe, samples, (outputs, _), _ = recorded_of(case)
    with torch.no_grad():
        rows = [
            Rows(
                latents=sample.latent[None],
                timesteps=sample.timestep[None],
                text=sample.text[None],
                patch=recipe.spec.patch,
                text_mask=None if sample.text_mask is None else sample.text_mask[None],
                conditioning={name: values[None] for name, values in sample.conditioning.items()},
                references=[latent[None] for latent in sample.references],
            )
            for sample in samples
        ]
        alone = [recipe.family.run(recipe.transformer, row)[0] for row in rows]
    tokens = [patchify(output, recipe.spec.patch).flatten(1) for output in alone]
    assert largest_difference(outputs, tokens) <= 1e-11


@each_pipeline
def test_gradient_checkpointing_keeps_references_where_they_are(case: Case, recorded_of) -> None:
    recorded = recorded_of(case)
    recorded.model.enable_gradient_checkpointing()
    recorded.model.train()
    with packed(recorded.model) as packing:
        results = results_of_pack(recorded.model, packing, recorded.samples)
    recorded.model.disable_gradient_checkpointing()
    recorded.model.eval()
    assert_equal(recorded.expected, results, without_gradient=recorded.without_gradient)


@each_pipeline
def test_a_copied_model_with_adapters_packs_references(case: Case, recorded_of) -> None:
    recipe, samples, _, without_gradient = recorded_of(case)
    model = copy.deepcopy(recipe.transformer)
    targets = ["to_q", "to_v", "to_qkv_mlp_proj"] if isinstance(recipe, Flux2Recipe) else ["to_q", "to_v"]
    model.add_adapter(LoraConfig(target_modules=targets, init_lora_weights=False))
    model.to(torch.float64)
    expected = results_of_calls(model, samples, recipe.spec.patch)
    frozen = tuple(name for name, weights in model.named_parameters() if not weights.requires_grad)
    with packed(model) as packing:
        copied = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        results = results_of_pack(copied, packing, samples)
    assert_equal(expected, results, without_gradient=(*frozen, *without_gradient))


@each_pipeline
def test_two_packs_in_flight_keep_their_own_references(case: Case, recorded_of) -> None:
    recorded = recorded_of(case)
    first, second = recorded.samples[:2], recorded.samples[2:]
    with packed(recorded.model) as packing:
        losses = [mean_squares(packed_outputs(recorded.model, packing, samples)) for samples in (first, second)]
        results = gradients(recorded.model, *losses)
    assert_same_gradients(recorded.expected.gradients, results, 1e-6, without_gradient=recorded.without_gradient)


@each_pipeline
@pytest.mark.parametrize("mode", ["random", "tube"])
def test_token_drop_keeps_all_tokens_of_references(case: Case, mode: str, recorded_of) -> None:
    recorded = recorded_of(case)
    patch, seeds, drop = recorded.recipe.spec.patch, list(range(len(recorded.samples))), TokenDrop(rate=0.5, mode=mode)
    grids = [token_grid(sample.latent, patch, sample=0) for sample in recorded.samples]
    kept = [torch.from_numpy(tokens) for tokens in drop.kept(grids, seeds=seeds)]
    recorded.model.train()
    with packed(recorded.model) as packing, torch.no_grad():
        outputs = packed_outputs(recorded.model, packing, recorded.samples, token_drop=drop, seeds=seeds)
    recorded.model.eval()
    for output, tokens, grid, sample in zip(outputs, kept, grids, recorded.samples, strict=True):
        own = math.prod(grid)
        assert len(tokens) < own
        shown = torch.arange(own, sample.call["hidden_states"].shape[1])
        call_chosen = call_of_sequence if sample.own_last else call_with
        with torch.no_grad():
            expected = call_chosen(recorded.model, sample.call, torch.cat([tokens, shown]), own=len(tokens))
        assert largest_difference([output[tokens]], [expected]) <= 1e-11
        assert not output[[token for token in range(own) if token not in tokens]].any()


def call_with(model: Any, call: Mapping[str, Any], tokens: torch.Tensor, *, own: int) -> torch.Tensor:
    """Call the stock model with these tokens alone, and return the output of the sample's own, which are the first."""
    if in_front := call.get("num_ref_tokens", 0):
        tokens = ((tokens + in_front) % call["hidden_states"].shape[1]).roll(in_front)
    axes = {"hidden_states": 1, "img_ids": -2, "video_coords": 2}
    if call["timestep"].ndim == 2:
        axes["timestep"] = 1
    chosen = {name: call[name].index_select(axis, tokens) for name, axis in axes.items() if name in call}
    with ExitStack() as stack:
        if shapes := call.get("img_shapes"):
            length = call["encoder_hidden_states"].shape[1]
            positions, of_text = model.pos_embed(shapes, max_txt_seq_len=length, device=tokens.device)
            tables = (positions[tokens], of_text)
            stack.enter_context(mock.patch.object(model.pos_embed, "forward", return_value=tables))
            chosen["img_shapes"] = [[(1, 1, own), (1, 1, len(tokens) - own)]]
        return model(**{**call, **chosen, "return_dict": False})[0][0, :own]


def call_of_sequence(model: Any, call: Mapping[str, Any], tokens: torch.Tensor, *, own: int) -> torch.Tensor:
    """Do as `call_with` for a model whose sequence has the sample's own tokens behind text and references."""
    ((*shown, grid),), mask = call["img_shapes"], call["img_mask"]
    dropped = math.prod(grid) - own
    in_sequence = mask[0].repeat_interleave(torch.where(mask[0], 4, 1))
    table = model.pos_embed([*shown, grid], in_sequence, device=tokens.device)
    before = len(table) - math.prod(grid)
    table = torch.cat([table[:before], table[before:][tokens[:own]]])
    states = call["hidden_states"]
    in_front = states.shape[1] - math.prod(grid)
    chosen = {
        "hidden_states": torch.cat([states[:, :in_front], states[:, in_front:][:, tokens[:own]]], 1),
        "img_shapes": [[*shown, (1, 1, own)]],
        "img_mask": mask[:, : mask.shape[1] - dropped // 4],
    }
    with mock.patch.object(model.pos_embed, "forward", return_value=table):
        return model(**{**call, **chosen, "return_dict": False})[0][0, -own:]


RENDERED = [case for case in CASES.values() if case.call is call_of_pipeline]


@pytest.mark.slow
@pytest.mark.parametrize("case", RENDERED, ids=[case.tiny for case in RENDERED])
def test_renderings_see_their_references(case: Case, tiny_folder: Callable[[str], Path]) -> None:
    recipe = load(tiny_folder(case.tiny))
    size, *_ = case.samples[0]
    options = {**case.options, "num_inference_steps": 1}
    rendered = [
        recipe.render("red", size, references=shown, generator=torch.Generator().manual_seed(0), **options)
        for shown in ([[Image.new("RGB", (64, 64), color)]] if color else [] for color in ("white", "black", None))
    ]
    assert all(frames.shape[-3:] == (size.height, size.width, 3) for frames in rendered)
    assert all(np.abs(frames - rendered[0]).max() > 1e-4 for frames in rendered[1:])


def test_calls_refuse_references_that_the_pipeline_does_not_take() -> None:
    picture, size = [Image.new("RGB", (64, 32))], Size(1, 64, 128)
    kontext, ltx_video, in_context = (
        object.__new__(recipes()[f"{name}Pipeline"]) for name in ("FluxKontext", "LTX", "LTX2InContext")
    )
    with pytest.raises(BucketingError, match="FluxKontextPipeline takes at most 1 references, got 2"):
        kontext.reference_arguments([picture] * 2, size)
    with pytest.raises(BucketingError, match="LTXPipeline takes no references, got 1"):
        ltx_video.reference_arguments([picture], size)
    arguments = in_context.reference_arguments([picture] * 2, size)
    flux2 = object.__new__(recipes()["Flux2Pipeline"])
    for shape, fault in {(63, 80): "at least 64", (64, 528): "up to 8 to 1"}.items():
        with pytest.raises(BucketingError, match=f"Reference 1 is shown to a Flux2Pipeline at .* {fault}"):
            flux2.reference_arguments([[Image.new("RGB", (64, 512))], [Image.new("RGB", shape)]], size)
    assert arguments["reference_downscale_factor"] == 2
    assert [condition.frames for condition in arguments["reference_conditions"]] == [picture] * 2
    with pytest.raises(BucketingError, match="takes references of one size"):
        in_context.reference_arguments([picture, [Image.new("RGB", (128, 64))]], size)


@pytest.mark.parametrize(("name", "reason"), [
    ("ZImageOmniPipeline", "what SigLIP sees"),
])  # fmt: skip
def test_pipelines_with_other_references_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(BucketingError, match=f"{name}, which cannot be trained: .*{reason}"):
        recipe_of(str(tmp_path))


def test_qwen_image_21_refuses_texts_that_were_made_without_the_references_of_their_samples(tiny_folder) -> None:
    recipe = load(tiny_folder("qwen-image-2.1"))
    samples = samples_of(recipe, fps=[1.0])
    recipe.model_inputs(samples)
    shown = replace(samples, conditions={REFERENCES: [(torch.zeros(4, 1, 2, 2),)]})
    with pytest.raises(BucketingError, match=r"made with \[0\] references, where samples have \[1\]"):
        recipe.model_inputs(shown)
    with pytest.raises(PackingError, match="text of sample 1 was made with 2 references, and the sample has 1"):
        recipe.family.reference_places([[], [(1, 2, 2)]], torch.tensor([[1, 1, 1], [2, 2, 1]]))
    assert marked_places(recipe.blank_text_mask((2, 5), [1, 2])) == [(1,), (1, 2)]
    assert recipe.encoder_pictures([Size(1, 64, 96), Size(1, 32, 32)]) == 2 * 8 + 6 + 1


def test_klein_kv_is_told_by_its_processors_and_embeds_no_guidance(tiny_folder: Callable[[str], Path]) -> None:
    recipe = load(tiny_folder("flux2-klein-kv"))
    assert family_of(recipe.transformer) is recipe.family is KV_FAMILY
    assert family_of(load(tiny_folder("flux2-klein")).transformer) is FAMILY
    guided = make_flux2(guidance_embeds=True)
    guided.set_attn_processor(recipe.transformer.attn_processors)
    with pytest.raises(PackingError, match="passes no guidance"):
        enable_packing(guided)


@each_case(FAMILIES)
def test_families_refuse_more_references_than_they_take_by_name(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    most = packing.family.max_references
    references = [[latent] * min(most + 1, 4) for latent in samples.latents]
    if most == UNLIMITED:
        layout = samples.pack(packing, references=references).layout
        assert layout.shown == tuple((grid,) * 4 for grid in layout.grids)
        return
    takes = "none" if most == 0 else f"at most {most}"
    with pytest.raises(
        PackingError, match=f"Sample 0 has {most + 1} references, but {type(model).__name__} takes {takes}"
    ):
        samples.pack(packing, references=references)
