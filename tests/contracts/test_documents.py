"""The documents name what exists."""

import re
from pathlib import Path

import pytest

from moeserve.frontend.dialects.bodies import UNSUPPORTED
from moeserve.model.families import supported_model_types

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
_PATH = re.compile(r"`((?:launcher|moeserve|radix_cache|experts|kernels|tests|docs|examples)/[\w./-]*?(?:\.\w+|/)?)`")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_in_documents_exist(document):
    text = document.read_text()
    missing = [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in _LINK.findall(text) if not (document.parent / link).exists()]
    assert missing == []


def test_no_page_is_longer_than_three_hundred_lines():
    pages = (ROOT / "docs").rglob("*.md")
    lengths = {path.name: path.read_text().count("\n") for path in pages}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_links_to_headings_name_headings_that_exist():
    missing = []
    for document in DOCUMENTS:
        for link, heading in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            target = document.parent / link if link else document
            if target.suffix == ".md" and heading not in anchors_of(target):
                missing.append((document.name, link, heading))
    assert missing == []


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_measurements_that_documents_and_code_name_can_be_run():
    sources = [*DOCUMENTS, ROOT / "Makefile"]
    sources += [
        path for package in ("launcher", "moeserve", "experts", "kernels") for path in (ROOT / package).rglob("*.py")
    ]
    named = {(path.name, name) for path in sources for name in re.findall(r"\bbenchmarks\.(\w+)", path.read_text())}
    named = {(path, name) for path, name in named if name not in ("md", "NAME")}
    folder = ROOT / "benchmarks"
    assert named
    assert [one for one in named if not ((folder / one[1]).is_dir() or (folder / f"{one[1]}.py").exists())] == []


def test_tests_that_the_makefile_names_exist():
    named = re.findall(r"'(tests/\w[\w/]*\.py)::(\w+)", (ROOT / "Makefile").read_text())
    assert named
    assert [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_the_architecture_document_follows_modules_that_exist():
    document = ROOT / "docs" / "design" / "architecture.md"
    text = document.read_text()
    modules = re.findall(r"`((?:launcher|moeserve|radix_cache|experts|kernels)(?:\.\w+)+)`", text)
    assert [name for name in modules if not module_or_member_exists(name)] == []


def test_docstrings_name_modules_and_members_that_exist():
    missing = []
    for package in ("launcher", "moeserve", "radix_cache", "experts", "kernels", "tests"):
        for source in (ROOT / package).rglob("*.py"):
            named = re.findall(r"`((?:launcher|moeserve|radix_cache|experts|kernels)(?:\.\w+)+)`", source.read_text())
            missing += [(source.name, name) for name in named if not module_or_member_exists(name)]
    assert missing == []


def module_or_member_exists(dotted: str) -> bool:
    """Whether `a.b.c` is a module, a package, or a name written in module `a.b`."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.with_suffix(".py").exists() or path.is_dir():
        return True
    module = path.parent.with_suffix(".py")
    return module.exists() and re.search(rf"\b{path.name}\b", module.read_text()) is not None


def test_the_limits_name_every_refused_field_and_every_model_type():
    text = (ROOT / "docs" / "limits.md").read_text()
    names = [*UNSUPPORTED, *supported_model_types()]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_document_of_the_log_names_every_event():
    sources = [source for package in ("launcher", "moeserve", "experts") for source in (ROOT / package).rglob("*.py")]
    events = {name for source in sources for name in re.findall(r'\blog\.\w+\(\s*"([a-z_]+)"', source.read_text())}
    text = (ROOT / "docs" / "logs.md").read_text()
    assert [event for event in sorted(events) if f"`{event}`" not in text] == []
