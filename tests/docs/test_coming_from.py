"""The page of other trainers' keys: what it says of a key is what the reader of their files does."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from hf_bucketing.columns import load_toml
from hf_bucketing.columns.toml_tables import read_tables
from hf_bucketing.columns.trainer_toml import KEYS_READ, KEYS_WITHOUT_EFFECT
from tests.columns.formats import json_rows, write_captioned_media
from tests.docs.pages import PAGES, spans

PAGE = PAGES["docs/coming-from.md"]
READ = [row.split("|")[1:3] for row in PAGE.table("## Keys that are read")]
ANY_SOURCE = 'video_directory = "clips"'
OF_ANY_SOURCE = {"dataset", "clips"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with folders and tables that the page names."""
    monkeypatch.chdir(tmp_path)
    for name in ("clips", "depth"):
        write_captioned_media(tmp_path / name)
    for column in ("image", "video"):
        json_rows(f"{column}s.jsonl", f"{column}_path", "caption")(tmp_path)
    return tmp_path


def keys_without_effect() -> list[str]:
    """Return the rows of the table of keys without effect."""
    rows = []
    for (fulfilled, advice), items in groupby(KEYS_WITHOUT_EFFECT.items(), key=lambda item: item[1]):
        value = "–" if fulfilled is None else f"`{str(fulfilled).lower()}`"
        rows.append(f"| {', '.join(f'`{key}`' for key, _ in items)} | {advice} | {value} |")
    return rows


def test_the_keys_without_effect_are_those_of_the_reader() -> None:
    rows = keys_without_effect()
    assert PAGE.table("## Keys that are not used") == rows, "\n".join(rows)


def test_every_key_that_is_read_is_in_the_table() -> None:
    assert {line.partition(" = ")[0] for keys, _ in READ for line in spans(keys)} == KEYS_READ


@pytest.mark.parametrize(("keys", "settings"), READ, ids=[keys for keys, _ in READ])
def test_keys_become_the_settings_beside_them(keys: str, settings: str, folder: Path) -> None:
    Path("data.toml").write_text("\n".join(["[[datasets]]", *spans(keys)]))
    if not any("clips" in str(value) or "jsonl" in str(value) for value in read_tables("data.toml")[0].values()):
        Path("data.toml").write_text("\n".join(["[[datasets]]", ANY_SOURCE, *spans(keys)]))
    (source,), _ = load_toml("data.toml")
    expected = yaml.safe_load("\n".join(spans(settings)))
    made = {name: value for name, value in source.items() if name in expected or name not in OF_ANY_SOURCE}
    assert json.loads(json.dumps(made, default=str).replace(f"{folder}/", "")) == expected
