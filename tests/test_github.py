"""Forms, workflow and citation are what GitHub reads, by the rules of its documentation."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
ATTRIBUTES = {
    "markdown": {"value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "input": {"label", "description", "placeholder", "value"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_the_keys_that_github_knows(path: Path) -> None:
    form = read(path)
    assert (
        {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title", "assignees"}
    )
    for element in form["body"]:
        assert set(element) <= {"type", "id", "attributes", "validations"}
        assert set(element["attributes"]) <= ATTRIBUTES[element["type"]]
        assert ("value" if element["type"] == "markdown" else "label") in element["attributes"]
        assert set(element.get("validations", {})) <= {"required"}
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert asked
    for name, values in (("id", [e["id"] for e in asked]), ("label", [e["attributes"]["label"] for e in asked])):
        assert len(set(values)) == len(values), name
    assert all(re.fullmatch(r"[\w-]+", element["id"]) for element in asked)


def test_forms_name_scripts_that_exist() -> None:
    for path in [*FORMS, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"scripts/\w+\.py", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_the_workflow_runs_every_python_that_setup_cfg_names() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    jobs = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == named
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands if command.startswith("make ")} <= set(targets)


def test_the_citation_has_what_its_format_requires() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert "version" not in citation, "the version has one place, hf_bucketing.__version__"
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert [author["name"] for author in citation["authors"]] == [config["metadata"]["author"]]
    assert citation["license"] == config["metadata"]["license"]
