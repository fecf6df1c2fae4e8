"""Which parts of a pipeline a run opens, in which precision, and what it saves of the rest."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.caching.fingerprints import latents_fingerprint
from hf_bucketing.models.loading import Loading, tile
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.loop import Trainer
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run

BATCHES = {
    "bucket": {"train_batch_size": 2},
    "pack": {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 4},
}


@pytest.fixture(scope="module")
def cached_dirs(pipeline_dir: Path, prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Cached latents and texts, made by a pipeline whose transformer cannot be read."""
    folder = tmp_path_factory.mktemp("cached")
    encoders = unreadable(pipeline_dir, folder / "encoders", "transformer")
    for batching in BATCHES:
        run_script_here(
            "cache_latents.py",
            dataset_dir=prepared_dir,
            pretrained_model_name_or_path=encoders,
            batching=batching,
            cache_dir=folder / "entries",
            output_dir=folder / batching,
            max_sequence_length=32,
        )
    return {batching: folder / batching for batching in BATCHES}


def unreadable(pipeline: Path, copy: Path, *components: str) -> Path:
    """Copy a pipeline and empty the files of the weights of some components, so that reading them fails."""
    shutil.copytree(pipeline, copy)
    for file in [file for component in components for file in (copy / component).glob("*.safetensors")]:
        file.write_bytes(b"")
    return copy


@pytest.mark.slow
def test_a_cache_of_another_models_latents_is_refused_before_training(
    cached_dirs, pipeline_dir, tmp_path: Path, monkeypatch
) -> None:
    config = in_process(pipeline_dir, cached_dirs["bucket"], tmp_path)
    recipe = recipe_of(str(pipeline_dir))
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "blank_conditions", lambda self, latent: {"first_frame": latent})
        with pytest.raises(BucketingError, match="A WanPipeline is also shown first_frame, which the cache lacks"):
            Trainer(config)
    monkeypatch.setattr(recipe, "latent_channels", 16)
    with pytest.raises(BucketingError, match="holds latents of 4 channels, but a WanPipeline is trained on 16"):
        Trainer(config)


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", BATCHES)
def test_with_caches_a_run_opens_neither_text_encoder_nor_vae(
    batching: str, pipeline_dir, cached_dirs, prepared_dir, tmp_path: Path
) -> None:
    source = unreadable(pipeline_dir, tmp_path / "source", "vae", "text_encoder")
    settings = {**BATCHES[batching], "lora_rank": 2}
    with pytest.raises(BucketingError, match=r"its vae was that of .* cannot be read here"):
        Trainer(in_process(source, cached_dirs[batching], tmp_path / "run", **settings))
    trusted = {**settings, "trust_cache": True}
    losses = run(in_process(source, cached_dirs[batching], tmp_path / "run", **trusted))
    assert losses == pytest.approx(run(in_process(pipeline_dir, cached_dirs[batching], tmp_path / "all", **settings)))
    DiffusionPipeline.from_pretrained(pipeline_dir).load_lora_weights(tmp_path / "run")
    if batching == "pack":
        return
    auto = in_process(source, cached_dirs[batching], tmp_path / "auto", **{**trusted, "max_tokens": "auto"})
    assert Trainer(auto).config.batches.token_limit
    with pytest.raises(BucketingError, match="cannot be loaded"):
        Trainer(in_process(source, prepared_dir, tmp_path / "no_cache", **settings))


def test_a_full_pipeline_is_saved_with_what_was_not_trained_as_it_was(
    pipeline_dir, cached_dirs, tmp_path: Path
) -> None:
    config = in_process(pipeline_dir, cached_dirs["bucket"], tmp_path / "run", mixed_precision="bf16")
    run(config)
    names = {path.name for path in pipeline_dir.iterdir()}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}
    for name in names - {"transformer", "model_index.json"}:
        files = [path.name for path in (pipeline_dir / name).iterdir()]
        assert filecmp.cmpfiles(pipeline_dir / name, tmp_path / "run" / name, files, shallow=False)[0] == files
    saved = DiffusionPipeline.from_pretrained(tmp_path / "run").transformer.state_dict()
    before = DiffusionPipeline.from_pretrained(pipeline_dir).transformer.state_dict()
    assert any(not torch.equal(saved[name], value) for name, value in before.items())


def test_the_frozen_base_has_the_training_precision_and_adapters_their_own(
    pipeline_dir, cached_dirs, tmp_path: Path
) -> None:
    common = {"lora_rank": 2, "mixed_precision": "bf16"}

    def dtypes(name: str, **settings) -> dict[bool, set[torch.dtype]]:
        trainer = Trainer(in_process(pipeline_dir, cached_dirs["bucket"], tmp_path / name, **common, **settings))
        trainer.run()
        parameters = list(trainer.recipe.transformer.named_parameters())
        keeps = trainer.recipe.transformer._keep_in_fp32_modules
        assert all(
            value.dtype == torch.float32 for key, value in parameters if any(part in key.split(".") for part in keeps)
        )
        return {
            trained: {
                value.dtype
                for key, value in parameters
                if value.requires_grad == trained and not any(part in key.split(".") for part in keeps)
            }
            for trained in (True, False)
        }

    assert dtypes("masters") == {True: {torch.float32}, False: {torch.bfloat16}}
    assert dtypes("half", trained_dtype="bf16", ema_decay=0.9) == {True: {torch.bfloat16}, False: {torch.bfloat16}}
    assert {value.dtype for value in load_file(tmp_path / "half" / "pytorch_lora_weights.safetensors").values()} == {
        torch.bfloat16
    }


def test_validation_borrows_what_steps_do_not_call(pipeline_dir, cached_dirs, tmp_path: Path, monkeypatch) -> None:
    moves: list[tuple[str, str]] = []
    original = torch.nn.Module.to

    def to(module: torch.nn.Module, device, *args: object, **kwargs: object) -> torch.nn.Module:
        moves.append((type(module).__name__, str(device)))
        return original(module, device, *args, **kwargs)

    trainer = Trainer(
        in_process(
            pipeline_dir, cached_dirs["bucket"], tmp_path / "run", lora_rank=2, max_train_steps=1,
            validation_prompts=["red"], validation_sizes="1,32,64", validation_steps=1, validation_inference_steps=1,
            vae_tiling=True,
        )
    )  # fmt: skip
    assert trainer.recipe.pipeline.vae.use_tiling
    monkeypatch.setattr(torch.nn.Module, "to", to)
    trainer.run()
    assert list((tmp_path / "run" / "validation" / "step-1").glob("*.png"))
    named = [move for move in moves if move[0] in ("UMT5EncoderModel", "AutoencoderKLWan")]
    assert len(named) == 4
    assert {name for name, _ in named[:2]} == {name for name, _ in named[2:]}


@pytest.mark.parametrize(("settings", "message"), [
    ({"trained_dtype": "bf16"}, '`trained_dtype="bf16"` needs `mixed_precision="bf16"`, not "no"'),
    ({"vae_tiling": True, "trust_cache": True}, "Omit `vae_tiling`: latents are cached"),
])  # fmt: skip
def test_contradicting_settings_are_refused_before_weights_are_loaded(
    settings, message: str, pipeline_dir, cached_dirs, tmp_path: Path
) -> None:
    source = unreadable(pipeline_dir, tmp_path / "source", "vae", "text_encoder", "transformer")
    with pytest.raises(BucketingError, match=message):
        Trainer(in_process(source, cached_dirs["bucket"], tmp_path / "run", **settings))


def test_tiles_are_latents_of_their_own_and_need_a_vae_that_has_them(pipeline_dir, tmp_path: Path) -> None:
    pixels = torch.rand(2, 3, 1, 288, 288) * 2 - 1  # larger than a tile
    recipe = recipe_of(str(pipeline_dir))
    whole, tiled = (recipe.load(str(pipeline_dir), loading=Loading(vae_tiling=tiling)) for tiling in (False, True))
    assert latents_fingerprint(whole) != latents_fingerprint(tiled)
    difference = (whole.encode_latents(pixels) - tiled.encode_latents(pixels)).abs()
    assert difference.max() > 0
    assert difference.median() < 0.1, "tiles see less, and nearly the same"
    with pytest.raises(BucketingError, match="The Linear of here has no tiling; omit `vae_tiling`"):
        tile(torch.nn.Linear(1, 1), "here")


def test_a_clip_is_sampled_in_half_precision(pipeline_dir, tmp_path: Path) -> None:
    flags = ("--num_frames", 5, "--num_inference_steps", 1, "--max_sequence_length", 32, "--vae_tiling")
    run_script_here("sample_video.py", pipeline_dir, "--output", tmp_path / "a.mp4", "--dtype", "bf16", *flags)
    refused = run_script_here(
        "sample_video.py", pipeline_dir, "--output", tmp_path / "b.mp4", "--offload", "model", *flags, check=False
    )
    assert (tmp_path / "a.mp4").stat().st_size > 0
    if not torch.accelerator.is_available():
        assert "Omit --offload: this machine has no accelerator" in refused.stderr
