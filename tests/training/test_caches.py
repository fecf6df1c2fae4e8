"""A cache trains the models that made it, with texts of their length; another one is refused by name."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.caching.encoders import describe_encoders, differences
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.prepared import MANIFEST
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.registry import recipe_of, recipes
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from hf_bucketing.training.data_changes import sequence_length, settle_caches
from hf_bucketing.training.loop import Trainer
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run


def described(folder: Path) -> dict[str, Any]:
    """Return what a pipeline says of its encoders, as a cache's JSON file holds it."""
    recipe = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=()))
    values: dict[str, Any] = json.loads(json.dumps(describe_encoders(recipe)))
    return values


def changed_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def weights_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def change_weight(folder: Path) -> None:
    tensors = load_file(weights_of(folder))
    name = sorted(tensors)[len(tensors) // 2]
    save_file({**tensors, name: tensors[name] + 1e-3}, weights_of(folder), {"format": "pt"})


def save_in_bfloat16(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights_of(folder)).items()}
    save_file(tensors, weights_of(folder), {"format": "pt"})


def divide(folder: Path) -> None:
    """Divide the weights among two files, as those of large models are."""
    file = weights_of(folder)
    tensors = load_file(file)
    parts = {f"part-{number}.safetensors": sorted(tensors)[number::2] for number in range(2)}
    for name, names in parts.items():
        save_file({tensor: tensors[tensor] for tensor in names}, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {tensor: name for name, names in parts.items() for tensor in names}}
    (folder / f"{file.name}.index.json").write_text(json.dumps(index))
    file.unlink()


ACCEPTED: dict[str, Callable[[Path], object]] = {
    "moved": lambda folder: None,
    "divided": lambda folder: divide(folder / "text_encoder"),
    "other dtype": lambda folder: save_in_bfloat16(folder / "text_encoder"),
    "other release": lambda folder: changed_json(folder / "vae" / "config.json", _diffusers_version="0.1", unknown=1),
    "image-to-video": lambda folder: changed_json(folder / "model_index.json", _class_name="LTXImageToVideoPipeline"),
    "other transformer": lambda folder: change_weight(folder / "transformer"),
}

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "scale": (
        lambda folder: changed_json(folder / "vae" / "config.json", scaling_factor=0.5),
        "its vae had other settings (scaling_factor=1.0 and not 0.5)",
    ),
    "vae": (lambda folder: change_weight(folder / "vae"), "its vae had other weights"),
    "text encoder": (lambda folder: change_weight(folder / "text_encoder"), "its text_encoder had other weights"),
    "captions": (
        lambda folder: changed_json(folder / "model_index.json", _class_name="LTXConditionPipeline"),
        "a LTXPipeline prepares captions in another way than a LTXConditionPipeline",
    ),
}


def test_what_encodes_is_compared_by_what_it_is_and_not_by_its_place(pipeline_dirs, tmp_path: Path) -> None:
    before = described(pipeline_dirs["ltx"])
    for name, change in ACCEPTED.items():
        folder = tmp_path / name
        shutil.copytree(pipeline_dirs["ltx"], folder)
        change(folder)
        assert differences(before, described(folder), texts=True) == [], name
    for name, (change, reason) in REFUSED.items():
        folder = tmp_path / name
        shutil.copytree(pipeline_dirs["ltx"], folder)
        change(folder)
        assert differences(before, described(folder), texts=True) == [reason]


def test_models_that_are_not_on_this_machine_are_compared_by_their_place(pipeline_dir) -> None:
    before = described(pipeline_dir)
    there = json.loads(json.dumps(before))
    there["texts"]["models"]["text_encoder"] |= {"config": None, "weights": None}
    assert differences(before, there, texts=True) == []
    there["texts"]["models"]["text_encoder"]["place"] = "elsewhere/text_encoder"
    (reason,) = differences(before, there, texts=True)
    assert reason.endswith("and that of elsewhere/text_encoder cannot be read here")
    assert differences(before, there, texts=False) == []


def test_caches_of_other_pipelines_do_not_belong_to_a_run(tiny_folder) -> None:
    pairs = [("qwen-image", "qwen-image-edit"), ("flux", "chroma"), ("wan", "ltx"), ("flux2", "flux2-klein")]
    for before, now in pairs:
        reasons = differences(described(tiny_folder(before)), described(tiny_folder(now)), texts=True)
        assert any("prepares captions in another way" in reason for reason in reasons), (before, now)


def code_of_texts(pipeline: type) -> dict[str, str]:
    """Return the bodies of the functions by which a pipeline's class encodes captions."""
    code: dict[str, str] = {}
    names = ["encode_prompt"]
    for name in names:
        member = inspect.getattr_static(pipeline, name, None)
        if name in code or not (inspect.isfunction(member) or isinstance(member, staticmethod)):
            continue
        function = ast.parse(textwrap.dedent(inspect.getsource(getattr(pipeline, name)))).body[0]
        assert isinstance(function, ast.FunctionDef)
        body = function.body[1:] if ast.get_docstring(function) else function.body
        code[name] = "\n".join(map(ast.unparse, body)).replace("num_images_per", "num_videos_per")
        code[name] = re.sub("^device = .*\n", "", code[name].replace("model_device", "device"), flags=re.MULTILINE)
        own = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
        names += [node.attr for node in own if isinstance(node.value, ast.Name) and node.value.id == "self"]
    return code


def test_pipelines_whose_captions_count_as_alike_encode_them_by_the_same_code() -> None:
    ordered = sorted(recipes().values(), key=lambda recipe: recipe.text_rule())
    for rule, members in groupby(ordered, key=lambda recipe: recipe.text_rule()):
        pipelines = [recipe.pipeline_type() for recipe in members]
        for pipeline in pipelines[1:]:
            assert code_of_texts(pipeline) == code_of_texts(pipelines[0]), (rule, pipeline)


def test_a_cache_of_other_weights_is_refused_by_name_unless_it_is_trusted(
    cached_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    make_tiny_pipeline(tmp_path / "other", family="wan", seed=1)
    shutil.copytree(pipeline_dir, tmp_path / "moved")
    config = in_process(tmp_path / "other", cached_dir, tmp_path / "out")
    with pytest.raises(BucketingError) as raised:
        Trainer(config)
    message = str(raised.value)
    assert f"was cached with {pipeline_dir} (WanPipeline) and does not belong to {tmp_path / 'other'}" in message
    assert "its vae had other settings (latents_mean=" in message
    assert "; its text_encoder had other weights. Cache it again" in message
    command = f"hf_bucketing cache --config {cached_dir / 'config.yaml'} --pretrained_model_name_or_path"
    assert command in message
    trusted = run(replace(config, trust_cache=True))
    assert len(trusted) == 3
    assert len(run(in_process(tmp_path / "moved", cached_dir, tmp_path / "out"))) == 3
    with pytest.raises(BucketingError, match=r"Omit `trust_cache`: .* holds no cache"):
        Trainer(in_process(pipeline_dir, PreparedDataset.load(cached_dir).cache.prepared, tmp_path, trust_cache=True))


@pytest.mark.slow
def test_the_command_that_a_refusal_names_encodes_only_what_differs(
    cached_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(pipeline_dir, tmp_path / "moved")
    again = {"config": cached_dir / "config.yaml", "pretrained_model_name_or_path": tmp_path / "moved"}
    result = run_script_here("cache_latents.py", **again)
    assert "0 rows encoded" in result.stdout
    assert "0 captions encoded" in result.stdout


def earlier(folder: Path) -> None:
    """Make a cached folder what release 3.2 and others before it wrote."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in ("encoders", "max_sequence_length"):
        assert manifest["cache"].pop(name)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_cache_of_an_earlier_release_is_trained_by_the_pipeline_that_made_it(
    cached_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    expected = run(in_process(pipeline_dir, cached_dir, tmp_path / "out"))
    earlier(cached_dir)
    assert run(in_process(pipeline_dir, cached_dir, tmp_path / "out", max_sequence_length=None)) == expected
    shutil.copytree(pipeline_dir, tmp_path / "moved")
    prepared = PreparedDataset.load(cached_dir)
    for model, refusal in ((tmp_path / "moved", None), (tmp_path / "other", "its text_encoder had other weights")):
        if refusal is not None:
            make_tiny_pipeline(model, family="wan", seed=1)
        config = in_process(model, cached_dir, tmp_path / "out")
        if refusal is None:
            assert settle_caches(config, {"cached": prepared}).max_sequence_length == 32
        else:
            with pytest.raises(BucketingError, match=refusal):
                settle_caches(config, {"cached": prepared})
    silent = replace(prepared, settings={})
    config = in_process(pipeline_dir, cached_dir, tmp_path / "out")
    with pytest.raises(BucketingError, match=r"an earlier release, .*its config.yaml does not name the pipeline"):
        settle_caches(config, {"cached": silent})
    assert settle_caches(replace(config, trust_cache=True), {"cached": silent}).trust_cache
    gone = {**prepared.settings["cache_latents"], "pretrained_model_name_or_path": str(tmp_path / "gone")}
    with pytest.raises(BucketingError, match="gone, which made it, cannot be loaded"):
        settle_caches(config, {"cached": replace(prepared, settings={"cache_latents": gone})})
    changed_place = {**gone, "pretrained_model_name_or_path": str(tmp_path / "other")}
    with pytest.raises(BucketingError, match="other is no longer the one that made it"):
        settle_caches(config, {"cached": replace(prepared, settings={"cache_latents": changed_place})})


def test_texts_have_the_length_of_their_cache(cached_dir: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    left_open = in_process(pipeline_dir, cached_dir, tmp_path / "out", max_sequence_length=None)
    trainer = Trainer(left_open)
    assert trainer.config.max_sequence_length == trainer.recipe.max_sequence_length == 32
    assert ModelTokens.of(trainer.recipe).text_tokens == trainer.data.text_tokens
    for length in (16, 64):
        with pytest.raises(BucketingError, match=rf"texts of 32 tokens, but `max_sequence_length` is {length}"):
            Trainer(replace(left_open, max_sequence_length=length))
    prepared, model = PreparedDataset.load(cached_dir), str(pipeline_dir)
    before = replace(prepared, cache=replace(prepared.cache, max_sequence_length=None, encoders=None))
    assert sequence_length(None, before, folder="f", model=model) == 32
    default = replace(before, settings={"cache_latents": {"max_sequence_length": None}})
    assert sequence_length(512, default, folder="f", model=model) == 512
    assert sequence_length(None, default, folder="f", model=model) == 512
    with pytest.raises(BucketingError, match="texts of 512 tokens, but `max_sequence_length` is 16"):
        sequence_length(16, default, folder="f", model=model)


@pytest.mark.slow
def test_a_run_that_took_the_length_of_its_cache_is_resumed(cached_dir: Path, pipeline_dir: Path, tmp_path) -> None:
    settings: dict[str, Any] = {"max_sequence_length": None, "checkpointing_steps": 2}
    expected = run(in_process(pipeline_dir, cached_dir, tmp_path / "whole", **settings))
    run(in_process(pipeline_dir, cached_dir, tmp_path / "parts", **settings, max_train_steps=2))
    settings["resume_from_checkpoint"] = "latest"
    assert run(in_process(pipeline_dir, cached_dir, tmp_path / "parts", **settings)) == expected


def test_packs_with_text_in_the_sequence_hold_the_tokens_that_the_cache_has(tiny_folder, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "media").mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (40 * number, 90, 30)).save(tmp_path / "media" / f"{number}.png")
        (tmp_path / "media" / f"{number}.txt").write_text(f"picture {number}")
    pipeline = tiny_folder("flux")
    common: dict[str, Any] = {"pretrained_model_name_or_path": pipeline}
    run_script_here(
        "prepare_dataset.py", dataset=tmp_path / "media", output_dir=tmp_path / "prepared", bucket_tokens="4,16",
        bucket_frames="1", **common,
    )  # fmt: skip
    run_script_here(
        "cache_latents.py", dataset_dir=tmp_path / "prepared", cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached", batching="pack", max_sequence_length=24, **common,
    )  # fmt: skip
    config = in_process(
        pipeline, tmp_path / "cached", tmp_path / "out", batching="pack", strip_length=16, max_tokens=100,
        max_sequence_length=None,
    )  # fmt: skip
    trainer = Trainer(config)
    batches = [*trainer.loader]
    text = trainer.data.text_tokens
    assert text == 24 == batches[0]["text_values"].shape[1]
    assert max(len(batch["index"]) for batch in batches) * (16 + text) <= 100
