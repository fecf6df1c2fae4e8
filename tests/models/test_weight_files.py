"""Transformers whose weights lie in one file equal those of a pipeline's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from hf_bucketing import BucketingError
from hf_bucketing.caching.encoders import describe_encoders, differences
from hf_bucketing.caching.fingerprints import latents_fingerprint
from hf_bucketing.models import weight_files
from hf_bucketing.models.loading import Loading, empty_transformer
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.weight_files import TransformerFile, read_weights_of
from tests.models.weight_file_cases import (
    LARGE,
    ORIGINAL_NAMES,
    PREFIX,
    converter_of_width,
    matrices,
    original_large_state,
    original_state,
    original_vae_state,
    scaled_float8,
    weights_of,
    write_file,
    write_gguf,
)


def load(folder: Path, file: Path | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
    loading = Loading(
        parts=("trained",),
        trained_dtype=dtype,
        transformer_file=None if file is None else TransformerFile(path=str(file)),
    )
    return recipe_of(str(folder)).load(str(folder), loading=loading).transformer


def assert_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    one, two = model.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype, name
        torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=name)


def configurations_of(folder: Path, target: Path) -> Path:
    """Return a copy of a pipeline without the weights of its transformer."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("diffusion_pytorch_model*"))
    return target


@pytest.mark.parametrize("family", ORIGINAL_NAMES)
def test_a_file_of_original_names_equals_the_folder(
    family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder(family)
    without = configurations_of(folder, tmp_path / "configs")
    file = write_file(tmp_path / "model.safetensors", original_state(family, weights_of(folder)))
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(load(without, file, dtype=dtype), load(folder, dtype=dtype))


VAES = {"wan": "", "ltx": "vae.", "ltx2": "vae.", "z-image": "first_stage_model."}
"""Families of which diffusers reads the VAE from a file, and what stands before its names in some."""


def pipeline_with_vae(family: str, folder: Path, target: Path) -> Path:
    """Return a copy of a pipeline with a VAE whose layers a file of original names can tell."""
    shutil.copytree(folder, target)
    if family == "wan":  # whose converter knows how many layers a block has, and where its width changes
        vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=2)
        vae.save_pretrained(target / "vae")
    return target


@pytest.mark.parametrize("family", VAES)
def test_a_vae_of_a_file_equals_that_of_the_folder_and_makes_the_same_cache(
    family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = pipeline_with_vae(family, tiny_folder(family), tmp_path / "pipeline")
    whole = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=("vae",)))
    named = original_vae_state(type(whole.pipeline.vae).__name__, whole.pipeline.vae.state_dict())
    assert not named.keys() & {
        "decoder.mid_block.resnets.0.conv1.weight",
        "decoder.mid_block.resnets.0.conv1.conv.bias",
    }
    without = tmp_path / "configs"
    shutil.copytree(folder, without)
    for weights in (without / "vae").glob("*.safetensors"):
        weights.unlink()
    others = {"model.diffusion_model.x": torch.zeros(2)} if VAES[family] else {}
    for number, prefix in enumerate(("", VAES[family])):
        state = {prefix + name: value for name, value in named.items()} | (others if prefix else {})
        file = write_file(tmp_path / f"{number}.safetensors", state, prefix="")
        loading = Loading(parts=("vae",), vae_file=str(file))
        of_file = recipe_of(str(folder)).load(str(without), loading=loading)
        assert_equal(of_file.pipeline.vae, whole.pipeline.vae)
        assert not any(weight.requires_grad for weight in of_file.pipeline.vae.parameters())
        assert latents_fingerprint(of_file) == latents_fingerprint(whole)
        assert differences(describe_encoders(whole), describe_encoders(of_file), texts=True) == []
        changed = write_file(
            tmp_path / "changed.safetensors", {name: value + 1 for name, value in state.items()}, prefix=""
        )
        other = recipe_of(str(folder)).load(str(without), loading=Loading(parts=(), vae_file=str(changed)))
        assert differences(describe_encoders(whole), describe_encoders(other), texts=True) == [
            "its vae had other weights"
        ]


def test_a_file_that_holds_no_such_vae_is_refused_by_name(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("z-image")
    file = write_file(tmp_path / "vae.safetensors", {"encoder.conv_in.weight": torch.zeros(2)}, prefix="")
    loading = Loading(parts=("vae",), vae_file=str(file))
    with pytest.raises(BucketingError, match=r"vae.safetensors does not fit the AutoencoderKL .*another `vae_file`"):
        recipe_of(str(folder)).load(str(folder), loading=loading)
    for named, message in (
        ("vae.gguf", "`vae_file` must be a file of .safetensors, got"),
        ("no.safetensors", "no file"),
    ):
        with pytest.raises(BucketingError, match=message):
            recipe_of(str(folder)).load(str(folder), loading=Loading(parts=("vae",), vae_file=str(tmp_path / named)))
    folder = tiny_folder("qwen-image")
    with pytest.raises(BucketingError, match=r"Omit `vae_file`: diffusers reads no AutoencoderKLQwenImage from one"):
        recipe_of(str(folder)).load(str(folder), loading=loading)


def test_the_file_is_that_of_the_transformer_which_is_trained(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("wan-2.2-i2v")
    state = {name: value + 1 for name, value in weights_of(folder, "transformer_2").items()}
    file = write_file(tmp_path / "low.safetensors", original_state("wan", state))
    loading = Loading(transformer_file=TransformerFile(path=str(file), component="transformer_2"))
    recipe = recipe_of(str(folder)).load(str(folder), trained="transformer_2", loading=loading)
    assert all(torch.equal(value, state[name]) for name, value in recipe.transformer.state_dict().items())
    whole = load(folder)
    assert_equal(recipe.pipeline.transformer, whole)


def test_a_modular_pipeline_takes_a_file(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("flux3")
    without = configurations_of(folder, tmp_path / "configs")
    file = write_file(tmp_path / "model.safetensors", weights_of(folder))
    assert_equal(load(without, file), load(folder))


@pytest.mark.parametrize("prefix", ["", PREFIX, "diffusion_model."])
def test_prefixes_and_diffusers_own_names_are_read(prefix: str, pipeline_dir: Path, tmp_path: Path) -> None:
    state, whole = weights_of(pipeline_dir), load(pipeline_dir)
    for number, named in enumerate((state, original_state("wan", state))):  # norm2 and norm3 swap between them
        file = write_file(tmp_path / f"{number}.safetensors", named, prefix=prefix)
        assert_equal(load(pipeline_dir, file), whole)


def test_a_checkpoint_of_a_whole_pipeline_gives_its_transformer(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("ltx2")
    named = original_state("ltx2", weights_of(folder))
    state = {PREFIX + name: value for name, value in named.items()} | {
        "vae.encoder.conv_in.weight": torch.zeros(3),
        "text_embedding_projection.weight": torch.zeros(2, 2),
        f"{PREFIX}video_embeddings_connector.learnable_registers": torch.zeros(2, 2),
    }
    assert_equal(load(folder, write_file(tmp_path / "all.safetensors", state, prefix="")), load(folder))


@pytest.mark.parametrize("scale", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("per_row", [False, True], ids=["one scale", "a scale per row"])
@pytest.mark.parametrize("family", ["wan", "z-image"])
def test_scaled_float8_equals_the_dequantised_weights(
    family: str, scale: str, per_row: bool, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder(family)
    state = original_state(family, weights_of(folder))  # z-image's has fused layers
    names = matrices(state, lambda name: "layers." in name or "blocks." in name)
    quantized, dequantized = scaled_float8(state, names, scale=scale, per_row=per_row)
    ends = {"scale_input": torch.ones(())} if scale == "scale_weight" else {"input_scale": torch.ones(())}
    of_layer = {f"{name.removesuffix('weight')}{end}": value for name in names for end, value in ends.items()}
    if scale == "weight_scale":
        told = torch.frombuffer(bytearray(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
        of_layer |= {f"{name.removesuffix('weight')}comfy_quant": told.clone() for name in names}
    marked = quantized | of_layer | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    file = write_file(tmp_path / "float8.safetensors", marked)
    plain = write_file(tmp_path / "plain.safetensors", dequantized)
    assert any(value.dtype == torch.float8_e4m3fn for value in quantized.values())
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(load(folder, file, dtype=dtype), load(folder, plain, dtype=dtype))
    assert read_weights_of(str(file), empty_transformer(str(folder), "transformer")).float8


def test_plain_float8_equals_its_numbers(pipeline_dir: Path, tmp_path: Path) -> None:
    state = original_state("wan", weights_of(pipeline_dir))
    rounded = {name: value.to(torch.float8_e4m3fn) for name, value in state.items()}
    file = write_file(tmp_path / "float8.safetensors", rounded)
    plain = write_file(tmp_path / "plain.safetensors", {name: value.float() for name, value in rounded.items()})
    assert_equal(load(pipeline_dir, file, dtype=torch.bfloat16), load(pipeline_dir, plain, dtype=torch.bfloat16))


KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"]


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_equals_the_dequantised_weights(kind: str, pipeline_dir: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear

    state = original_state("wan", weights_of(pipeline_dir))
    names = [*matrices(state, lambda name: "blocks." in name), "time_embedding.0.weight", "modulation"]
    file = write_gguf(tmp_path / "model.gguf", state, dict.fromkeys(names, kind))
    number = gguf.GGMLQuantizationType[kind]
    dequantized = dict(state)
    for name in set(names) & state.keys():
        quantized = gguf.quants.quantize(state[name].float().numpy(), number)
        dequantized[name] = torch.from_numpy(gguf.quants.dequantize(quantized, number).copy())
    plain = load(pipeline_dir, write_file(tmp_path / "plain.safetensors", dequantized))
    model = load(pipeline_dir, file)
    packed = {name for name, layer in model.named_modules() if isinstance(layer, GGUFLinear)}
    assert len(packed) == (0 if kind in ("BF16", "F16") else 4 * 10), "time_embedder stays in float32"
    assert packed == read_weights_of(str(file), empty_transformer(str(pipeline_dir), "transformer")).packed
    assert not any(parameter.requires_grad for parameter in model.parameters())
    inputs = {
        "hidden_states": torch.randn(2, 4, 3, 8, 8),
        "timestep": torch.tensor([10.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "return_dict": False,
    }
    with torch.no_grad():
        (one,), (other,) = model(**inputs), plain(**inputs)
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # scales are multiplied in float16
    for name in packed:
        layer, rows = model.get_submodule(name), plain.get_submodule(name).weight
        eye = torch.eye(layer.in_features)
        torch.testing.assert_close(layer(eye) - layer.bias, rows.T, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_packed_blocks_of_256_numbers_are_read_as_gguf_reads_them(
    kind: str, pipeline_dir: Path, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (96, block_bytes), np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    scales = {"Q4_K": (0, 2), "Q6_K": (block_bytes - 2,)}[kind]  # their scales are no numbers in most random bytes
    for begin in scales:
        blocks[:, begin : begin + 2] = half
    state, name = original_state("wan", weights_of(pipeline_dir)), "blocks.0.ffn.2.weight"
    file = write_gguf(tmp_path / "model.gguf", state, {name: kind}, packed={name: blocks})
    layer = load(pipeline_dir, file).blocks[0].ffn.net[2]
    rows = torch.from_numpy(gguf.quants.dequantize(blocks, number).copy())
    torch.testing.assert_close(layer(torch.eye(256)) - layer.bias, rows.T, rtol=2e-3, atol=2e-3)


def test_types_of_gguf_that_diffusers_does_not_read_are_named(pipeline_dir: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    name, number = "blocks.0.ffn.2.weight", gguf.GGMLQuantizationType.IQ2_S
    blocks = np.zeros((96, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    state = original_state("wan", weights_of(pipeline_dir))
    file = write_gguf(tmp_path / "model.gguf", state, {name: "IQ2_S"}, packed={name: blocks})
    with pytest.raises(BucketingError, match=r"^\S+model\.gguf holds weights of GGUF's type IQ2_S"):
        load(pipeline_dir, file)


@pytest.mark.parametrize(("kind", "name"), LARGE.values(), ids=LARGE)
def test_names_and_shapes_of_large_models_are_converted_without_values(kind: str, name: str, monkeypatch) -> None:
    with torch.device("meta"):
        empty = getattr(diffusers, kind)()
    state = original_large_state(kind, empty.state_dict())
    monkeypatch.setattr(weight_files, "_read", lambda *_, **__: dict(state))
    weights = read_weights_of("model.safetensors", empty)
    assert not weights.float8
    assert name in state


@pytest.mark.parametrize("family", LARGE)
def test_a_file_of_a_model_whose_converter_knows_its_width_equals_the_folder(
    family: str, tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (kind, name) = tiny_folder(family), LARGE[family]
    config = empty_transformer(str(folder), "transformer").config
    converter = converter_of_width(kind, config.num_attention_heads * config.attention_head_dim)
    monkeypatch.setitem(SINGLE_FILE_LOADABLE_CLASSES[kind], "checkpoint_mapping_fn", converter)
    state = original_large_state(kind, weights_of(folder))
    assert name in state
    file = write_file(tmp_path / "model.safetensors", state)
    without = configurations_of(folder, tmp_path / "configs")
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(load(without, file, dtype=dtype), load(folder, dtype=dtype))


def faults(folder: Path, tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Return files that are at fault, and what is said of each."""
    state = original_state("wan", weights_of(folder))
    whole = write_file(tmp_path / "whole.safetensors", state)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-1000])
    less = {name: value for name, value in state.items() if not name.startswith("blocks.3.")}
    wide = {name: torch.cat([value, value]) for name, value in state.items()}
    packed = {
        "blocks.0.ffn.0.weight": torch.zeros(256, 48, dtype=torch.uint8),
        "blocks.0.ffn.0.weight_scale": torch.ones(()),
    }
    (tmp_path / "note.txt").write_text("weights")
    return {
        "missing": (tmp_path / "none.safetensors", "There is no file .*none.safetensors"),
        "another format": (tmp_path / "note.txt", "must be a file of .safetensors or .gguf, got .*note.txt"),
        "cut off": (cut, "cut.safetensors cannot be read; it is cut off"),
        "fewer blocks": (
            write_file(tmp_path / "less.safetensors", less),
            r"less.* has no blocks\.3\..*others are missing",
        ),
        "wider": (write_file(tmp_path / "wide.safetensors", wide), r"wide.safetensors does not fit.*has shape \("),
        "more": (
            write_file(tmp_path / "more.safetensors", {**state, "img_emb.proj.0.weight": torch.zeros(3)}),
            "more.safetensors does not fit the WanTransformer3DModel.*image_embedder.norm1.weight, for which",
        ),
        "four bits": (
            write_file(tmp_path / "four.safetensors", state | packed),
            "four.* holds blocks.0.ffn.0.weight as uint8",
        ),
        "another model": (
            write_file(tmp_path / "lora.safetensors", {"lora_unet_blocks_0.lora_down.weight": torch.zeros(2, 2)}),
            "lora.safetensors does not fit",
        ),
    }


def test_files_at_fault_are_named_in_one_line(pipeline_dir: Path, tmp_path: Path) -> None:
    empty = empty_transformer(str(pipeline_dir), "transformer")
    for kind, (file, message) in faults(pipeline_dir, tmp_path).items():
        with pytest.raises(BucketingError, match=message) as caught:
            read_weights_of(str(file), empty)
        assert "\n" not in str(caught.value), kind
        with pytest.raises(BucketingError, match=message):
            load(pipeline_dir, file)


def test_a_gguf_file_that_is_cut_off_is_named(pipeline_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    state = original_state("wan", weights_of(pipeline_dir))
    whole, cut = write_gguf(tmp_path / "whole.gguf", state, {}), tmp_path / "cut.gguf"
    for length in (3, 200, whole.stat().st_size - 1000):
        cut.write_bytes(whole.read_bytes()[:length])
        with pytest.raises(BucketingError, match=r"cut\.gguf cannot be read; it is cut off or damaged"):
            load(pipeline_dir, cut)


def test_models_that_diffusers_reads_from_no_file_are_refused_by_name(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("latte")
    file = write_file(tmp_path / "latte.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(BucketingError, match=r"no LatteTransformer3DModel from one file.*WanTransformer3DModel"):
        load(folder, file)


@pytest.mark.parametrize("name", ["wan2.1.safetensors", "model.gguf"])
def test_a_file_named_as_a_pipeline_points_to_the_setting(name: str) -> None:
    with pytest.raises(BucketingError, match=f"^{name} is a file of weights.*`transformer_file`"):
        recipe_of(name)
