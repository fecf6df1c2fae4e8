"""The examples of README.md run as they stand, on small stand-ins for what they take from the hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["buckets", "packs"])
def test_examples_run(block: str, media_dir: Path, pipeline_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_ins = {
        '"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"': repr(str(pipeline_dir)),
        '"clips"': repr(str(media_dir / "videos")),
        "[8190, 32760]": "[60, 110]",
        "[1, 17, 49, 81]": "[1, 9, 17]",
    }
    for original, stand_in in stand_ins.items():
        block = block.replace(original, stand_in)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    if "sampler" in names:
        seen = names["sampler"].plan(0)
        assert seen.kept == 14
        assert tuple(names["batch"]["pixel_values"].shape[2:]) == names["table"].size(names["batch"]["bucket_id"])
    else:
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
