"""The example dashboard asks for metrics and labels that a server has, and leaves out none that matter."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hf_paged.serving.access_log import AccessLogMiddleware
from tests.serving.observed import Observed

FOLDER = Path(__file__).parents[2] / "examples" / "grafana"
FUNCTIONS = {"sum", "rate", "histogram_quantile", "by", "max"}
TARGET_LABELS = {"instance", "job"}  # which Prometheus adds
# Of use to other programs, or by way of other panels.
NOT_SHOWN = {
    *("hf_paged:cache_config_info", "hf_paged:prompt_tokens_cached", "hf_paged:request_params_n"),
    *("hf_paged:request_params_max_tokens", "hf_paged:request_time_per_output_token_seconds"),
    *("hf_paged:request_inference_time_seconds", "hf_paged:http_request_duration_seconds"),
}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Name of each sample that a server exports after some requests -> its labels."""
    observed = Observed()
    observed.ask_all(max_tokens=3)

    async def refused(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def nowhere(message):
        pass

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    asyncio.run(AccessLogMiddleware(refused, observed.metrics, lines=False)(scope, None, nowhere))
    text = observed.metrics.render()[0].decode()
    observed.engine.close()
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))


def expressions(dashboard) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def parse(expression: str) -> tuple[list[tuple[str, set[str]]], set[str], set[str]]:
    """Returns the selectors with the labels that they ask for, the labels grouped by, and all other words."""
    selectors = [
        (name, set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', labels)))
        for name, labels in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression)
    ]
    grouped = {
        label for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", labels) if label
    }
    rest = re.sub(r"[a-zA-Z_:][\w:]*\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", expression)
    return selectors, grouped, set(re.findall(r"[a-zA-Z_:][\w:]*", rest))


def test_the_parser_sees_what_is_wrong():
    selectors, grouped, words = parse('sum by (le, x) (rate(a:b_total{c=~"$d", e="f"}[$__rate_interval])) / bare')
    assert selectors == [("a:b_total", {"c", "e"})] and grouped == {"le", "x"} and words == {"sum", "rate", "bare"}


def test_every_query_asks_for_what_a_server_has(dashboard, exported):
    for expression in expressions(dashboard):
        selectors, grouped, words = parse(expression)
        assert selectors and words <= FUNCTIONS, expression
        assert expression.count("(") == expression.count(")"), expression
        for name, labels in selectors:
            assert name in exported, f"{name} in {expression}"
            assert labels <= exported[name] | TARGET_LABELS, f"{labels} of {name}"
            assert grouped <= exported[name] | TARGET_LABELS, f"{grouped} of {name}"
        if "histogram_quantile" in expression:
            assert "le" in grouped and all(name.endswith("_bucket") for name, _ in selectors), expression
        for name, _ in selectors:
            is_counter = name.endswith(("_total", "_sum", "_count", "_bucket"))
            assert is_counter == (f"rate({name}" in expression), f"a counter without rate, or the reverse: {expression}"


def test_every_legend_names_a_label_that_is_left(dashboard):
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            _, grouped, words = parse(target["expr"])
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert wanted <= grouped or ("sum" not in words and wanted <= TARGET_LABELS), panel["title"]


def test_every_metric_of_ours_is_shown(dashboard, exported):
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", n) for e in expressions(dashboard) for n, _ in parse(e)[0]}
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in exported if name.startswith("hf_paged:")}
    # `iteration_tokens_total` is a histogram with the name of a counter.
    families, shown = ({name.removesuffix("_total") for name in names} for names in (families, shown))
    assert families - shown == NOT_SHOWN
    assert not NOT_SHOWN & shown


def test_variables_are_filled_from_what_a_server_has(dashboard, exported):
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"datasource", "model", "instance"}
    for name in ("model", "instance"):
        metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variables[name]["query"]).groups()
        assert label in exported[metric] | TARGET_LABELS


def test_panels_do_not_overlap_and_have_names_of_their_own(dashboard):
    panels = dashboard["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in panels)
