"""The commands of the pages of models train and render, with small random weights in place of the published ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from tests.docs.pages import PAGES, run_call

HEADING = "## From files to a LoRA"
SMALL = {
    "--bucket_tokens": "60,110",
    "--target_fps": "8",
    "--max_tokens": "1000",
    "--max_train_steps": "2",
    "--lora_rank": "4",
    "--height": "64",
    "--width": "96",
}
"""Values in place of those of a flag."""

FRAMES = {"--bucket_frames": "1,9,17", "--num_frames": "9"}
"""Numbers of frames in place of those of these flags."""

OTHER_FRAMES = {"1": "1", "1,56,124": "1,5", "124": "124"}
"""Numbers of frames in place of those of images, and of clips of 17·n + 5 frames, of which a render has 124."""

NEEDS_A_GPU = {"--quantize_base": 1, "--offload_blocks": 1, "--offload_activations": 0, "--offload": 1}
"""Flags that are refused without a GPU or an extra, and how many values each has."""

FASTER = {
    "train": ["--dataloader_num_workers", "0"],
    "sample": ["--num_inference_steps", "2"],
}


def on_small_weights(arguments: list[str], names: dict[str, str]) -> Iterator[str]:
    """Yield the arguments of a call with other names, small values, and without what needs a GPU."""
    left = iter(arguments)
    for argument in left:
        for _ in range(NEEDS_A_GPU.get(argument, -1)):
            next(left)
        if argument in NEEDS_A_GPU:
            continue
        yield names.get(argument, argument)
        if argument in SMALL:
            next(left)
            yield SMALL[argument]
        elif argument in FRAMES:
            yield OTHER_FRAMES.get(next(left), FRAMES[argument])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("wan", "ltx", "qwen-image"),
        *(
            pytest.param(name, marks=pytest.mark.every)
            for name in ("hunyuan-video", "flux2", "z-image", "krea2", "minimax-h3")
        ),
    ],
)
def test_the_commands_of_a_page_train_and_render(
    family: str, media_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_pipeline("tiny", family=family)
    page = PAGES[f"docs/models/{family}.md"]
    calls = page.under(HEADING).calls()
    assert [script for script, _ in calls] == [
        "prepare",
        "plan",
        "cache",
        "train",
        "sample",
    ]
    hub = calls[1][1][0]
    names = {hub: "tiny", "clips": str(media_dir), "images": str(media_dir)}
    for script, arguments in calls:
        if script != "plan":  # whose own command scripts/benchmarks/benchmark_plans.py runs
            AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
            run_call(script, *on_small_weights(arguments, names), *FASTER.get(script, []))
    assert Path("trained/pytorch_lora_weights.safetensors").exists()
    assert Path(calls[-1][1][-1]).stat().st_size > 0
