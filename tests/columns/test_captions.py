"""Captions that are not text: counted, named, an error, a rejection, or empty."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, IterableDataset, List, Value, load_dataset

from hf_bucketing import BucketTable, ColumnError, LatentSpec, Size, open_table
from hf_bucketing.columns import BucketColumns, CaptionTexts, PreparedDataset, check_captions, map_columns
from tests.conftest import run_script_here

pytestmark = pytest.mark.usefixtures("files_anywhere")

FILES = [f"clips/{number}.mp4" for number in range(5)]
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def rows_with(captions: list, kind: pa.DataType | None = None) -> Dataset:
    return Dataset(pa.table({"caption": pa.array(captions, kind), "file": FILES[: len(captions)]}))


def test_texts_are_left_as_they_are() -> None:
    dataset = rows_with(["a dog", "ein Hündchen", "x"])
    check = check_captions(dataset, "caption")
    assert check.dataset is dataset
    assert (len(check.rows), check.summary) == (0, "")


@pytest.mark.parametrize(
    ("captions", "template", "expected"),
    [
        (["a dog", "", "a cat"], None, ["a dog barks", "purrs", "a cat"]),
        (["a dog", None, "a cat"], "TOK, {caption}", ["TOK, a dog barks", "TOK, purrs", "TOK, a cat"]),
        ([["a dog", "two dogs"], [], ["a cat"]], None, [["a dog barks", "two dogs barks"], ["purrs"], ["a cat"]]),
    ],
)
def test_the_text_of_the_sound_follows_each_caption_in_rows_and_streams(captions, template, expected) -> None:
    sounds = ["barks", "purrs", None]
    dataset = rows_with(captions).add_column("sound", sounds)
    settings = {"on_error": "empty", "template": template, "audio_column": "sound"}
    assert [*check_captions(dataset, "caption", **settings).dataset["caption"]] == expected
    function = CaptionTexts(("caption",), **settings)
    assert function.input_columns == ("caption", "sound")
    assert function({"caption": captions, "sound": sounds})["caption"] == expected


def test_what_is_no_text_about_a_sound_is_refused() -> None:
    for sounds, what in (([["barks"], []], "a list"), ([3, "barks"], "a number")):
        with pytest.raises(ColumnError, match=f"'sound' must hold one text about the sound of each row.*got {what}"):
            CaptionTexts(("caption",), audio_column="sound")({"caption": ["a", "b"], "sound": sounds})
    with pytest.raises(ColumnError, match="no caption column 'sound'"):
        check_captions(rows_with(["a"]), "caption", audio_column="sound")


def test_missing_and_blank_captions_are_counted_and_named_by_row_and_file() -> None:
    with pytest.raises(ColumnError) as raised:
        check_captions(rows_with(["a", None, "", " \n", None]), "caption", media_column="file")
    message = str(raised.value)
    assert message.startswith("4 of 5 captions in the column 'caption' are not text: ")
    assert "2 missing (row 1: clips/1.mp4, row 4: clips/4.mp4)" in message
    assert "2 empty (row 2: clips/2.mp4, row 3: clips/3.mp4)" in message
    assert '`on_error="reject"`' in message


def test_many_rows_are_named_by_the_first_three() -> None:
    check = check_captions(rows_with([None] * 5), "caption", on_error="empty")
    assert "5 missing (row 0, row 1, row 2, …)" in check.summary
    assert check.dataset["caption"][:] == [""] * 5


def test_bytes_become_texts_unless_they_are_not_utf8() -> None:
    good = check_captions(rows_with(["ü".encode(), b"x"], pa.binary()), "caption")
    assert good.dataset["caption"][:] == ["ü", "x"]
    assert good.dataset.features["caption"] == Value("string")
    bad = rows_with([b"x", "ü".encode("latin-1"), None], pa.binary())
    check = check_captions(bad, "caption", on_error="empty", media_column="file")
    assert check.dataset["caption"][:] == ["x", "", ""]
    assert "1 not UTF-8 text (row 1: clips/1.mp4)" in check.summary
    assert check.dataset.column_names == ["caption", "file"]


def test_large_strings_become_strings() -> None:
    check = check_captions(rows_with(["a", "b"], pa.large_string()), "caption")
    assert check.dataset.features["caption"] == Value("string")
    assert check.dataset["caption"][:] == ["a", "b"]


@pytest.mark.parametrize(
    ("captions", "feature", "message"),
    [
        ([0, 1], ClassLabel(names=["dog", "cat"]), "a ClassLabel: numbers that stand for dog, cat"),
        ([3, 4], None, "a column of int64"),
        ([0.5, 1.5], None, "a column of float64"),
        ([True, False], None, "a column of bool"),
        ([[["a", "b"]], [["c"]]], None, "a list whose entries are not texts: each is a list"),
        ([[1, 2], [3]], None, "a list whose entries are not texts: each is a column of int64"),
        ([[{"text": "a"}]] * 2, None, "a list whose entries are not texts: each is a dict with the keys text"),
        ([{"short": "a", "long": "b"}] * 2, None, "a dict with the keys"),
    ],
    ids=["ClassLabel", "int", "float", "bool", "lists", "ints", "dicts", "dict"],
)
@pytest.mark.parametrize("on_error", ["raise", "empty", "reject"])
def test_a_column_that_can_hold_no_text_is_an_error_that_names_its_type(captions, feature, message, on_error) -> None:
    features = None if feature is None else Features(caption=feature)
    dataset = Dataset.from_dict({"caption": captions}, features=features)
    with pytest.raises(ColumnError, match=message):
        check_captions(dataset, "caption", on_error=on_error)


def test_a_column_of_nothing_is_missing_captions() -> None:
    assert check_captions(rows_with([None, None]), "caption", on_error="empty").dataset["caption"][:] == ["", ""]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this version of datasets reads no mixed columns")
def test_values_of_several_types_in_one_json_column_are_told_apart(tmp_path: Path) -> None:
    values = ['say "hi"', 3, [["u"], "v"], None, {"a": 1}, True, "ü\n", []]
    lines = [json.dumps({"file": f"{number}.mp4", "caption": value}) for number, value in enumerate(values)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    dataset = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    check = check_captions(dataset, "caption", on_error="reject", media_column="file")
    assert check.dataset["caption"][:] == [['say "hi"'], [""], ["v"], [""], [""], [""], ["ü\n"], [""]]
    found = {problem: rows.tolist() for problem, rows in check.problems.items()}
    assert found == {"a number": [1], "a list": [2], "missing": [3, 7], "a dict": [4], "true or false": [5]}
    assert "1 a list (row 2 caption 0: 2.mp4)" in check.summary


def test_a_row_may_have_several_captions() -> None:
    lists = rows_with([["a", "b"], ["c"]])
    check = check_captions(lists, "caption")
    assert check.dataset is lists
    large = check_captions(rows_with([["a", "b"], ["c"]], pa.large_list(pa.large_string())), "caption").dataset
    assert large.features["caption"] == List(Value("string"))
    assert large["caption"][:] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.list_(pa.binary()), pa.list_(pa.binary(), 2)], ids=str)
def test_entries_that_are_no_text_are_named_by_row_and_entry(kind: pa.DataType) -> None:
    fixed = pa.types.is_fixed_size_list(kind)
    cells = [["a", None], None, [" ", "ü"], [None, None], ["x", "y"]] + ([] if fixed else [[]])
    rows = Dataset(pa.table({"caption": pa.array(cells, kind), "file": [f"{row}.mp4" for row in range(len(cells))]}))
    with pytest.raises(ColumnError) as raised:
        check_captions(rows, "caption", media_column="file")
    missing = "4 missing (row 0 caption 1: 0.mp4, row 1 caption 0: 1.mp4, row 3 caption 0: 3.mp4, …)"
    assert (missing if fixed else missing.replace("4", "5", 1)) in str(raised.value)
    assert "1 empty (row 2 caption 0: 2.mp4)" in str(raised.value)
    emptied = check_captions(rows, "caption", on_error="empty").dataset
    assert emptied["caption"][:] == [["a"], [""], ["ü"], [""], ["x", "y"], [""]][: len(cells)]
    assert check_captions(rows, "caption", on_error="reject").rows.tolist() == [0, 1, 2, 3, 5][: len(cells) - 1]


def test_several_columns_become_one_list_and_a_row_may_lack_some() -> None:
    rows = Dataset(pa.table({"short": ["a", None, ""], "long": [["b", "c"], ["d"], [None]], "file": ["0", "1", "2"]}))
    check = check_captions(rows, ["short", "long"], on_error="empty", media_column="file")
    assert check.dataset["short"][:] == [["a", "b", "c"], ["d"], [""]]
    assert check.dataset.column_names == rows.column_names
    assert check.rows.tolist() == [2]
    assert "captions in the columns 'short' and 'long'" in check.summary


def test_a_template_is_put_around_every_caption() -> None:
    template = "TOK, {caption}"
    check = check_captions(rows_with(["a dog", None, "x"]), "caption", on_error="empty", template=template)
    assert check.dataset["caption"][:] == ["TOK, a dog", "TOK", "TOK, x"]
    several = check_captions(rows_with([["a", "b"], ["c"]]), "caption", template="{caption}.").dataset
    assert several["caption"][:] == [["a.", "b."], ["c."]]
    for wrong in ("TOK", "{caption} {caption}"):
        with pytest.raises(ColumnError, match=r"`caption_template` must hold \{caption\} once"):
            check_captions(rows_with(["a"]), "caption", template=wrong)


def test_columns_of_shuffled_rows_are_replaced_without_copying_the_others() -> None:
    rows = rows_with(["a", None, "b"]).shuffle(seed=0)
    check = check_captions(rows, "caption", on_error="empty", template="{caption}!")
    assert [text.strip("!") or None for text in check.dataset["caption"]] == rows["caption"][:]
    assert check.dataset.data.column("file").equals(rows.data.column("file"))


def test_rows_of_a_stream_get_texts_by_the_same_rules() -> None:
    cells = [["a", {"b": 1}], "c", None, b"d", 3]
    rows = [{"caption": cell, "width": 8, "height": 8, "num_frames": 1} for cell in cells]
    stream = IterableDataset.from_generator(lambda: iter(rows))

    def mapped(**options):
        return [*stream.map(CaptionTexts(("caption",), **options), batched=True, batch_size=2)]

    assert [row["caption"] for row in mapped(on_error="empty")] == [["a"], ["c"], "", "d", ""]
    assert [row["width"] for row in mapped(on_error="reject", template="{caption}")] == [-2, 8, -2, 8, -2]
    with pytest.raises(ColumnError, match=r"1 a dict \(row 0 caption 1\). Rows are counted from the first of their"):
        mapped()


def test_mistakes_in_calling_are_said() -> None:
    with pytest.raises(ColumnError, match="no caption column 'text'"):
        check_captions(rows_with(["a"]), "text")
    with pytest.raises(ColumnError, match="`on_error` must be"):
        check_captions(rows_with(["a"]), "caption", on_error="ignore")


def test_a_checked_subset_names_its_own_rows() -> None:
    dataset = rows_with(["a", None, "b", None, "c"]).select([4, 3, 0])
    check = check_captions(dataset, "caption", on_error="empty", media_column="file")
    assert check.rows.tolist() == [1]
    assert "row 1: clips/3.mp4" in check.summary


def test_rejected_rows_have_no_bucket_and_no_tokens_in_buckets_and_in_packs() -> None:
    captions = ["a", None, "b"]
    check = check_captions(rows_with(captions), "caption", on_error="reject")
    dataset = check.dataset
    for name, size in (("width", [64, 64, -1]), ("height", [64, 64, -1]), ("num_frames", [1, 1, -1])):
        dataset = dataset.add_column(name, np.array(size))
    marked = check.mark(dataset)
    assert marked["caption_problem"][:] == [None, "missing", None]
    expected = ["none", "caption", "unreadable"]
    for table in (BucketTable(sizes=(Size(1, 64, 64),)), open_table(SPEC)):
        mapped = map_columns(marked, BucketColumns(table, SPEC))
        assert mapped["rejection"][:] == expected
        assert mapped["num_tokens"][:] == [16, 0, 0]
        assert mapped["bucket_id"][1] == -1
    assert check_captions(rows_with(captions), "caption", on_error="empty").mark(dataset) is dataset
    with pytest.raises(ColumnError, match="3 rows that were checked"):
        check.mark(dataset.select([0, 1]))
    with pytest.raises(ColumnError, match="width"):
        check.mark(check.dataset)


@pytest.fixture
def faulty_dir(tmp_path: Path, media_dir: Path) -> Path:
    """Six samples whose captions 1, 2 and 4 are missing, null and blank."""
    rows = [json.loads(line) for line in (media_dir / "metadata.jsonl").read_text().splitlines()[:6]]
    rows = [{**row, "file_name": str(media_dir / row["file_name"])} for row in rows]
    del rows[1]["caption"]
    rows[2]["caption"], rows[4]["caption"] = None, " "
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "faulty"


def prepare(dataset: Path, pipeline: Path, output: Path, *flags: object, check: bool = True):
    return run_script_here(
        "prepare_dataset.py",
        *flags,
        dataset=dataset,
        pretrained_model_name_or_path=pipeline,
        output_dir=output,
        bucket_tokens="60,110",
        bucket_frames="1,9,17",
        target_fps=8,
        check=check,
    )


@pytest.mark.slow
def test_preparing_ends_at_missing_captions(faulty_dir, pipeline_dir, tmp_path: Path) -> None:
    result = prepare(faulty_dir, pipeline_dir, tmp_path / "out", check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "3 of 6 captions" in last
    assert "0001.mp4" in last
    assert "--on_caption_error reject, or train them without a text with --on_caption_error empty" in last
    assert not (tmp_path / "out").exists()


def test_preparing_rejects_or_empties_missing_captions_when_asked(faulty_dir, pipeline_dir, tmp_path: Path) -> None:
    result = prepare(faulty_dir, pipeline_dir, tmp_path / "rejected", "--on_error", "reject")
    assert "3 of 6 captions in the column 'caption' are not text" in result.stdout
    rejected = PreparedDataset.load(tmp_path / "rejected").dataset
    assert [row for row, bucket in enumerate(rejected["bucket_id"]) if bucket < 0] == [1, 2, 4]
    assert rejected["width"][:3] == [128, -2, -2]
    prepare(faulty_dir, pipeline_dir, tmp_path / "emptied", "--on_error", "empty")
    emptied = PreparedDataset.load(tmp_path / "emptied").dataset
    assert min(emptied["bucket_id"]) >= 0
    assert [caption == "" for caption in emptied["caption"]] == [False, True, True, False, True, False]
    for dataset in (rejected, emptied):
        assert dataset.features["caption"] == Value("string")


def test_rejected_captions_stay_out_of_packs_that_training_plans(faulty_dir, pipeline_dir, tmp_path: Path) -> None:
    prepare(faulty_dir, pipeline_dir, tmp_path / "out", "--on_error", "reject")
    prepared = PreparedDataset.load(tmp_path / "out")
    rows = map_columns(prepared.dataset, BucketColumns(prepared.open_table, prepared.spec), overwrite=True)
    assert [row for row, tokens in enumerate(rows["num_tokens"]) if not tokens] == [1, 2, 4]
    assert [rows["rejection"][row] for row in (1, 2, 4)] == ["caption"] * 3
