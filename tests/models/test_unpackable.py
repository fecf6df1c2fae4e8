"""What keeps some transformers from being packed, measured on small ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import diffusers
import pytest
import torch
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline
from diffusers.pipelines.omnigen.processor_omnigen import OmniGenCollator
from torch.utils._pytree import tree_leaves

from hf_bucketing.models.registry import UNPACKABLE

helios = pytest.importorskip("diffusers.models.transformers.transformer_helios")
refiner = pytest.importorskip("diffusers.models.transformers.transformer_sana_wm_refiner")

Test = TypeVar("Test")
SHOWN: set[str] = set()
"""Classes whose reason a test of this module shows."""


def shows(*classes: str) -> Callable[[Test], Test]:
    """Name the classes whose reason a test shows."""
    SHOWN.update(classes)
    return lambda test: test


def test_each_reason_is_shown_by_a_test() -> None:
    assert UNPACKABLE.keys() == SHOWN


def rows_of_tokens(block: torch.nn.Module) -> list[tuple[int, int]]:
    """Return a list that gets the batch rows and tokens of each call of a block."""
    shapes: list[tuple[int, int]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append((args[0] if args else kwargs["hidden_states"]).shape[:2])

    block.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


def small_helios() -> Any:
    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48}
    return helios.HeliosTransformer3DModel(
        **shape, in_channels=4, out_channels=4, num_layers=2, rope_dim=(4, 4, 4), is_amplify_history=True
    )


def run_helios(model: Any, latents: torch.Tensor, **history: torch.Tensor) -> torch.Tensor:
    """Denoise frames 2 to 4 of rows beside earlier ones."""
    rows, text = len(latents), torch.ones(len(latents), 5, 16)
    times = torch.arange(2, 5)[None].expand(rows, -1)
    return model(latents, torch.full((rows,), 500.0), text, times, **history).sample


@shows("HeliosTransformer3DModel")
@torch.no_grad()
def test_helios_takes_the_earlier_frames_of_all_rows_in_one_length() -> None:
    model, latents = small_helios(), torch.randn(2, 4, 3, 8, 12)
    earlier = {"latents_history_short": torch.randn(1, 4, 2, 8, 12)}
    earlier |= {"indices_latents_history_short": torch.arange(2)[None]}
    alone = run_helios(model, latents[:1])
    assert float((run_helios(model, latents[:1], **earlier) - alone).abs().max()) > 1e-2, "the model attends to them"
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        run_helios(model, latents, **earlier)


@pytest.mark.parametrize(("level", "trained"), [(0.0, False), (1.0, True)])
def test_beside_zeros_the_weights_of_helios_that_read_earlier_frames_get_no_gradient(
    level: float, trained: bool
) -> None:
    model, history = small_helios(), dict[str, torch.Tensor]()
    for name, frames in {"short": 2, "mid": 2, "long": 4}.items():
        history[f"latents_history_{name}"] = level * torch.randn(1, 4, frames, 8, 16)
        history[f"indices_latents_history_{name}"] = torch.arange(frames)[None]
    run_helios(model, torch.randn(1, 4, 3, 8, 16), **history).square().mean().backward()
    readers = model.patch_short, model.patch_mid, model.patch_long
    assert [bool(reader.weight.grad.any()) for reader in readers] == [trained] * 3


CHANNELS = 16
GRID = (2, 2, 3)
"""Frames, rows and columns of the tokens of a batch row."""


def sana_feed_forward(tokens: torch.Tensor) -> torch.Tensor:
    part = diffusers.models.transformers.sana_transformer.GLUMBConv(CHANNELS, CHANNELS)
    return part(tokens.unflatten(1, (4, 3)).movedim(3, 1)).movedim(1, 3).flatten(1, 2)


def sana_video_feed_forward(tokens: torch.Tensor) -> torch.Tensor:
    part = diffusers.models.transformers.transformer_sana_video.GLUMBTempConv(CHANNELS, CHANNELS)
    return part(tokens.unflatten(1, GRID)).flatten(1, 3)


def sana_attention(tokens: torch.Tensor) -> torch.Tensor:
    processor = diffusers.models.attention_processor.SanaLinearAttnProcessor2_0()
    return diffusers.models.attention_processor.Attention(CHANNELS, dim_head=4, heads=4, processor=processor)(tokens)


def sana_wm_feed_forward(tokens: torch.Tensor) -> torch.Tensor:
    return diffusers.models.transformers.transformer_sana_wm.GLUMBConvTemp(CHANNELS, CHANNELS)(tokens, HW=GRID)


def nucleus_experts(tokens: torch.Tensor) -> torch.Tensor:
    moe = diffusers.models.transformers.transformer_nucleusmoe_image
    part = moe.NucleusMoELayer(CHANNELS, CHANNELS, 4, capacity_factor=1.0, use_sigmoid=False, route_scale=1.0)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter)
    return part(tokens, tokens, timestep=torch.ones(1, CHANNELS))


def wan_feed_forward(tokens: torch.Tensor) -> torch.Tensor:
    return diffusers.models.attention.FeedForward(CHANNELS, activation_fn="gelu-approximate")(tokens)


@shows(
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "SanaWMTransformer3DModel",
    "NucleusMoEImageTransformer2DModel",
)
@pytest.mark.parametrize(("part", "meet"), [
    (sana_feed_forward, True), (sana_video_feed_forward, True), (sana_attention, True), (sana_wm_feed_forward, True),
    (nucleus_experts, True), (wan_feed_forward, False),
])  # fmt: skip
@torch.no_grad()
def test_tokens_of_a_batch_row_meet_in_more_than_softmax_attention(part: Callable[..., Any], meet: bool) -> None:
    outputs = []
    for last in (0.0, 30.0):
        torch.manual_seed(0)
        tokens = torch.randn(1, 12, CHANNELS)
        tokens[:, -1] += last
        outputs.append(part(tokens)[:, :-1])
    assert torch.equal(*outputs) is not meet


def bria_fibo(texts: list[torch.Tensor]) -> torch.Tensor:
    model = diffusers.BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=[4, 2, 2],
        text_encoder_dim=8,
    )
    ids = {"img_ids": torch.zeros(12, 3), "txt_ids": torch.zeros(5, 3)}
    text = torch.ones(1, 5, 16)
    tokens, level = torch.randn(1, 12, 4), torch.tensor([500.0])
    return model(tokens, text, [text[..., :8], *texts], timestep=level, **ids, return_dict=False)[0]


def hidream(texts: list[torch.Tensor]) -> torch.Tensor:
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[8, 8],
        text_emb_dim=8,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[0, 1, 2],
        force_inference_output=True,
    )
    text = torch.ones(1, 5, 8)
    layers = torch.stack([text, *texts, text])
    level, pooled = torch.tensor([500.0]), torch.ones(1, 8)
    return model(torch.randn(1, 4, 8, 8), level, text, layers, pooled, return_dict=False)[0]


@shows("BriaFiboTransformer2DModel", "HiDreamImageTransformer2DModel")
@pytest.mark.parametrize("run", [bria_fibo, hidream])
@torch.no_grad()
def test_a_later_block_reads_a_text_of_its_own(run: Callable[..., Any]) -> None:
    outputs = []
    for level in (0.0, 1.0):
        torch.manual_seed(0)
        outputs.append(run([torch.randn(1, 5, 8) + level]))
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-4


@shows("HunyuanVideoFramepackTransformer3DModel")
@torch.no_grad()
def test_framepack_puts_as_many_earlier_tokens_in_front_of_each_row() -> None:
    torch.manual_seed(0)
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 4),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )
    lengths = rows_of_tokens(model.transformer_blocks[0])
    latents, frames = torch.randn(2, 4, 3, 8, 8), torch.arange(3, 6)
    text = {"encoder_hidden_states": torch.ones(2, 5, 16), "encoder_attention_mask": torch.ones(2, 5)}
    text |= {"pooled_projections": torch.ones(2, 8), "image_embeds": torch.ones(2, 3, 8)}
    earlier = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 4}

    def run(rows: int, **frames_of: int) -> torch.Tensor:
        history: dict[str, Any] = {name: torch.randn(1, 4, count, 8, 8) for name, count in frames_of.items()}
        history |= {f"indices_{name}": torch.arange(count) for name, count in frames_of.items()}
        options = {name: values[:rows] for name, values in text.items()}
        levels = torch.full((rows,), 500.0)
        return model(latents[:rows], levels, indices_latents=frames, guidance=levels, **options, **history).sample

    run(1, **earlier)
    own, clean, halved, quartered = 3 * 16, 2 * 16, 1 * 4, 1 * 1
    assert lengths == [(1, own + clean + halved + quartered)]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        run(2, **earlier)


def joy_image_edit() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.JoyImageEditTransformer3DModel(**JOY_IMAGE)
    return model, {"hidden_states": torch.randn(1, 4, 2, 4, 6)}


def joy_image_edit_plus() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.JoyImageEditPlusTransformer3DModel(**JOY_IMAGE)
    return model, {"hidden_states": torch.randn(1, 12, 4, 1, 2, 2), "shape_list": [[(1, 2, 3), (1, 3, 2)]]}


JOY_IMAGE = {
    "in_channels": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "text_dim": 8,
    "num_layers": 1,
    "rope_dim_list": [4, 2, 2],
}


@shows("JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel")
@pytest.mark.parametrize("make", [joy_image_edit, joy_image_edit_plus])
@torch.no_grad()
def test_no_module_of_joy_image_returns_the_positions_that_its_blocks_get(make: Callable[[], Any]) -> None:
    model, inputs = make()
    outputs: list[torch.Tensor] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, args, output: outputs.extend(tensors_in(output)))
    given: list[torch.Tensor] = []
    take = {"with_kwargs": True}
    model.double_blocks[0].register_forward_pre_hook(lambda _, args, kwargs: given.extend(tensors_in(kwargs)), **take)
    model(timestep=torch.tensor([500.0]), encoder_hidden_states=torch.randn(1, 5, 8), **inputs)
    returned = {output.untyped_storage().data_ptr() for output in outputs}
    unknown = [values for values in given if values.untyped_storage().data_ptr() not in returned]
    assert {values.shape[-2:] for values in unknown} == {(12, 8)}, "the positions of all tokens"


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@shows("Kandinsky6SRTransformer3DModel")
def test_kandinsky_6_super_resolution_chooses_blocks_by_all_keys_of_a_row() -> None:
    sr = pytest.importorskip("diffusers.models.transformers.transformer_kandinsky6_sr")
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 256, 8, generator=generator)
    chosen = []
    for scale in (1.0, -500.0):
        changed = torch.cat([key[:, :, :-64], key[:, :, -64:] * scale], 2)
        mask = sr.nabla_block_mask(query, changed, torch.zeros(4, 4, dtype=torch.bool), thr=0.5)
        count = int(mask.kv_num_blocks[0, 0, 0] + mask.full_kv_num_blocks[0, 0, 0])
        chosen.append({int(block) for block in mask.full_kv_indices[0, 0, 0, :count]})
    assert chosen[0] != chosen[1], "of the first block's queries"


@shows("AnyFlowFARTransformer3DModel")
@torch.no_grad()
def test_any_flow_far_cuts_older_chunks_into_larger_patches_to_which_later_ones_attend() -> None:
    torch.manual_seed(0)
    model = diffusers.AnyFlowFARTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        full_chunk_limit=2,
        rope_max_seq_len=16,
    )
    rows = rows_of_tokens(model.blocks[0])
    latents, text = torch.randn(1, 4, 4, 8, 8), torch.randn(1, 5, 16)

    def run(latents: torch.Tensor) -> torch.Tensor:
        frames = latents.shape[1]
        levels = torch.full((1, frames), 500.0)
        return model(latents, levels, levels, text, [1] * frames).sample

    output = run(latents)
    old, new = 2 * 4, 2 * 16
    assert rows == [(1, old + new)]
    assert output.shape[1] == 2, "only the newer chunks have an output"
    changed = [float((run(latents + by) - output).abs().amax((0, 2, 3, 4))[0]) for by in frames_apart(4)]
    assert [change > 1e-4 for change in changed] == [True, True, True, False], "the mask is causal from chunk to chunk"


def frames_apart(frames: int) -> torch.Tensor:
    """Return changes of one frame each, `(frames, 1, frames, 1, 1, 1)`."""
    return torch.eye(frames).view(frames, 1, frames, 1, 1, 1)


@shows("BriaFibo2Transformer2DModel")
@torch.no_grad()
def test_bria_fibo_2_puts_as_many_tokens_in_front_of_each_row_as_the_longest_text_asks_for() -> None:
    model = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=64,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=8,
        injection_layer_ids=(0,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=6,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=8,
        axes_dims=(16, 8, 8),
        axes_lens=(64, 16, 16),
    )
    rows = rows_of_tokens(model.layers[0])
    latents, levels, texts = torch.randn(2, 4, 4, 6), torch.full((2,), 0.5), torch.randn(2, 2, 8, 8)
    one_is_longer = torch.arange(8) < torch.tensor([[2], [8]])
    model(latents, levels, texts[:, :, :2])
    model(latents, levels, texts, one_is_longer)
    own, fewest, most = 6, 2, 6
    assert rows == [(2, own + fewest), (2, own + most)]


@shows("OmniGenTransformer2DModel")
@torch.no_grad()
def test_words_of_omni_gen_attend_to_words_before_them_alone() -> None:
    torch.manual_seed(0)
    model = diffusers.OmniGenTransformer2DModel(
        in_channels=4,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=2,
        vocab_size=50,
        pad_token_id=0,
        rope_scaling={"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        pos_embed_max_size=8,
        time_step_dim=16,
    )
    collator, words = OmniGenCollator(hidden_size=16), torch.ones(1, 5, dtype=torch.long)
    mask, _ = collator.create_mask(words, [4])
    assert mask[0, :5, :5].equal(torch.ones(5, 5).tril())
    places, latents, ids = collator.create_position(words, [4]), torch.randn(1, 4, 4, 4), torch.arange(1, 6)[None]
    outputs = [
        model(latents, torch.tensor([500.0]), ids, [], {}, attend, places).sample
        for attend in (mask, torch.ones_like(mask))
    ]
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-2, "of the picture"


@shows("SanaWMLTX2RefinerTransformer3DModel")
@torch.no_grad()
def test_the_refiner_of_sana_wm_keeps_earlier_keys_of_all_rows_in_one_tensor() -> None:
    torch.manual_seed(0)
    video = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12}
    model = diffusers.SanaWMLTX2RefinerTransformer3DModel(
        **video,
        **{f"audio_{name}": value for name, value in video.items()},
        cross_attention_dim=24,
        audio_cross_attention_dim=24,
        caption_channels=16,
        num_layers=2,
    )
    latents, text = torch.randn(2, 6, 4), torch.randn(2, 5, 16)

    def positions(rows: int, frame: int) -> Any:
        return model.build_rotary_emb_for_absolute_positions(rows, [frame], 2, 3, torch.device("cpu"), 24.0)

    def run(rows: int, frame: int, **options: Any) -> torch.Tensor:
        levels = torch.full((rows, 6), 500.0)
        return model(latents[:rows], text[:rows], levels, positions(rows, frame), **options).sample

    cache = refiner.SanaWMRefinerKVCache(2)
    run(1, 0, kv_cache=cache, kv_cache_mode="capture_pre_rope")
    cache.sink_pe = positions(1, 0)
    for layer in range(2):
        cache.get(layer).store_sink(*cache.get(layer).get_captured_pre_rope())
    attending = {"kv_cache": cache, "kv_cache_mode": "inject"}
    assert float((run(1, 1, **attending) - run(1, 1)).abs().max()) > 1e-3, "the model attends to them"
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        run(2, 1, **attending)


@shows("AllegroTransformer3DModel")
@torch.no_grad()
def test_the_vae_of_allegro_encodes_nothing_that_does_not_fill_its_tiles() -> None:
    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(32,) * 4, layers_per_block=1, sample_size=160).eval()
    vae.encoder = torch.nn.Sequential(torch.nn.AvgPool3d((4, 8, 8)), torch.nn.Conv3d(3, 8, 1))  # tiling is the point
    pixels = torch.rand(1, 3, 25, 160, 168)
    with pytest.raises(NotImplementedError, match="without tiling"):
        vae.encode(pixels)
    vae.enable_tiling()
    assert vae.kernel == (24, 160, 160)
    latents, beyond = vae.encode(pixels).latent_dist.mode(), pixels.clone()
    beyond[:, :, 24:], beyond[..., 160:] = 0, 0
    assert torch.equal(latents, vae.encode(beyond).latent_dist.mode())
    assert not torch.equal(latents, vae.encode(-pixels).latent_dist.mode())
    short = pixels[:, :, :17, :, :160]
    assert torch.equal(vae.encode(short).latent_dist.mode(), vae.encode(-short).latent_dist.mode())


@shows("AnyFlowTransformer3DModel")
@torch.no_grad()
def test_what_any_flow_predicts_depends_on_the_level_to_which_a_step_leads() -> None:
    torch.manual_seed(0)
    model = diffusers.AnyFlowTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=24,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=16,
    )
    latents, text, levels = torch.randn(1, 2, 4, 4, 6), torch.randn(1, 5, 16), torch.full((1, 2), 500.0)
    here, next_one = (
        model(latents, timestep=levels, r_timestep=levels * share, encoder_hidden_states=text).sample
        for share in (1.0, 0.5)
    )
    assert not torch.allclose(here, next_one)


@shows("ConsisIDTransformer3DModel")
def test_the_call_of_consis_id_takes_embeddings_of_a_face_and_no_component_of_it_makes_them() -> None:
    taken = inspect.signature(ConsisIDPipeline.__call__).parameters
    assert {"id_vit_hidden", "id_cond"} <= taken.keys()
    components = inspect.signature(ConsisIDPipeline.__init__).parameters.keys() - {"self"}
    assert components == {"tokenizer", "text_encoder", "vae", "transformer", "scheduler"}


@shows("GlmImageTransformer2DModel")
def test_small_images_of_glm_image_have_another_number_of_tokens_than_of_patches() -> None:
    """A token stands for 2×2 patches of 16 pixels."""
    processing = pytest.importorskip("transformers.models.glm_image.image_processing_pil_glm_image")
    for (height, width), fits in {(1024, 768): True, (512, 512): True, (256, 320): False}.items():
        sides = processing.smart_resize(height, width, factor=16, min_pixels=512**2, max_pixels=2048**2)
        assert (sides == (height // 2, width // 2)) is fits
