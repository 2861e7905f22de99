"""The map of `generate`: it names what the installed Transformers has, no more and no less, and it is true."""

from __future__ import annotations

import inspect
import json
import re
import warnings

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM
from typer.testing import CliRunner

from hf_paged.cli.app import app
from hf_paged.generation.coverage import ARGUMENTS, FIELDS, Way, coverage, foreign_field
from tests.families import tiny_model
from tests.paged_models import paged

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4, 33, 8, 61]])
# Inputs of a forward that `generate` fills in itself, or that are for training.
NOT_FOR_GENERATE = {"self", "kwargs", "labels", "use_cache", "logits_to_keep"}


def installed_fields() -> set[str]:
    named = set(vars(GenerationConfig())) | set(GenerationConfig._get_default_generation_params())
    documented = re.findall(r"^ {4,12}(\w+) ?\([^)]*(?:optional|\*)", GenerationConfig.__doc__ or "", re.MULTILINE)
    assert len(documented) > 30, "the documentation has another form"
    return {name for name in named | set(documented) if not name.startswith("_")}


def installed_arguments() -> set[str]:
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    source = inspect.getsource(GenerationMixin.generate) + inspect.getsource(
        GenerationMixin._extract_generation_mode_kwargs
    )
    taken = set(re.findall(r"\bkwargs\.(?:pop|get)\(\"(\w+)\"", source))
    assert {"tokenizer", "trust_remote_code"} <= taken, "`generate` takes its arguments in another way"
    inputs = set(inspect.signature(LlamaForCausalLM.forward).parameters) - NOT_FOR_GENERATE
    return named | taken - installed_fields() | inputs


def test_every_field_of_the_installed_transformers_is_in_the_map_and_no_other():
    assert {name for name in coverage() if name in FIELDS} == installed_fields()


def test_every_argument_of_the_installed_generate_is_in_the_map_and_no_other():
    # The cache's old name is taken everywhere.
    assert {name for name in coverage() if name in ARGUMENTS} == installed_arguments() | {"past_key_values"}


def test_no_name_has_two_entries():
    assert not set(FIELDS) & set(ARGUMENTS)


@pytest.mark.parametrize("name", [*FIELDS, *ARGUMENTS])
def test_what_a_field_needs_is_in_the_map(name):
    entry = {**FIELDS, **ARGUMENTS}[name]
    assert entry.how
    assert set(entry.needs) <= {*FIELDS, *ARGUMENTS}


def complete(**given) -> GenerationConfig:
    """A configuration with all defaults filled in; what is given need not make sense."""
    config = GenerationConfig()
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    for name, value in given.items():
        setattr(config, name, value)
    return config


def test_defaults_are_for_independent_requests():
    assert foreign_field(complete()) is None


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if entry.plain])
def test_plain_fields_are_for_independent_requests(name):
    assert foreign_field(complete(**{name: "never equal to a default"})) is None


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if not entry.plain and name != "use_cache"])
def test_other_fields_are_not_for_independent_requests(name):
    needs = dict.fromkeys([need for need in FIELDS[name].needs if need in FIELDS][:1], 3)
    assert foreign_field(complete(**{name: 3, **needs})) in {name, *needs}


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if entry.needs])
def test_a_field_that_nobody_reads_does_not_take_a_call_off_the_fast_path(name):
    assert foreign_field(complete(**{name: 3})) is None


def test_no_cache_is_not_for_independent_requests():
    assert foreign_field(complete(use_cache=False)) == "use_cache"


def test_an_unknown_field_is_not_for_independent_requests():
    config = complete()
    config.something_new = 3
    assert foreign_field(config) == "something_new"


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model():
    return paged("llama")


# What makes Transformers raise, with the type of its error; `None` where it does not read the field.
REFUSED = {
    "constraints": ({"constraints": ["anything"]}, ValueError),
    "force_words_ids": ({"force_words_ids": [[5]], "num_beams": 2}, ValueError),
    "dola_layers": ({"dola_layers": "low"}, ValueError),
    "num_beam_groups": ({"num_beam_groups": 2, "num_beams": 2}, ValueError),
    "diversity_penalty": ({"diversity_penalty": 0.5, "num_beam_groups": 2, "num_beams": 2}, ValueError),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, ValueError),
    "low_memory": ({"low_memory": True, "num_beams": 2}, ValueError),
    "decoder_start_token_id": ({"decoder_start_token_id": 5}, None),
    "transformers_version": ({"transformers_version": "4.0.0"}, None),
    "continuous_batching_config": ({"continuous_batching_config": {"num_blocks": 2}}, None),
}


def test_every_refused_field_is_tried():
    assert set(REFUSED) == {name for name, entry in FIELDS.items() if entry.way is Way.REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_does_what_it_does_in_transformers(stock, model, name):
    settings, error = REFUSED[name]
    if error is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            got, expected = (m.generate(PROMPT, max_new_tokens=4, **settings) for m in (model, stock))
        assert got.tolist() == expected.tolist()
        return
    messages = []
    for runner in (model, stock):
        with pytest.raises(error) as raised:
            runner.generate(PROMPT, max_new_tokens=4, **settings)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_info_prints_the_map():
    printed = CliRunner().invoke(app, ["info", "--generate"])
    assert printed.exit_code == 0, printed.output
    assert all(re.search(rf"^  {name} ", printed.output, re.MULTILINE) for name in coverage())


def test_info_gives_the_map_as_json():
    found = json.loads(CliRunner().invoke(app, ["info", "--generate", "--json"]).output)
    assert list(found) == ["engine", "stock_loop", "refused"]
    assert {*found["engine"], *found["stock_loop"], *found["refused"]} == set(coverage())
    assert all(found["refused"].values())


def test_info_says_that_the_map_is_the_same_for_every_model():
    assert CliRunner().invoke(app, ["info", "a-model", "--generate"]).exit_code != 0
