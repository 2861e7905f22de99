"""A pytest plugin for Transformers' own suites: a causal model is paged the first time that it is to generate.

It is loaded from outside (`-p paged_plugin`), in the folder of Transformers' source, whose tests stay as they are.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, testing_utils

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.generation.mixin import PagedGenerationMixin

ENTRANCES = ("generate", "generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
CONFIG = PagedConfig(num_blocks=256)


class Record:
    """What a run saw: the outcome of each test, and how many models were paged or could not be."""

    def __init__(self):
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.paged = 0
        self.refused: dict[str, int] = {}

    def page(self, model: Any) -> None:
        """Pages a model in place.

        Args:
            model (`PreTrainedModel`):
                A causal model of Transformers.
        """
        AutoPagedModelForCausalLM.from_model(model, paged_config=CONFIG)
        if model._paged_refusal is None:
            self.paged += 1
        else:
            self.refused[model._paged_refusal] = self.refused.get(model._paged_refusal, 0) + 1

    def note(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a test; a failure before or after it counts as its own.

        Args:
            report (`pytest.TestReport`):
                Of one phase of one test.
        """
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, (report.outcome, _reason(report)))


RECORD = Record()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this plugin."""
    parser.addoption("--stock", action="store_true", help="leave the models as they are")
    parser.addoption("--outcomes", help="file for the outcome of each test, as JSON")
    parser.addoption("--model", help="folder of the model to take for every one of the hub, on any device")


def pytest_configure(config: pytest.Config) -> None:
    """Puts paging in front of all that generates."""
    if not config.getoption("--stock"):
        for name in ENTRANCES:
            _page_first(name)
    model = config.getoption("--model")
    if model:
        testing_utils.require_torch_accelerator = lambda test: test
        for cls in (AutoModelForCausalLM, AutoTokenizer):
            _load_instead(cls, model)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of generation."""
    kept = [item for item in items if "test_continuous_batching" in item.nodeid or _of_generation_mixin(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what happened."""
    RECORD.note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes what happened."""
    path = session.config.getoption("--outcomes")
    if path:
        Path(path).write_text(json.dumps(vars(RECORD)), encoding="utf-8")


def _page_first(name: str) -> None:
    stock = getattr(GenerationMixin, name)

    @functools.wraps(stock)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, PagedGenerationMixin) or type(self) not in _causal_classes():
            return stock(self, *args, **kwargs)
        RECORD.page(self)
        return getattr(self, name)(*args, **kwargs)

    setattr(GenerationMixin, name, run)


def _load_instead(cls: Any, model: str) -> None:
    stock = cls.from_pretrained

    @functools.wraps(stock)
    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        return stock(name if Path(name).is_dir() else model, *args, **kwargs)

    cls.from_pretrained = load


@functools.cache
def _causal_classes() -> frozenset[type]:
    return frozenset(AutoModelForCausalLM._model_mapping.values())


def _of_generation_mixin(item: pytest.Item) -> bool:
    bases = getattr(getattr(item, "cls", None), "__mro__", ())
    return any(base.__name__ == "GenerationTesterMixin" and hasattr(base, item.name) for base in bases)


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr or "").strip()
