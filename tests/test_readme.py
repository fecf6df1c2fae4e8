"""The examples of README.md run as they stand, on small stand-ins for what they take from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(block: str, names: dict, media_dir: Path, pipeline_dir: Path) -> dict:
    stand_ins = {
        '"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"': repr(str(pipeline_dir)),
        '"clips"': repr(str(media_dir / "videos")),
        "[8190, 32760]": "[60, 110]",
        "[1, 17, 49, 81]": "[1, 9, 17]",
    }
    for original, stand_in in stand_ins.items():
        block = block.replace(original, stand_in)
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_examples_of_buckets_and_resuming_run(media_dir: Path, pipeline_dir: Path) -> None:
    buckets, resuming, _ = BLOCKS
    names = run(buckets, {}, media_dir, pipeline_dir)
    assert names["sampler"].plan(0).kept == 14
    assert tuple(names["batch"]["pixel_values"].shape[2:]) == names["table"].size(names["batch"]["bucket_id"])
    names["sampler"].set_epoch(0)
    names = run(resuming, names, media_dir, pipeline_dir)
    assert (names["loader"].epoch, names["loader"].step) == (2, 0)


def test_the_example_of_packs_runs(media_dir: Path, pipeline_dir: Path) -> None:
    names = run(BLOCKS[2], {}, media_dir, pipeline_dir)
    assert [output.shape for output in names["outputs"]] == [latent.shape for latent in names["latents"]]
    assert names["loss"].isfinite()


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) >= 5
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_flag_in_the_readme_is_a_flag_of_its_script() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    for script, line in re.findall(r"scripts/(\w+\.py) ([^\n]*)", text):
        source = (ROOT / "scripts" / script).read_text()
        if script == "train_text_to_video.py":
            source += (ROOT / "hf_bucketing" / "training" / "config.py").read_text()
        for flag in re.findall(r"--(\w+)", line):
            assert flag in source, (script, flag)
