"""The files of the pages: all are served, none brings in anything from elsewhere, none makes HTML of text."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moeserve.frontend import pages
from moeserve.frontend.pages import FILES

FOLDER = Path(pages.__file__).parent / "pages"
HTML = sorted(FOLDER.glob("*.html"))
SCRIPTS = sorted(FOLDER.glob("*.js"))


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._in_script and data.strip():
            self.inline.append(data)
        self._in_script = False


def test_every_file_of_the_folder_is_served_and_nothing_else() -> None:
    assert set(FILES.values()) == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("path", HTML, ids=lambda path: path.name)
def test_a_page_has_no_inline_script_style_or_handler(path: Path) -> None:
    tags = Tags(path.read_text())
    assert tags.inline == []
    names = {name for _, attributes in tags.found for name in attributes}
    assert [name for name in names if name.startswith("on") or name == "style"] == []


@pytest.mark.parametrize("path", HTML, ids=lambda path: path.name)
def test_a_page_refers_to_what_this_server_has(path: Path) -> None:
    for tag, attributes in Tags(path.read_text()).found:
        for name in ("src", "href"):
            target = attributes.get(name)
            if target and not target.startswith("#"):
                assert target in {"/", "/openapi.json", *FILES}, (tag, target)


@pytest.mark.parametrize("path", HTML, ids=lambda path: path.name)
def test_every_field_and_button_of_a_page_has_a_name(path: Path) -> None:
    text = path.read_text()
    labelled = set(re.findall(r'<label for="([\w-]+)"', text))
    inside = "".join(re.findall(r"<label>.*?</label>", text, re.S))
    for tag, attributes in Tags(text).found:
        if tag in ("input", "select", "textarea"):
            name = attributes.get("name") or attributes.get("id")
            assert attributes.get("id") in labelled or f'"{name}"' in inside, name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_html_and_loads_only_its_neighbours(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text)
    for module in re.findall(r'from "([^"]+)"', text):
        assert module.startswith("./")
        assert (FOLDER / module).exists(), module
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}  # names, not places
