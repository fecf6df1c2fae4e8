"""Transformers' weights in single files: diffusers' converters of names inverted, and files as ComfyUI writes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import single_file_utils
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]

_QKV = ("to_q", "to_k", "to_v")

ORIGINAL_NAMES: dict[str, list[tuple[str, str]]] = {
    "wan": [
        (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
        (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
        (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
        (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
        (r"^condition_embedder\.time_proj", "time_projection.1"),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_out\.0\.", ".o."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"\.ffn\.net\.0\.proj", ".ffn.0"),
        (r"\.ffn\.net\.2", ".ffn.2"),
        (r"\.norm2\.", ".norm3."),
        (r"^scale_shift_table", "head.modulation"),
        (r"\.scale_shift_table", ".modulation"),
        (r"^proj_out", "head.head"),
    ],
    "ltx2": [
        (r"^(audio_)?proj_in", r"\1patchify_proj"),
        (r"^(audio_)?time_embed\.", r"\1adaln_single."),
        (r"^av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
        (r"^av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
        (r"^av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
        (r"^av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
        (r"(video|audio)_a2v_cross_attn_scale_shift_table", r"scale_shift_table_a2v_ca_\1"),
        (r"norm_([qk])\.", r"\1_norm."),
    ],
    "qwen-image": [],
    "flux2": [
        (r"^x_embedder", "img_in"),
        (r"^context_embedder", "txt_in"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^time_guidance_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (r"^time_guidance_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"),
        (r"^proj_out", "final_layer.linear"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
        (r"^transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
        (r"^transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
        (
            r"^transformer_blocks\.(\d+)\.attn\.norm_added_q\.weight",
            r"double_blocks.\1.txt_attn.norm.query_norm.scale",
        ),
        (r"^transformer_blocks\.(\d+)\.attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
        (r"^transformer_blocks\.(\d+)\.attn\.to_qkv\.", r"double_blocks.\1.img_attn.qkv."),
        (r"^transformer_blocks\.(\d+)\.attn\.add_qkv_proj", r"double_blocks.\1.txt_attn.qkv"),
        (r"^transformer_blocks\.(\d+)\.ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
        (r"^transformer_blocks\.(\d+)\.ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
        (r"^transformer_blocks\.(\d+)\.ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
        (r"^transformer_blocks\.(\d+)\.ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
    ],
    "z-image": [
        (r"^all_final_layer\.2-1\.", "final_layer."),
        (r"^all_x_embedder\.2-1\.", "x_embedder."),
        (r"\.attention\.to_out\.0\.", ".attention.out."),
        (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
        (r"\.attention\.to_qkv\.", ".attention.qkv."),
    ],
}
"""Names in diffusers, and what the original checkpoint calls them, as expressions to replace in turn."""

VAE_NAMES: dict[str, list[tuple[str, Any]]] = {
    "AutoencoderKLWan": [
        (r"^quant_conv", "conv1"),
        (r"^post_quant_conv", "conv2"),
        (r"\.conv_in\.", ".conv1."),
        (r"\.norm_out\.", ".head.0."),
        (r"\.conv_out\.", ".head.2."),
        (r"\.mid_block\.attentions\.0\.", ".middle.1."),
        (r"\.mid_block\.resnets\.([01])\.", lambda found: f".middle.{2 * int(found[1])}."),
        (r"\.up_blocks\.(\d)\.resnets\.(\d)\.", lambda found: f".upsamples.{4 * int(found[1]) + int(found[2])}."),
        (r"\.up_blocks\.(\d)\.upsamplers\.0\.", lambda found: f".upsamples.{4 * int(found[1]) + 3}."),
        (r"\.down_blocks\.", ".downsamples."),
        (r"\.conv_shortcut\.", ".shortcut."),
        (r"(middle|samples)\.(\d+)\.norm1\.", r"\1.\2.residual.0."),
        (r"(middle|samples)\.(\d+)\.conv1\.", r"\1.\2.residual.2."),
        (r"(middle|samples)\.(\d+)\.norm2\.", r"\1.\2.residual.3."),
        (r"(middle|samples)\.(\d+)\.conv2\.", r"\1.\2.residual.6."),
    ],
    "AutoencoderKLLTXVideo": [
        (r"^latents_mean", "per_channel_statistics.mean-of-means"),
        (r"^latents_std", "per_channel_statistics.std-of-means"),
        (r"\.down_blocks\.(\d)\.downsamplers\.0\.", lambda found: f".down_{3 * int(found[1]) + 1}."),
        (r"\.down_blocks\.(\d)\.", lambda found: f".down_{min(3 * int(found[1]), 8)}."),
        (r"\.up_blocks\.(\d)\.upsamplers\.0\.", lambda found: f".up_{3 * int(found[1]) - 1}."),
        (r"\.up_blocks\.(\d)\.", lambda found: f".up_{max(3 * int(found[1]), 1)}."),
        (r"\.(up|down)_(\d)\.", r".\1_blocks.\2."),
        (r"^encoder\.mid_block\.", "encoder.down_blocks.9."),
        (r"^decoder\.mid_block\.", "decoder.up_blocks.0."),
        (r"\.resnets\.", ".res_blocks."),
    ],
    "AutoencoderKLLTX2Video": [
        (r"^latents_mean", "per_channel_statistics.mean-of-means"),
        (r"^latents_std", "per_channel_statistics.std-of-means"),
        (r"\.down_blocks\.(\d)\.downsamplers\.0\.", lambda found: f".down_{2 * int(found[1]) + 1}."),
        (r"\.down_blocks\.(\d)\.", lambda found: f".down_{2 * int(found[1])}."),
        (r"\.up_blocks\.(\d)\.upsamplers\.0\.", lambda found: f".up_{2 * int(found[1]) + 1}."),
        (r"\.up_blocks\.(\d)\.", lambda found: f".up_{2 * int(found[1]) + 2}."),
        (r"\.(up|down)_(\d)\.", r".\1_blocks.\2."),
        (r"^encoder\.mid_block\.", "encoder.down_blocks.8."),
        (r"^decoder\.mid_block\.", "decoder.up_blocks.0."),
        (r"\.resnets\.", ".res_blocks."),
    ],
    "AutoencoderKL": [
        (r"\.down_blocks\.(\d)\.resnets\.", r".down.\1.block."),
        (r"\.down_blocks\.(\d)\.downsamplers\.0\.", r".down.\1.downsample."),
        (r"\.up_blocks\.(\d)\.resnets\.", lambda found: f".up.{3 - int(found[1])}.block."),
        (r"\.up_blocks\.(\d)\.upsamplers\.0\.", lambda found: f".up.{3 - int(found[1])}.upsample."),
        (r"\.mid_block\.resnets\.(\d)\.", lambda found: f".mid.block_{int(found[1]) + 1}."),
        (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
        (r"\.group_norm\.", ".norm."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"\.to_out\.0\.", ".proj_out."),
        (r"\.conv_norm_out\.", ".norm_out."),
        (r"\.conv_shortcut\.", ".nin_shortcut."),
    ],
}
"""The same of VAEs, by their class."""

_FUSED = {
    "flux2": {"to_qkv": _QKV, "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")},
    "z-image": {"to_qkv": _QKV},
}
"""Layers that the original checkpoint fuses, and their parts in diffusers."""

PREFIX = "model.diffusion_model."


def weights_of(folder: Path, component: str = "transformer") -> State:
    """Return the weights of a transformer of a pipeline in a folder."""
    (file,) = (folder / component).glob("*.safetensors")
    return load_file(file)


def original_state(family: str, state: Mapping[str, torch.Tensor]) -> State:
    """Return weights by the names and in the order of rows that the original checkpoint has."""
    state = dict(state)
    for fused, (first, *others) in _FUSED.get(family, {}).items():
        for name in [name for name in state if f".{first}." in name]:
            parts = [state.pop(name), *(state.pop(name.replace(first, other)) for other in others)]
            state[name.replace(first, fused)] = torch.cat(parts)
    named = {}
    for name, value in state.items():
        if family == "flux2" and name == "norm_out.linear.weight":
            value = torch.cat(value.chunk(2)[::-1])  # the original has shift before scale
        for pattern, original in ORIGINAL_NAMES[family]:
            name = re.sub(pattern, original, name)
        named[name] = value
    return named


def original_vae_state(kind: str, state: Mapping[str, torch.Tensor]) -> State:
    """Return the weights of a VAE of a class by the names that the original checkpoint has."""
    named = {}
    for name, value in state.items():
        for pattern, original in VAE_NAMES[kind]:
            name = re.sub(pattern, original, name)
        named[name] = value[..., None, None] if re.search(r"attn_1\.\w+\.weight", name) and value.ndim == 2 else value
    return named


def write_file(file: Path, state: Mapping[str, torch.Tensor], *, prefix: str = PREFIX) -> Path:
    """Write a file of safetensors, and return it."""
    save_file({prefix + name: value.clone().contiguous() for name, value in state.items()}, file)
    return file


def matrices(state: Mapping[str, torch.Tensor], pick: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the names of the weights of linear layers, as people quantise them."""
    return [name for name, value in state.items() if value.ndim == 2 and name.endswith(".weight") and pick(name)]


def scaled_float8(
    state: Mapping[str, torch.Tensor], names: list[str], *, scale: str = "scale_weight", per_row: bool = False
) -> tuple[State, State]:
    """Return weights as ComfyUI writes scaled float8, and what they are when they are dequantised in float32."""
    quantized, dequantized = dict(state), dict(state)
    for name in names:
        value = state[name].float()
        largest = value.abs().amax(dim=1, keepdim=True) if per_row else value.abs().amax()
        factor = (largest / 448).clamp(min=1e-12)
        stored = (value / factor).to(torch.float8_e4m3fn)
        quantized[name], quantized[name.removesuffix("weight") + scale] = stored, factor
        dequantized[name] = stored.float() * factor
    return quantized, dequantized


def write_gguf(
    file: Path, state: Mapping[str, torch.Tensor], kinds: Mapping[str, str], *, packed: Mapping[str, Any] | None = None
) -> Path:
    """Write a GGUF file, of the types that `kinds` names, others in float32, and return it.

    `packed` has the bytes of weights that are quantised already.
    """
    import gguf

    writer = gguf.GGUFWriter(str(file), "any")
    for name, value in state.items():
        numbers: Any = value.float().numpy()
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        stored = packed[name] if packed and name in packed else gguf.quants.quantize(numbers, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


LARGE = {
    "flux": ("FluxTransformer2DModel", "double_blocks.0.img_attn.qkv.weight"),
    "hunyuan-video": ("HunyuanVideoTransformer3DModel", "single_blocks.0.linear1.weight"),
}
"""Transformers whose converters know their width, and a layer of the original checkpoint, by families."""

_FLUX = [
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(double_blocks\.\d+)\.norm1\.linear", r"\1.img_mod.lin"),
    (r"^(double_blocks\.\d+)\.norm1_context\.linear", r"\1.txt_mod.lin"),
    (r"\.attn\.to_qkv\.", ".img_attn.qkv."),
    (r"\.attn\.add_qkv_proj\.", ".txt_attn.qkv."),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
    (r"^(double_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.img_attn.norm.query_norm.scale"),
    (r"^(double_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.img_attn.norm.key_norm.scale"),
    (r"^(single_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"^(single_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
    (r"\.ff\.net\.2\.", ".img_mlp.2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    (r"^(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.lin"),
    (r"^(single_blocks\.\d+)\.attn\.to_qkv_mlp\.", r"\1.linear1."),
    (r"^(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
]

_HUNYUAN_REFINER = [
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.", "txt_in.individual_token_refiner.blocks."),
    (r"^(txt_in.*)\.norm_out\.linear\.", r"\1.adaLN_modulation.1."),
    (r"^(txt_in.*)\.attn\.to_qkv\.", r"\1.self_attn_qkv."),
    (r"^(txt_in.*)\.attn\.to_out\.0\.", r"\1.self_attn_proj."),
    (r"^(txt_in.*)\.ff\.net\.0\.proj\.", r"\1.mlp.fc1."),
    (r"^(txt_in.*)\.ff\.net\.2\.", r"\1.mlp.fc2."),
    (r"^(txt_in.c_embedder\.linear)_([12])", r"\1_\2"),
]

_HUNYUAN = [
    *_HUNYUAN_REFINER,
    (r"^x_embedder", "img_in"),
    (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
    (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
    (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
    (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
    (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
    (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(double_blocks\.\d+)\.norm1\.linear", r"\1.img_mod.linear"),
    (r"^(double_blocks\.\d+)\.norm1_context\.linear", r"\1.txt_mod.linear"),
    (r"^(double_blocks.*)\.attn\.to_qkv\.", r"\1.img_attn_qkv."),
    (r"\.attn\.add_qkv_proj\.", ".txt_attn_qkv."),
    (r"\.attn\.norm_added_([qk])\.", r".txt_attn_\1_norm."),
    (r"^(double_blocks\.\d+)\.attn\.norm_([qk])\.", r"\1.img_attn_\2_norm."),
    (r"^(single_blocks\.\d+)\.attn\.norm_([qk])\.", r"\1.\2_norm."),
    (r"\.attn\.to_out\.0\.", ".img_attn_proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn_proj."),
    (r"^(double_blocks.*)\.ff\.net\.0\.proj\.", r"\1.img_mlp.fc1."),
    (r"^(double_blocks.*)\.ff\.net\.2\.", r"\1.img_mlp.fc2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.fc1."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.fc2."),
    (r"^(single_blocks\.\d+)\.norm\.linear", r"\1.modulation.linear"),
    (r"^(single_blocks\.\d+)\.attn\.to_qkv_mlp\.", r"\1.linear1."),
    (r"^(single_blocks\.\d+)\.proj_out", r"\1.linear2"),
]


def original_large_state(kind: str, state: Mapping[str, torch.Tensor]) -> State:
    """Return the weights of such a transformer by the names and in the order of rows of the original checkpoint."""
    state = dict(state)
    fused = {
        r"(?<!single_)transformer_blocks.*\.attn\.": {
            "to_qkv": _QKV,
            "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
        },
        r"refiner_blocks.*\.attn\.": {"to_qkv": _QKV},
        r"^single_transformer_blocks.*\.attn\.": {"to_qkv_mlp": _QKV},
    }
    for pattern, layers in fused.items():
        for name, (first, *others) in layers.items():
            for part in [part for part in state if re.search(pattern, part) and f".{first}." in part]:
                parts = [part, *(part.replace(first, other) for other in others)]
                parts += [part.replace("attn.to_q", "proj_mlp")] if name == "to_qkv_mlp" else []
                state[part.replace(first, name)] = torch.cat([state.pop(each) for each in parts])
    named = {}
    for name, value in state.items():
        if name.startswith("norm_out.linear"):
            value = torch.cat(value.chunk(2)[::-1])  # the original has shift before scale
        for pattern, original in _FLUX if kind.startswith("Flux") else _HUNYUAN:
            name = re.sub(pattern, original, name)
        named[name] = value
    return named


def converter_of_width(kind: str, width: int) -> Callable[..., State]:
    """Return diffusers' converter of such a transformer with another width in place of its constant of 3,072."""
    converter = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    source, names = inspect.getsource(converter), dict(vars(single_file_utils))
    assert "3072" in source
    exec(source.replace("3072", str(width)), names)
    made: Callable[..., State] = names[converter.__name__]
    return made
