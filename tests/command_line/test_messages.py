"""What scripts say: flags for arguments, misspelt flags, defaults, the hub, full disks, folders not writable."""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import pickle
import resource
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.optimization import SchedulerType
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from hf_bucketing import BucketingError, MediaError, PackingError, PlanError
from hf_bucketing.batching.rows import make_data
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.command_line.flags import FlagParser, from_flags
from hf_bucketing.command_line.script import hide_known_lines, run_script
from hf_bucketing.errors import FlagError, WriteError
from hf_bucketing.files import check_folder_writable, check_writable, writing
from hf_bucketing.hub import from_hub
from hf_bucketing.loaders import Replacements
from hf_bucketing.media import MediaSource, iter_frames, probe
from hf_bucketing.models import enable_packing
from hf_bucketing.plans import PackPlanConfig, plan_packs
from hf_bucketing.randomness import ROW
from hf_bucketing.training import TrainingConfig
from tests.conftest import ROOT, run, run_script_here
from tests.models.cases import Samples, make_model
from tests.test_scripts import SCRIPTS
from tests.training.training_cases import TINY_WAN


def training_flags() -> dict[str, str]:
    return FlagParser(None, TrainingConfig).flags


def test_a_message_names_arguments_in_python_and_only_flags_that_exist_in_scripts() -> None:
    with pytest.raises(
        PlanError, match=r'`max_tokens=64`.*Raise `max_tokens` to 128.*give `oversize="own_batch"`'
    ) as caught:
        plan_packs(np.array([10, 100]), PackPlanConfig(max_tokens=64), epoch=0, num_processes=1)
    said = caught.value.in_flags(training_flags())
    assert "exceeds --max_tokens 64" in said
    assert "Raise --max_tokens to 128, or cut long videos with max_frames of open_table" in said
    assert said.endswith("or use smaller sizes.")
    assert pickle.loads(pickle.dumps(caught.value)).in_flags(training_flags()) == said


class Unreadable(Dataset):
    column_names = (ROW,)

    def __init__(self, folder: Path) -> None:
        self.replacements = Replacements(self, log=folder / "log.jsonl")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.replacements.report(epoch=0, index=index, reason="a.mp4 is broken.", replacement=1)
        return index


def test_a_message_from_a_worker_names_flags_without_the_workers_traceback(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="`max_error_share`") as caught:
        list(DataLoader(Unreadable(tmp_path), num_workers=1))
    said = caught.value.in_flags(training_flags())
    assert said.startswith("1 of 10 samples could not be read")
    assert said.endswith("raise --max_error_share.")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"train_batch_size": 0}, "--train_batch_size must be at least 1"),
        ({"batching": "pack"}, "Packing needs --max_tokens"),
        ({"lr_warmup_steps": 9}, "--lr_scheduler constant_with_warmup"),
        ({"lora_alpha": 9}, "--lora_alpha is a setting of adapters"),
        ({"lora_format": "comfyui"}, "--lora_format is a setting of adapters"),
        ({"balance": "cost"}, "Omit --balance: no effect with --batching bucket"),
    ],
    ids=str,
)
def test_settings_of_training_are_named_as_flags(setting: dict, said: str) -> None:
    common = {"pretrained_model_name_or_path": "a", "dataset_dir": "b", "output_dir": "c"}
    with pytest.raises(BucketingError) as caught:
        TrainingConfig.from_flat(**common, **setting)
    assert said in caught.value.in_flags(training_flags())
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--learnig_rate", "did you mean --learning_rate?"),
        ("--learning-rate", "did you mean --learning_rate?"),
        ("--output_di=x", "did you mean --output_dir?"),
        ("--output", "there is no flag --output"),  # no abbreviations
        ("--qqqqqqqq", "there is no flag --qqqqqqqq ("),
    ],
)
def test_a_misspelt_flag_is_an_error_of_one_line_that_names_the_nearest(flag: str, hint: str) -> None:
    result = run_script_here("train_text_to_video.py", flag, "1", check=False)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert hint in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_one_spelling_a_help_and_its_default(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[FlagParser] = []
    monkeypatch.setattr("hf_bucketing.command_line.script.run_script", lambda main, make, **_: parsers.append(make()))
    run_script_here(script)
    (parser,) = parsers
    for action in parser._actions:
        shown = parser._get_formatter()._expand_help(action) if action.help else ""
        assert shown, action.dest
        assert all("-" not in option[2:] for option in action.option_strings if option.startswith("--"))
        if action.option_strings and not action.required and action.dest != "help":
            assert "default" in shown.lower(), action.dest


def test_fields_of_a_dataclass_become_flags_of_their_types() -> None:
    words = ["--pretrained_model_name_or_path", "a", "--dataset_dir", "b", "--output_dir", "c", "--longest_first"]
    words += ["--validation_prompts", "a dog", "a cat", "--ema_decay", "0.9", "--gradient_checkpointing", "false"]
    config = from_flags(TrainingConfig, FlagParser(None, TrainingConfig).parse_args(words))
    assert config == TrainingConfig.from_flat(
        pretrained_model_name_or_path="a", dataset_dir="b", output_dir="c", longest_first=True,
        validation_prompts=["a dog", "a cat"], ema_decay=0.9,
    )  # fmt: skip
    with pytest.raises(FlagError, match=r"lr_scheduler.*invalid choice.*cosine_with_restarts"):
        FlagParser(None, TrainingConfig).parse_args([*words, "--lr_scheduler", "cosin"])
    with pytest.raises(FlagError, match="expected true or false"):
        FlagParser(None, TrainingConfig).parse_args([*words, "--dry_run", "maybe"])


def test_the_schedules_are_those_that_diffusers_makes_from_these_settings() -> None:
    (action,) = (action for action in FlagParser(None, TrainingConfig)._actions if action.dest == "lr_scheduler")
    assert set(action.choices) == {kind.value for kind in SchedulerType} - {"piecewise_constant"}


def say(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    def main(args: argparse.Namespace) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py"])
        with pytest.raises(SystemExit) as end:
            run_script(main, lambda: FlagParser(None))
    return end.value.code, capsys.readouterr().err


def test_a_message_begins_a_line_after_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = tqdm(total=9, file=sys.stderr)
    bar.update()
    code, printed = say(BucketingError("The message."), capsys)
    assert code == 1
    assert printed.splitlines()[-1] == "BucketingError: The message."
    assert bar.disable, "it is closed"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_named_instead_of_a_traceback(code: int, capsys) -> None:
    end, printed = say(OSError(code, os.strerror(code), "/tmp/some.file"), capsys)
    assert end == 1
    assert printed.startswith("WriteError: /tmp/some.file cannot be written")


def test_other_errors_keep_their_traceback() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py"])
        with pytest.raises(FileNotFoundError):
            run_script(lambda args: Path("/nowhere/at/all").read_text(), lambda: FlagParser(None))


def test_a_disk_that_is_full_while_torch_writes_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with (
            pytest.raises(WriteError, match=r"the disk is full.*MiB are free"),
            writing(tmp_path),
        ):
            torch.save(torch.zeros(100_000), tmp_path / "weights.bin")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_folders_of_output_are_made_or_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "clip.mp4", None)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="is a file, not a folder"):
        check_writable(tmp_path / "file" / "clip.mp4")
    with pytest.raises(WriteError, match="name a file"):
        check_writable(tmp_path)
    check_folder_writable(tmp_path / "c" / "out")
    assert not (tmp_path / "c" / "out").exists()
    with pytest.raises(WriteError, match="name a folder"):
        check_folder_writable(tmp_path / "file")


def test_sampling_makes_its_folder_before_it_loads_a_model(tmp_path: Path) -> None:
    flags = ("nobody/nothing", "--output", tmp_path / "new" / "clip.mp4")
    result = run_script_here("sample_video.py", *flags, check=False)
    assert result.returncode == 1
    assert (tmp_path / "new").is_dir()
    assert "Could not reach the Hugging Face hub to download nobody/nothing" in result.stderr
    assert "If you meant a folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_verifying_a_model_that_cannot_be_downloaded_names_the_network() -> None:
    result = run_script_here("verify_packing.py", "nobody/nothing", check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("HubError: Could not reach")


def test_a_folder_that_no_repository_could_have_as_a_name_is_said_to_be_missing() -> None:
    missing = r"^runs/1/nothing is no name .* \S+runs/1/nothing does not exist\.$"
    with pytest.raises(BucketingError, match=missing), from_hub("runs/1/nothing"):
        validate_repo_id("runs/1/nothing")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_named() -> None:
    with pytest.raises(BucketingError, match=r"nobody/x cannot be loaded: bad"), from_hub("nobody/x"):
        raise ValueError("bad")
    code = (
        "import time\n"
        "time.sleep = lambda seconds: None\n"  # between the attempts of huggingface_hub
        "from hf_bucketing.columns import load_source\n"
        "from hf_bucketing import BucketingError\n"
        "try:\n    load_source('nobody/nothing')\n"
        "except BucketingError as error:\n    print(type(error).__name__, error)\n"
    )
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    printed = run([sys.executable, "-c", code], env=env).stdout
    assert printed.startswith("HubError Could not reach the Hugging Face hub to download nobody/nothing (http://127.")


@pytest.mark.parametrize("split", ["validation", "train[:"])
def test_a_wrong_split_is_an_error_of_one_line(split: str, media_dir, pipeline_dir, tmp_path: Path) -> None:
    flags = ("--dataset", media_dir, "--pretrained_model_name_or_path", pipeline_dir, "--output_dir", tmp_path / "out")
    result = run_script_here(
        "prepare_dataset.py", *flags, "--split", split, "--bucket_tokens", "60", "--bucket_frames", 1, check=False
    )
    assert result.returncode == 1
    assert split in result.stderr.strip().splitlines()[-1]


def test_columns_in_the_way_are_named_and_replaced_on_request(media_dir, pipeline_dir, tmp_path: Path) -> None:
    shutil.copytree(media_dir, tmp_path / "media")
    path = tmp_path / "media" / "metadata.jsonl"
    lines = [json.dumps({**json.loads(line), "aspect_ratio": 1}) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    flags = ("--dataset", tmp_path / "media", "--pretrained_model_name_or_path", pipeline_dir, "--target_fps", 8)
    flags = (*flags, "--output_dir", tmp_path / "out", "--bucket_tokens", "60", "--bucket_frames", "1,9")
    result = run_script_here("prepare_dataset.py", *flags, check=False)
    assert result.returncode == 1
    assert "Pass --overwrite" in result.stderr
    run_script_here("prepare_dataset.py", *flags, "--overwrite")


def test_pack_refuses_a_scalar_timestep_and_a_list_of_conditioning_by_name() -> None:
    samples = Samples()
    packing = enable_packing(make_model(), strip_length=16)
    common = {"text": samples.text}
    for timesteps in (torch.tensor(500.0), 500.0):
        with pytest.raises(PackingError, match=r"`timesteps` must be a tensor of shape \(\d,\)"):
            packing.pack(samples.latents, timesteps=timesteps, **common)
    for conditioning in ([torch.ones(4)], {"fps": [8.0]}):
        with pytest.raises(PackingError, match="`conditioning` must be a mapping of names to tensors"):
            packing.pack(samples.latents, timesteps=samples.timesteps, conditioning=conditioning, **common)


def encoded(images: list[Image.Image], kind: str) -> MediaSource:
    data = io.BytesIO()
    options = {"save_all": True, "append_images": images[1:], "duration": 100} if len(images) > 1 else {}
    images[0].save(data, kind, **options)
    return MediaSource.from_cell(data.getvalue(), name=f"clip.{kind.lower()}")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_are_refused_by_name_and_stills_of_their_formats_are_images(kind: str) -> None:
    frames = [Image.fromarray(np.full((8, 12, 3), 40 * number, np.uint8)) for number in range(3)]
    for read in (probe, lambda source: list(iter_frames(source, [0.0]))):
        with pytest.raises(MediaError, match=rf"clip.{kind.lower()} is an animation \({kind}, 3 frames\).*convert it"):
            read(encoded(frames, kind))
    assert probe(encoded(frames[:1], kind))[:3] == (12, 8, 1)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_images_of_16_bits_keep_their_range(kind: str) -> None:
    grey = np.linspace(0, 65535, 96).astype(np.uint16).reshape(8, 12)
    (frame,) = iter_frames(encoded([Image.fromarray(grey)], kind), [0.0])
    assert frame.shape == (8, 12, 3)
    assert np.abs(frame - grey[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize("mode", ["F", "I"])
def test_grey_images_of_unknown_range_are_refused_by_name(mode: str) -> None:
    with pytest.raises(MediaError, match=r"clip.tiff holds grey values of 32 bits"):
        probe(encoded([Image.new(mode, (8, 8))], "TIFF"))


def test_packs_train_from_a_prepared_folder_that_cannot_be_written(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared_dir, tmp_path / "prepared", ignore=shutil.ignore_patterns("cache-*"))
    before = sorted(path.name for path in (tmp_path / "prepared").iterdir())
    # Tests may run as root, whom permissions do not keep from writing.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    config = TrainingConfig.from_flat(
        pretrained_model_name_or_path=str(pipeline_dir), dataset_dir=str(tmp_path / "prepared"),
        output_dir=str(tmp_path / "out"), batching="pack", max_tokens=640, dataloader_num_workers=0,
    )  # fmt: skip
    data = make_data(config, PreparedDataset.load(prepared_dir).spec, TINY_WAN)
    assert data.num_tokens.sum() > 0
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == before


def test_a_full_disk_is_one_line_also_from_a_thread_and_other_faults_of_threads_are_tracebacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> None:
        raise error

    def main(args: argparse.Namespace) -> None:
        for error in (OSError(errno.ENOSPC, "No space left on device", "events"), ValueError("another fault")):
            thread = threading.Thread(target=fail, args=(error,), name="writer")
            thread.start()
            thread.join()

    hook, threading.excepthook = threading.excepthook, threading.__excepthook__
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["script"])
            run_script(main, lambda: FlagParser("Fails."))
    finally:
        threading.excepthook = hook
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("writer ended: events cannot be written: the disk is full")
    assert others[0] == "Exception in thread writer:"
    assert others[-1] == "ValueError: another fault"


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("make_tiny_pipeline.py", ("--output_dir", "tiny")),
        ("plan_memory.py", ("pipeline", "--gpu_memory", 24, "--sample_size", 1, 64, 64)),
    ],
)
def test_scripts_do_not_print_what_other_libraries_warn_users_of_in_vain(
    script: str, flags: tuple[object, ...], pipeline_dir: Path, tmp_path: Path
) -> None:
    """About torchvision, which nothing here needs, and about norms in float32 between activations in bf16."""
    (tmp_path / "pipeline").symlink_to(pipeline_dir)
    result = run([sys.executable, ROOT / "scripts" / script, *flags], cwd=tmp_path)
    vain = ("torchvision", "Warn", "Fail")
    assert not [line for line in result.stderr.splitlines() if any(word in line for word in vain)]


def test_other_lines_of_a_logger_are_printed(caplog: pytest.LogCaptureFixture) -> None:
    hide_known_lines()
    logger = logging.getLogger("transformers.utils.import_utils")
    logger.propagate, before = True, logger.propagate
    try:
        logger.warning("`A` requires torchvision (not installed); falling back to `B` for backward compatibility.")
        logger.warning("`A` requires sentencepiece (not installed).")
    finally:
        logger.propagate = before
    assert [record.getMessage() for record in caplog.records] == ["`A` requires sentencepiece (not installed)."]
