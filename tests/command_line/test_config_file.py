"""Settings in a YAML file: what flags take of it, and errors that name the line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings, strategies as st

from hf_bucketing.columns.settings import heights_and_widths
from hf_bucketing.command_line.config_file import read_config_file, write_config
from hf_bucketing.command_line.flags import FlagParser, from_flags, numbers
from hf_bucketing.errors import FlagError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a script.

    Args:
        model (`str`): Model.
        out (`str`): Output.
        rate (`float`): Rate.
        steps (`int`, *optional*): Steps.
        precision (`"no"` or `"bf16"`): Precision.
        tokens (`int` or `"auto"`, *optional*): Tokens.
        fast (`bool`): Fast.
        prompts (`list` of `str`, *optional*): Prompts.
        frames (`list` of `int`): Frames.
        sizes (list of pairs, *optional*): Sizes.
    """

    model: str
    out: str
    rate: float = 0.1
    steps: int | None = None
    precision: Literal["no", "bf16"] = "bf16"
    tokens: int | Literal["auto"] | None = None
    fast: bool = False
    prompts: list[str] | None = None
    frames: list[int] = field(default_factory=lambda: [1], metadata={"parse": numbers})
    sizes: list[tuple[int, int]] | None = field(default=None, metadata={"parse": heights_and_widths})


SCRIPTS = {
    "train": {"model", "out", "rate", "steps", "precision", "tokens", "fast", "prompts", "frames", "sizes"},
    "prepare": {"num_proc", "precision"},
}


def parse(tmp_path: Path, text: str, *flags: str, **options: Any) -> Options:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    parser = FlagParser("A script.", Options)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_config("train", others=lambda: SCRIPTS, **options)
    args = parser.parse_args(["--config", str(tmp_path / "run.yaml"), *flags])
    return from_flags(Options, args)


def test_a_relative_path_begins_at_the_working_directory_or_at_the_files_folder_but_not_at_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/demo/a", "file/demo/b", "here/both", "file/both"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    def dataset(text: str) -> str:
        (tmp_path / "file" / "run.yaml").write_text(f"seed: 1\ndataset: {text}\nsources:\n- dataset: {text}\n")
        plain = read_config_file("../file/run.yaml", find_paths=True).plain()
        assert plain["sources"] == [{"dataset": plain["dataset"]}]
        return plain["dataset"]

    assert dataset("demo/a") == "demo/a"
    assert dataset("demo/b") == str(tmp_path / "file" / "demo" / "b")
    assert dataset("owner/name") == "owner/name"
    assert dataset("https://host/a.csv") == "https://host/a.csv"
    assert dataset(str(tmp_path / "here" / "both")) == str(tmp_path / "here" / "both")
    places = f"{tmp_path / 'file' / 'both'} or {tmp_path / 'here' / 'both'}"
    with pytest.raises(FlagError, match=f"run.yaml, line 2: dataset both may be {places}; both exist"):
        dataset("both")
    (tmp_path / "here" / "both").rmdir()
    (tmp_path / "here" / "both").symlink_to(tmp_path / "file" / "both")
    assert dataset("both") == "both"


def test_paths_of_adapters_are_found_beside_the_file_with_their_strengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("file/a.safetensors", "here/c.safetensors"):
        (tmp_path / name).touch()
    texts = ["a.safetensors=0.5", "a.safetensors", "c.safetensors=-1", "owner/name=0.5", "a.safetensors=x"]
    (tmp_path / "file" / "run.yaml").write_text(write_config({"frozen_adapters": texts}))
    found = read_config_file("../file/run.yaml", find_paths=True).plain()["frozen_adapters"]
    file = tmp_path / "file"
    beside = [f"{file / 'a.safetensors'}=0.5", str(file / "a.safetensors")]
    whole = f"{tmp_path / 'here' / 'c.safetensors'}=-1"  # which writing makes whole
    assert found == [*beside, whole, "owner/name=0.5", "a.safetensors=x"]


MODEL = "model: m\nout: o\n"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("rate: 1e-4", "rate", 1e-4),
        ("rate: 3", "rate", 3.0),
        ("rate: '.5'", "rate", 0.5),
        ("steps: 1_000", "steps", 1000),
        ("steps: null", "steps", None),
        ("steps:", "steps", None),
        ("precision: no", "precision", "no"),
        ("precision: 'no'", "precision", "no"),
        ("tokens: auto", "tokens", "auto"),
        ("tokens: 64", "tokens", 64),
        ("tokens: ~", "tokens", None),
        ("fast: true", "fast", True),
        ("fast: yes", "fast", True),
        ("fast: False", "fast", False),
        ("prompts: [a, 'b, c']", "prompts", ["a", "b, c"]),
        ("prompts:\n  - 1:30\n  - none", "prompts", ["1:30", "none"]),
        ("prompts: one, with a comma", "prompts", ["one, with a comma"]),
        ("frames: [1, 17]", "frames", [1, 17]),
        ("frames: 1,17", "frames", [1, 17]),
        ("frames: 17", "frames", [17]),
        ("sizes: [[480, 832], [720, 1280]]", "sizes", [(480, 832), (720, 1280)]),
        ("sizes: none", "sizes", []),
        ("rate: 5\ntrain:\n  rate: 6", "rate", 6.0),
        ("steps: 5\ntrain: {steps: null}", "steps", None),
        ("num_proc: 4\nprepare: {precision: bf16}\nsources: [{dataset: a}]", "precision", "bf16"),
    ],
)
def test_values_have_the_types_of_flags(line: str, name: str, value: object, tmp_path: Path) -> None:
    options = parse(tmp_path, MODEL + line)
    assert getattr(options, name) == value
    assert type(getattr(options, name)) is type(value)


def test_flags_override_the_file_which_may_give_required_ones(tmp_path: Path) -> None:
    options = parse(tmp_path, "model: m\nout: o\nrate: 2\nprompts: [a]", "--rate", "3", "--prompts", "x", "y")
    assert (options.model, options.rate, options.prompts) == ("m", 3.0, ["x", "y"])
    assert parse(tmp_path, "out: o\n", "--model=n").model == "n"
    with pytest.raises(FlagError, match="required: --model"):
        parse(tmp_path, "rate: 2\nout: o")
    with pytest.raises(FlagError, match="--config needs a file"):
        parse(tmp_path, MODEL, "--config")


def test_a_flag_may_have_other_names_in_files(tmp_path: Path) -> None:
    names = {"out": ("cached_dir", "place")}
    assert parse(tmp_path, "model: m\nplace: p\nout: of another script", names=names).out == "p"
    assert parse(tmp_path, "model: m\nplace: p\ncached_dir: c", names=names).out == "c"
    assert parse(tmp_path, "model: m\nplace: p\ncached_dir: null", names=names).out == "p"
    assert parse(tmp_path, "model: m\nplace: p\ntrain: {out: o}", names=names).out == "o"
    assert parse(tmp_path, "model: m\nplace: p\ncached_dir: c", "--out", "f", names=names).out == "f"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rat: 1", r"line 3: there is no setting rat; did you mean rate\?"),
        ("steps-: 1", r"line 3: there is no setting steps-; did you mean steps\?"),
        ("prepare: {num_procs: 1}", r"line 3: there is no setting num_procs; did you mean num_proc\?"),
        ("train: 5", "line 3: train must hold settings of that script"),
        ("capacity: 5", "line 3: there is no setting capacity"),
        ("rate: fast", "line 3: rate must be of type float, got 'fast'"),
        ("steps: 1.5", "line 3: steps must be of type int"),
        ("steps: [1]", "line 3: steps takes one value, not a list"),
        ("steps: {a: 1}", "line 3: steps must be a value"),
        ("rate:", "line 3: rate has no value"),
        (
            "precision: fp8",
            "line 3: precision must be one of no, bf16, got 'fp8'. .* below train: train, prepare have",
        ),
        ("train:\n  precision: fp8", "line 4: precision must be one of no, bf16, got 'fp8'.$"),
        ("tokens: few", "line 3: tokens is not valid: expected int or auto"),
        ("fast: 2", "line 3: fast is not valid: expected true or false"),
        ("prompts: []", "line 3: prompts is an empty list"),
        ("prompts: [[a]]", "line 3: prompts must be a value, or a list of values"),
        ("frames: [a]", "line 3: frames must be of type numbers"),
        ("overwrite: maybe", "line 3: overwrite is not valid"),
        ("rate: 1\n\nrate: 2", "line 5: rate is given twice, before on line 3"),
        ("rate: [1", "line 3 is not YAML"),
        ("\trate: 1", "line 3 is not YAML"),
        ("? [a]\n: 1", "line 3: the name of a setting must be a word, not a list"),
        ("rate: &a [*a]", "line 3: a value contains itself"),
    ],
    ids=str,
)
def test_errors_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=message):
        parse(tmp_path, MODEL + text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "must be a mapping of settings, .* not a list"),
        (b"text", "must be a mapping of settings, .* not a single value"),
        (b"a: \xff", "it is not UTF-8 text"),
        (None, "there is no such file, and no such preset of a model and a GPU"),
    ],
    ids=str,
)
def test_a_file_without_settings_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(FlagError, match=message):
        read_config_file(str(tmp_path / "run.yaml"))


def test_a_preset_is_named_by_model_and_gpu_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_preset = read_config_file("wan-14b/24gb-lora").plain()
    assert of_preset["pretrained_model_name_or_path"] == "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    with pytest.raises(FlagError, match=r"no such preset of a model and a GPU; did you mean wan-14b/24gb-lora\?"):
        read_config_file("wan-14b/24gb_lora")
    (tmp_path / "wan-14b").mkdir()
    (tmp_path / "wan-14b" / "24gb-lora").write_text("lora_rank: 3\n")
    assert read_config_file("wan-14b/24gb-lora").plain() == {"lora_rank": "3"}, "a file of that name goes first"


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["null", "~", "no", "1:30", "1e-4", "- a", "# b", "a: b", "[c", "", " d ", "'e'", "é", "line\nbreak", "x" * 200]
)


@settings(max_examples=60)
@given(st.dictionaries(st.text("abc_", min_size=1), texts | st.none() | st.lists(texts, max_size=3), min_size=1))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(write_config(values, comment="Two\nlines"), encoding="utf-8")
    assert read_config_file(str(path)).plain() == values


def test_numbers_are_written_in_full_and_without_quotes(tmp_path: Path) -> None:
    values = {"a": 1e-05, "b": 0.1 + 0.2, "c": True, "d": "no", "e": Path("x/y"), "f": [(480, 832)], "g": float("inf")}
    text = write_config(values)
    assert "a: 1e-05\nb: 0.30000000000000004\nc: true\nd: no\ne: x/y\n" in text
    (tmp_path / "a.yaml").write_text(text)
    assert read_config_file(str(tmp_path / "a.yaml")).plain()["f"] == [["480", "832"]]
