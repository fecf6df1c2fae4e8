"""What a VAE or a text encoder makes NaN of is named at once, or counts for nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from hf_bucketing import BucketingError, CacheError
from hf_bucketing.caching import CacheConfig, cache_dataset
from hf_bucketing.caching.store import TensorCache
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run

GREY, WHITE = 127, 255


@pytest.fixture(scope="module")
def overflowing(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose VAE overflows for white pictures alone: the sums of its first convolution become infinite."""
    folder = tmp_path_factory.mktemp("overflowing") / "wan"
    shutil.copytree(pipeline_dir, folder)
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    with torch.no_grad():
        vae.encoder.conv_in.weight.zero_()[:, :, -1] = 3.0e38
        vae.encoder.conv_in.bias.zero_()
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def pictures(overflowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures prepared, the second of which is white."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "media").mkdir()
    for name, level in {"1": GREY, "2": WHITE, "3": GREY}.items():
        Image.new("RGB", (192, 128), (level,) * 3).save(folder / "media" / f"{name}.png")
        (folder / "media" / f"{name}.txt").write_text(f"picture {name}")
    run_script_here(
        "prepare_dataset.py", dataset=folder / "media", output_dir=folder / "prepared", bucket_tokens="60",
        bucket_frames="1", pretrained_model_name_or_path=overflowing,
    )  # fmt: skip
    return folder / "prepared"


def test_caching_names_the_file_or_rejects_its_row(overflowing: Path, pictures: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "dataset_dir": pictures,
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "cached",
        "pretrained_model_name_or_path": overflowing,
        "max_sequence_length": 32,
    }
    result = run_script_here("cache_latents.py", check=False, **flags)
    assert "2.png cannot be encoded: the model makes NaN or infinite numbers of it (latents)" in result.stderr
    assert "--on_error reject" in result.stderr
    result = run_script_here("cache_latents.py", **flags, on_error="reject")
    assert "1 rows not finite" in result.stdout
    assert "2 rows found" in run_script_here("cache_latents.py", **flags, on_error="reject").stdout
    rows = PreparedDataset.load(tmp_path / "cached").dataset
    assert [bucket < 0 for bucket in rows["bucket_id"]] == [key == "" for key in rows["latents_key"]]
    assert [row for row, bucket in enumerate(rows["bucket_id"]) if bucket < 0] == [1]
    losses = run(in_process(overflowing, tmp_path / "cached", tmp_path / "out", train_batch_size=1))
    assert all(map(math.isfinite, losses))
    cache = TensorCache(tmp_path / "cache")
    tensors, about = cache.read(rows[0]["latents_key"])
    cache.write(rows[0]["latents_key"], {"latents": tensors["latents"] * math.nan}, about=about)  # as before
    with pytest.raises(CacheError, match=r"Cannot load row \d: .* holds NaN or infinite numbers \(latents\)"):
        run(in_process(overflowing, tmp_path / "cached", tmp_path / "out"))


def test_a_caption_of_nan_is_named_or_its_row_rejected(
    pipeline_dir: Path, pictures: Path, tmp_path: Path, monkeypatch
) -> None:
    recipe, prepared = recipe_of(str(pipeline_dir)).load(str(pipeline_dir)), PreparedDataset.load(pictures)
    spoil_texts(monkeypatch, recipe, "picture 3")
    with pytest.raises(CacheError, match=r"NaN or infinite numbers \(values\) of the caption 'picture 3'"):
        cache_dataset(prepared, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    cached, counts = cache_dataset(prepared, recipe, CacheConfig(folder=str(tmp_path / "cache"), on_error="reject"))
    assert counts["captions not finite"] == 1
    assert cached is not None
    assert [bucket < 0 for bucket in cached.dataset["bucket_id"]] == [False, False, True]
    spoil_texts(monkeypatch, recipe, "")
    with pytest.raises(CacheError, match="of the caption ''"):
        cache_dataset(prepared, recipe, CacheConfig(folder=str(tmp_path / "other"), on_error="reject"))


def spoil_texts(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, caption: str) -> None:
    encode: Callable[..., Any] = type(recipe).encode_text

    def spoiled(recipe: Recipe, captions: list[str]) -> Any:
        text = encode(recipe, captions)
        values = [
            value * math.nan if own == caption else value for own, value in zip(captions, text.values, strict=True)
        ]
        return text._replace(values=torch.stack(values))

    monkeypatch.setattr(type(recipe), "encode_text", spoiled)


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_training_from_files_names_the_file_or_trains_the_others(
    batching: str, overflowing: Path, pictures: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"train_batch_size": 3, "max_train_steps": 2, "num_train_epochs": 2}
    if batching == "pack":
        settings |= {"batching": "pack", "train_batch_size": None, "max_tokens": 640, "strip_length": 16}
    config = in_process(overflowing, pictures, tmp_path / "out", **settings)
    message = (
        r"The VAE or the text encoder makes NaN or infinite numbers of row 1 \(.*2\.png\), which cannot be trained"
    )
    with pytest.raises(BucketingError, match=message):
        run(config)
    losses = run(
        in_process(overflowing, pictures, tmp_path / "out", **settings, on_error="replace", max_error_share=1.0)
    )
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert not read_log(tmp_path / "out", "skipped")
    lines = read_log(tmp_path / "out", "unreadable")
    assert [(line["epoch"], line["index"]) for line in lines] == [(0, 1), (1, 1)]
    assert losses_of(tmp_path / "out") == losses
