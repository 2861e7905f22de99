"""The page as it is sent: whole, closed, and of no use to anybody else's page. How it works: tests/browser."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hf_paged.serving import page

ROOT = Path(__file__).parents[2]
FOLDER = Path(page.__file__).parent


class Tags(HTMLParser):
    """The elements of a page: their names with attributes, and the texts of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


@pytest.fixture(scope="module")
def answer(client):
    response = client.get("/")
    assert response.status_code == 200
    return response


@pytest.fixture(scope="module")
def tags(answer):
    return Tags(answer.text)


def policy(answer) -> dict[str, str]:
    parts = [part.strip().partition(" ") for part in answer.headers["content-security-policy"].split(";")]
    return {name: value for name, _, value in parts}


def test_it_is_one_html_answer_that_head_describes(client, answer):
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    head = client.head("/")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(answer.content))
    assert client.post("/", json={}).status_code == 405


def test_its_headers_keep_others_out(answer):
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    found = policy(answer)
    assert found["default-src"] == found["frame-ancestors"] == found["base-uri"] == found["form-action"] == "'none'"
    assert found["connect-src"] == "'self'" and found["img-src"] == "data:"
    assert found["require-trusted-types-for"] == "'script'" and found["trusted-types"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"] and "*" not in found.values()


def test_only_the_script_and_the_style_in_it_may_run(answer, tags):
    for kind in ("script", "style"):
        [text] = tags.texts[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy(answer)[f"{kind}-src"] == f"'sha256-{digest}'"
        assert len(text) > 5000


def test_it_has_no_outside_resource_and_no_inline_handler(answer, tags):
    for tag, attributes in tags.found:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            assert name != "style", f"<{tag} {name}>"
            if name in ("src", "href", "action", "srcset", "data"):
                assert (value or "").startswith(("#", "data:image/svg+xml;base64,")), f"<{tag} {name}={value}>"
    urls = set(re.findall(r"https?://[^\s\"'`)]+", answer.text))
    assert urls == {"http://www.w3.org/2000/svg"}, "the name of a vocabulary, which nobody fetches"
    assert "@import" not in answer.text and "url(" not in answer.text


def test_no_script_makes_markup_or_code_of_a_text():
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "DOMParser",
        ):
            assert way not in text, f"{path.name}: {way}"


def test_every_field_has_a_label(tags):
    labelled = {attributes["for"] for tag, attributes in tags.found if tag == "label" and "for" in attributes}
    fields = [a for tag, a in tags.found if tag in ("input", "select", "textarea")]
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    around = set(re.findall(r"<label[^>]*>(?:(?!</label>).)*?\bid=\"([\w-]+)\"", text, re.DOTALL))
    assert len(fields) >= 6
    assert {field["id"] for field in fields} <= labelled | around


def test_every_id_that_a_script_looks_for_is_in_the_page(tags):
    ids = {attributes["id"] for _, attributes in tags.found if "id" in attributes}
    for path in FOLDER.glob("*.js"):
        assert set(re.findall(r'\$\("([\w-]+)"\)', path.read_text(encoding="utf-8"))) <= ids


def test_every_script_is_in_it_once():
    assert sorted(page.SCRIPTS) == sorted(path.name for path in FOLDER.glob("*.js"))
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".css", ".html"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 1000, "split it at a seam"


def test_a_key_is_needed_for_what_it_shows_and_not_for_itself(make_client):
    client = make_client(api_key=("sk-right",))
    assert client.get("/").status_code == client.head("/").status_code == 200
    assert "sk-right" not in client.get("/").text
    for path in ("/engine/events", "/v1/models", "/index.html", "/page.js", "/%2f"):
        assert client.get(path).status_code == 401, path


def test_without_a_page_there_is_neither_it_nor_the_events(make_client):
    client = make_client(page=False)
    assert [client.get(path).status_code for path in ("/", "/engine/events")] == [404, 404]
    guarded = make_client(page=False, api_key=("sk-right",))
    assert [guarded.get(path).status_code for path in ("/", "/engine/events")] == [401, 401]


def test_it_is_found_behind_a_proxy_with_or_without_the_prefix(make_client):
    client = make_client(root_path="/api", api_key=("sk-right",))
    assert client.get("/").text == client.get("/api/").text
    assert client.get("/api/").status_code == 200
    assert [client.get(path).status_code for path in ("/engine/events", "/api/engine/events")] == [401, 401]
    assert not re.search(r"""["'`(]/(v1|engine)/""", client.get("/").text), "its own paths are relative"


def test_the_prefix_itself_opens_it_and_nothing_beside_it(make_client):
    for keys in ({}, {"api_key": ("sk-right",)}):
        client = make_client(root_path="/api", **keys)
        assert client.get("/api").text == client.get("/api/").text
        assert client.head("/api").status_code == 200
        for path in ("/ap", "/api2", "/api/api", "/api//"):
            assert client.get(path).status_code == (401 if keys else 404), path
    client = make_client(root_path="/api", page=False, api_key=("sk-right",))
    assert client.get("/api").status_code == 401


def test_a_foreign_host_gets_no_page(make_client):
    client = make_client(allowed_hosts=("testserver",))
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_the_schema_does_not_list_it(client):
    assert not {"/", "/engine/events"} & set(client.get("/openapi.json").json()["paths"])


def test_its_files_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        **project["tool"]["hatch"]["build"]["targets"]["wheel"],
        "packages": ["hf_paged"],
    }
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    files = {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}
    assert {f"hf_paged/serving/page/{path.name}" for path in FOLDER.iterdir() if path.is_file()} <= files
