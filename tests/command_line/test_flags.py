"""Flags from dataclasses: names, types, help, defaults and choices written once."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hf_bucketing import AssignmentRule, BucketingError
from hf_bucketing.command_line.flags import FlagParser, from_flags
from hf_bucketing.errors import FlagError
from hf_bucketing.loaders.faults import FaultRule
from hf_bucketing.media import ViewRule
from hf_bucketing.optimizers import OptimizerConfig
from hf_bucketing.planner.options import plan_options
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.settings import build, changed, check_literals, flatten, not_default, parts_of, settings_in
from hf_bucketing.training import BatchConfig, TrainingConfig

PATHS = {"pretrained_model_name_or_path": "m", "dataset_dir": "d", "output_dir": "o"}


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner settings.

    Args:
        mode (`"fast"` or `"safe"`, *optional*): Way to run, as
            [`Outer`][x.Outer] says; see `limit`, 50 % of all.
        limit (`int` or `"auto"`): Largest number.
    """

    mode: Literal["fast", "safe"] | None = None
    limit: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_literals(self)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outer settings.

    Args:
        name (`str`): Name of the run.
        inner ([`Inner`]): Inner settings.

    Raises:
        BucketingError: Never.
    """

    name: str
    inner: Inner = field(default_factory=lambda: Inner(limit=3))


def test_nested_settings_become_flags_of_their_type_help_and_default() -> None:
    parser = FlagParser(None, Outer)
    assert from_flags(Outer, parser.parse_args(["--name", "a"])) == Outer(name="a")
    args = parser.parse_args(["--name", "a", "--limit", "7", "--mode", "safe"])
    assert from_flags(Outer, args) == Outer(name="a", inner=Inner(mode="safe", limit=7))
    assert from_flags(Outer, parser.parse_args(["--name", "a", "--limit", "auto"])).inner.limit == "auto"
    for words, message in (
        ([], "required: --name"),
        (["--name", "a", "--mode", "slow"], "invalid choice: 'slow'"),
        (["--name", "a", "--limit", "many"], "expected int or auto, got 'many'"),
    ):
        with pytest.raises(FlagError, match=message):
            parser.parse_args(words)
    shown = " ".join(parser.format_help().split())
    assert "--name NAME Name of the run." in shown
    assert "Way to run, as Outer says; see --limit, 50 % of all. (default: none)" in shown
    assert "Largest number. (default: 3)" in shown
    assert shown.index("Outer settings:") < shown.index("Inner settings:")


def test_a_flag_of_a_list_may_be_repeated_and_replaces_the_list_of_a_file(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Listed:
        """Listed settings.

        Args:
            names (`list` of `str`): Names.
        """

        names: list[str] = field(default_factory=lambda: ["default"])

    parser = FlagParser(None, Listed)
    parser.add_config("script", others=dict)
    (tmp_path / "run.yaml").write_text("names: [of, file]\n")
    file = ["--config", str(tmp_path / "run.yaml")]
    for words, names in (
        ([], ["default"]),
        (["--names", "a", "b", "--names", "c"], ["a", "b", "c"]),
        (["--names", "a"], ["a"]),
        (file, ["of", "file"]),
        ([*file, "--names", "a", "--names", "b"], ["a", "b"]),
    ):
        assert from_flags(Listed, parser.parse_args(words)) == Listed(names=names)


def test_a_skipped_setting_has_no_flag_and_is_given_to_the_configuration() -> None:
    parser = FlagParser(None)
    parser.add_settings(Outer, skip=["name"])
    assert "--name" not in parser.flags.values()
    assert from_flags(Outer, parser.parse_args([]), name="b") == Outer(name="b")


def test_literals_are_checked_against_their_annotation() -> None:
    with pytest.raises(BucketingError, match='`mode` must be one of "fast", "safe", got \'slow\''):
        Inner(mode="slow")
    with pytest.raises(BucketingError, match="`remainder` must be one of"):
        BatchConfig(remainder="rest")
    with pytest.raises(BucketingError, match="`on_error` must be one of"):
        FaultRule(on_error="ignore")
    for limits in ({"max_errors": -1}, {"max_error_share": 1.5}):
        with pytest.raises(BucketingError, match=f"`{next(iter(limits))}` must be"):
            FaultRule(**limits)


def test_settings_survive_flattening_and_json() -> None:
    config = TrainingConfig(
        **PATHS, views=ViewRule(random_crop=False), optimizer=OptimizerConfig(lr_scheduler="cosine"), seed=3
    )
    flat = config.flat()
    assert flat == flatten(config)
    assert (flat["random_crop"], flat["lr_scheduler"], flat["seed"]) == (False, "cosine", 3)
    assert TrainingConfig.from_flat(**json.loads(json.dumps(flat))) == config
    assert changed(config, random_crop=True).optimizer == config.optimizer
    assert not_default(config, "random_crop", "lr_scheduler", "flip_probability") == ["random_crop", "lr_scheduler"]


def test_no_two_settings_of_training_have_one_name_and_each_has_a_help() -> None:
    settings = list(settings_in(TrainingConfig))
    assert len({setting.name for setting in settings}) == len(settings)
    assert [setting.name for setting in settings if not setting.help] == []


def test_a_setting_in_the_wrong_place_or_misspelt_is_refused_with_the_right_one() -> None:
    with pytest.raises(BucketingError, match=r"give optimizer=OptimizerConfig\(learning_rate=…\), or .*from_flat"):
        TrainingConfig(**PATHS, learning_rate=1.0)
    for make in (TrainingConfig, TrainingConfig.from_flat):
        with pytest.raises(BucketingError, match="no setting max_token; did you mean max_tokens"):
            make(**PATHS, max_token=640)
    with pytest.raises(BucketingError, match="TrainingConfig has no setting speed"):
        build(TrainingConfig, {**PATHS, "speed": 1})


def test_a_number_that_is_not_finite_is_refused_unless_infinity_is_a_limit_that_nothing_reaches() -> None:
    numbers = [setting for setting in settings_in(TrainingConfig) if float in parts_of(setting.hint)]
    assert len(numbers) > 20
    for name in (setting.name for setting in numbers):
        with pytest.raises(BucketingError, match=f"`{name}` must be a finite number, got nan"):
            build(TrainingConfig, {**PATHS, name: math.nan})
    with pytest.raises(BucketingError, match="`learning_rate` must be a finite number, got inf"):
        build(TrainingConfig, {**PATHS, "learning_rate": math.inf})
    assert build(TrainingConfig, {**PATHS, "max_grad_norm": math.inf}).optimizer.max_grad_norm == math.inf
    assert build(AssignmentRule, {"max_upscale": math.inf}).max_upscale == math.inf
    parser = FlagParser("It plans.")
    parser.add_argument("--gpu_memory", type=float)
    assert parser.parse_args(["--gpu_memory", "1e2"]).gpu_memory == 100
    for text, message in (("nan", "expected a finite number, got 'nan'"), ("x", "invalid float value: 'x'")):
        with pytest.raises(FlagError, match=f"--gpu_memory: {message}"):
            parser.parse_args(["--gpu_memory", text])
    for memory in (math.nan, math.inf, 0, -8):
        with pytest.raises(BucketingError, match=f"`gpu_memory` must be above 0 GiB, got {memory}"):
            plan_options(
                "nowhere", PlanConfig.from_flat(mixed_precision="bf16", train_batch_size=1), gpu_memory=memory
            )
