"""Training from a cache: the losses of training from files; and the script that makes it, killed or not."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_bucketing import BucketingError, CacheError, ColumnError, MediaError, open_table
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.caching import CacheConfig, CachedCollator, Encoder, cache_dataset
from hf_bucketing.caching.fingerprints import latents_fingerprint, text_fingerprint
from hf_bucketing.caching.store import TensorCache
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.loaders import BucketCollator, PackCollator
from hf_bucketing.media import ViewRule
from hf_bucketing.models import enable_packing
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import families, recipe_of
from tests.conftest import ROOT, as_flags, launch, run_script, run_script_here

OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}
RANDOM = ViewRule(flip_probability=0.5)
CENTRED = ViewRule(random_crop=False)


@pytest.fixture(scope="module")
def prepared(prepared_dir: Path) -> PreparedDataset:
    data = PreparedDataset.load(prepared_dir)
    return replace(data, dataset=data.dataset.select(range(9)))


def load_recipe(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


def cached(prepared: PreparedDataset, recipe: Encoder, folder: Path, **options) -> PreparedDataset:
    result, _ = cache_dataset(prepared, recipe, CacheConfig(folder=str(folder), **options))
    assert result is not None
    return result


def first(prepared: PreparedDataset, rows: int) -> PreparedDataset:
    return replace(prepared, dataset=prepared.dataset.select(range(rows)))


def collator_of(data: PreparedDataset) -> CachedCollator:
    assert data.cache is not None
    return CachedCollator(data.cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "views"),
    [
        pytest.param("wan", RANDOM, id="wan-random"),
        pytest.param("ltx", CENTRED, id="ltx-centred", marks=pytest.mark.slow),
    ],
)
def test_stacks_and_packs_have_the_losses_of_training_from_files(
    family: str, views: ViewRule, prepared: PreparedDataset, pipeline_dirs, tmp_path: Path, monkeypatch
) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    data = replace(prepared, open_table=open_table(type(recipe).read_spec(str(pipeline_dirs[family]))))
    objective = recipe.objective(**OPTIONS)
    media = {"column": data.column, "root": data.root, "seed": 5, "views": views}
    ids = data.dataset["bucket_id"]
    groups = [[row for row, other in enumerate(ids) if other == bucket][:3] for bucket in sorted(set(ids))[-2:]]
    packable = type(recipe.transformer).__name__ in families()
    for batching in ("bucket", "pack") if packable else ("bucket",):
        stack = batching == "bucket"
        keyed = cached(data, recipe, tmp_path / "cache", batching=batching, views=views, seed=5)
        from_files = BucketCollator(data.table, **media) if stack else PackCollator(data.spec, **media)
        step: BucketStep | PackStep = BucketStep(recipe=recipe, objective=objective)
        if not stack:
            packing = enable_packing(recipe.transformer, strip_length=16)
            step = PackStep(recipe=recipe, objective=objective, packing=packing)
        for rows in groups if stack else [[*groups[0], *groups[1]]]:
            files = from_files([data.dataset[row] for row in rows])
            entries = collator_of(keyed)([keyed.dataset[row] for row in rows])
            shared = ("size", "crop", "flip", "fps", "index", "caption", *(["bucket_id"] if stack else []))
            assert {name: files[name] for name in shared} == {name: entries[name] for name in shared}
            with torch.no_grad():
                expected = step(recipe.transformer, files, epoch=3).values
                with monkeypatch.context() as patch:
                    refuse_encoding(patch, recipe)
                    losses = step(recipe.transformer, entries, epoch=3).values
            assert torch.allclose(losses, expected, rtol=0, atol=1e-5)
            assert losses.min() > 0.1


def refuse_encoding(patch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """Fail where a step encodes what the cache has."""

    def refuse(*args: object) -> None:
        pytest.fail("encoded again")

    patch.setattr(type(recipe), "encode_latents", refuse)
    patch.setattr(type(recipe), "encode_text", refuse)


def test_the_empty_caption_is_there_for_guidance(prepared, pipeline_dirs, tmp_path: Path) -> None:
    recipe = load_recipe(pipeline_dirs["ltx"])
    collator = collator_of(cached(first(prepared, 1), recipe, tmp_path / "cache"))
    values, mask, _ = recipe.encode_text([""])
    assert isinstance(collator.empty_text()["text_mask"], np.ndarray), "which accelerate leaves on the CPU"
    assert np.array_equal(collator.empty_text()["text_mask"], mask)
    length = int(mask.sum())
    assert torch.allclose(collator.empty_text()["text_values"][:, :length], values[:, :length], atol=1e-6)
    with pytest.raises(CacheError, match="no entry for dropped captions"):
        CachedCollator(replace(collator.info, empty_text_key=None)).empty_text()
    with pytest.raises(BucketingError, match=r"Expected the cache of a PreparedDataset.*got None"):
        CachedCollator(prepared.cache)


def test_missing_corrupt_and_rejected_entries_name_their_row(prepared, pipeline_dir, tmp_path: Path) -> None:
    keyed = cached(first(prepared, 2), load_recipe(pipeline_dir), tmp_path / "cache")
    collator, row = collator_of(keyed), keyed.dataset[1]
    with pytest.raises(CacheError, match="row 1 has no latents_key: it was rejected"):
        collator([{**row, "latents_key": ""}])
    with pytest.raises(BucketingError, match="catch_all"):
        collator([keyed.dataset[0], keyed.dataset[1]])
    with pytest.raises(ColumnError, match="text_key"):
        collator([{name: cell for name, cell in row.items() if name != "text_key"}])
    path = Path(collator.cache.path(row["latents_key"]))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheError, match=r"Cannot load row 1: .*cannot be read"):
        collator([row])
    path.unlink()
    with pytest.raises(CacheError, match=r"Cannot load row 1: .*is missing"):
        collator([row])


def test_a_cache_in_an_object_store_is_the_same_and_is_asked_for_several_entries_at_a_time(
    prepared, pipeline_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, rows = load_recipe(pipeline_dir), first(prepared, 3)
    local = cached(rows, recipe, tmp_path / "cache", batching="pack")
    result, counts = cache_dataset(rows, recipe, CacheConfig(folder="memory://cache", batching="pack"))
    assert result is not None
    assert counts["encoded"] == 3
    result.save(tmp_path / "cached")
    remote = PreparedDataset.load(tmp_path / "cached")
    together, read = threading.Barrier(3), TensorCache.read

    def read_together(cache: TensorCache, key: str) -> object:
        together.wait(timeout=60)
        return read(cache, key)

    expected = collator_of(local)(list(local.dataset))
    monkeypatch.setattr(TensorCache, "read", read_together)
    batch = collator_of(remote)(list(remote.dataset))
    assert batch["caption"] == expected["caption"]
    assert torch.equal(batch["text_values"], expected["text_values"])
    assert all(map(torch.equal, batch["latents"], expected["latents"]))


def test_a_prepared_folder_remembers_its_cache_and_may_move_with_it(
    prepared, pipeline_dir, tmp_path: Path, column_reads
) -> None:
    keyed = cached(first(prepared, 1), load_recipe(pipeline_dir), tmp_path / "here" / "cache", views=RANDOM, seed=2)
    keyed.save(tmp_path / "here" / "cached")
    (tmp_path / "here").rename(tmp_path / "there")
    back = PreparedDataset.load(tmp_path / "there" / "cached")
    assert back.cache == replace(keyed.cache, folder=str(tmp_path / "there" / "cache"))
    assert back.cache.views == {**asdict(RANDOM), "seed": 2}
    assert set(collator_of(back)([back.dataset[0]])) >= {"latents", "text_values"}


def test_fingerprints_follow_weights_settings_and_tokens(pipeline_dirs) -> None:
    recipe = load_recipe(pipeline_dirs["ltx"])
    latents, text = latents_fingerprint(recipe), text_fingerprint(recipe)
    assert latents_fingerprint(load_recipe(pipeline_dirs["ltx"])) == latents
    assert text_fingerprint(load_recipe(pipeline_dirs["ltx"])) == text
    assert text_fingerprint(replace(recipe, max_sequence_length=7)) != text
    assert latents_fingerprint(load_recipe(pipeline_dirs["wan"])) != latents
    next(recipe.transformer.parameters()).data += 1
    assert (latents_fingerprint(recipe), text_fingerprint(recipe)) == (latents, text)
    list(recipe.pipeline.vae.parameters())[3].data.view(-1)[0] += 1e-3
    assert latents_fingerprint(recipe) != latents
    recipe.pipeline.vae.register_to_config(scaling_factor=0.5)
    list(recipe.pipeline.text_encoder.parameters())[-1].data.view(-1)[0] += 1e-3
    assert text_fingerprint(recipe) != text


def flags(data: Path, pipeline: Path, out: Path) -> list[object]:
    return as_flags(
        dataset_dir=data,
        pretrained_model_name_or_path=pipeline,
        cache_dir=out / "cache",
        output_dir=out / "cached",
        batch_size=1,
    )


def entries_of(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in (out / "cache").rglob("*.safetensors")}


def test_unreadable_files_are_an_error_or_rejected(
    media_dir: Path, prepared: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(media_dir, tmp_path / "media")
    moved = replace(first(prepared, 4), root=str(tmp_path / "media"))
    broken = moved.dataset[1]["file_name"]
    (tmp_path / "media" / broken).write_bytes(b"broken")
    with pytest.raises(MediaError, match=broken):
        cached(moved, load_recipe(pipeline_dir), tmp_path / "cache")
    moved.save(tmp_path / "prepared")
    result = run_script_here(
        "cache_latents.py", *flags(tmp_path / "prepared", pipeline_dir, tmp_path), "--on_error", "reject"
    )
    assert "1 rows unreadable" in result.stdout
    rows = PreparedDataset.load(tmp_path / "cached").dataset
    assert [row["bucket_id"] < 0 for row in rows] == [False, True, False, False]
    assert [row["latents_key"] == "" for row in rows] == [False, True, False, False]
    assert rows[1]["num_frames"] == -1


def test_mistakes_end_in_one_line(prepared_dir: Path, pipeline_dirs, tmp_path: Path) -> None:
    inside = flags(prepared_dir, pipeline_dirs["wan"], tmp_path), ("--cache_dir", tmp_path / "cached" / "cache")
    result = run_script_here("cache_latents.py", *inside[0], *inside[1], check=False)
    assert "must lie outside" in result.stderr.strip().splitlines()[-1]
    result = run_script_here("cache_latents.py", *flags(prepared_dir, pipeline_dirs["ltx"], tmp_path), check=False)
    assert "prepare it again for this model" in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "cached").exists()


@pytest.mark.slow
def test_killed_and_run_again_the_cache_is_that_of_an_uninterrupted_run(
    prepared_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    run_script("cache_latents.py", *flags(prepared_dir, pipeline_dir, tmp_path / "whole"))
    whole = entries_of(tmp_path / "whole")
    killed = tmp_path / "killed"
    command = [sys.executable, ROOT / "scripts" / "cache_latents.py", *flags(prepared_dir, pipeline_dir, killed)]
    with subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while process.poll() is None and len(list(killed.rglob("*.safetensors"))) < 5 and time.monotonic() < until:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "cached").exists()
    left = entries_of(killed)
    assert 5 <= len(left) < len(whole)
    result = run_script("cache_latents.py", *flags(prepared_dir, pipeline_dir, killed))
    found = len(left)
    assert f"{found} rows found" in result.stdout
    assert f"{20 - found} rows encoded" in result.stdout
    again = entries_of(killed)
    assert again.keys() == whole.keys()
    for name, entry in whole.items():
        assert all(torch.allclose(tensor, again[name][part], atol=1e-5) for part, tensor in entry.items())
    assert not list((killed / "cache").rglob("*.partial"))
    columns = [PreparedDataset.load(out / "cached").dataset["latents_key"] for out in (killed, tmp_path / "whole")]
    assert columns[0] == columns[1]


@pytest.mark.slow
def test_two_processes_share_the_rows(prepared_dir: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "cache_latents.py"
    result = launch(script, *flags(prepared_dir, pipeline_dir, tmp_path / "two"), "--batching", "pack")
    assert result.stdout.count("20 rows encoded") == 1
    run_script("cache_latents.py", *flags(prepared_dir, pipeline_dir, tmp_path / "one"), "--batching", "pack")
    one, two = entries_of(tmp_path / "one"), entries_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert PreparedDataset.load(tmp_path / "two" / "cached").cache.batching == "pack"
