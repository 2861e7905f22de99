"""Flags, variables and files: what they mean, which wins, what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hf_paged import PagedConfig
from hf_paged.errors import ConfigurationError, NotSupportedError
from hf_paged.serving.command_line import UsageError, make_parser, parse_settings
from hf_paged.serving.settings import GROUPS, ServerSettings, flag, help_texts


def parse(*arguments: str, **environment: str) -> ServerSettings:
    return parse_settings(arguments, environment, "hf-paged serve")


def write(folder: Path, text: str) -> str:
    path = folder / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_lines_of_articles_on_vllm_are_understood():
    settings = parse(
        *("--model", "org/model", "--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.85"),
        *("--max-num-batched-tokens", "8192", "--max-num-seqs", "256", "--quantization", "awq", "--dtype", "half"),
        *("--max-model-len", "8k", "--swap-space", "4", "--disable-log-requests", "--enforce-eager"),
    )
    assert settings.model == "org/model"
    assert settings.gpu_memory_utilization == 0.85
    assert (settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len) == (8192, 256, 8000)
    assert (settings.quantization, settings.dtype, settings.enforce_eager) == ("awq", "half", True)
    assert settings.paged_config() == PagedConfig(
        gpu_memory_utilization=0.85,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=8000,
        enforce_eager=True,
    )


def test_every_setting_has_a_flag_help_and_a_group():
    parser = make_parser("x")
    text = parser.format_help()
    for field in dataclasses.fields(ServerSettings):
        assert flag(field.name) in text
        assert help_texts()[field.name].endswith((".", "...")) or help_texts()[field.name][-1].isalnum()
        assert field.metadata["group"] in GROUPS
    for group in GROUPS:
        assert f"\n{group}:\n" in text
    assert "swap-space" not in text, "what changes nothing is understood, but not advertised"


def test_every_field_of_the_engines_configuration_can_be_set():
    settings = {field.name for field in dataclasses.fields(ServerSettings)}
    missing = {field.name for field in dataclasses.fields(PagedConfig)} - settings
    assert missing == {"max_queue_size"}
    assert parse("m", "--max-queue-size", "3").max_num_queued_reqs == 3


def test_flags_may_be_written_with_underscores_and_equals_signs():
    assert parse("m", "--max_num_seqs=3", "--no-enable_prefix_caching").max_num_seqs == 3
    assert parse("m", "-tp", "2", "-q", "gptq").tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1 << 20), ("auto", None)]
)
def test_numbers_of_tokens_may_have_units(text, tokens):
    assert parse("m", "--max-model-len", text).max_model_len == tokens


def test_model_is_a_word_or_a_flag():
    assert parse("org/model").model == parse("--model", "org/model").model == "org/model"
    assert parse("org/model", "--model", "org/model").model == "org/model"
    with pytest.raises(UsageError, match="'a' and `--model` is 'b'"):
        parse("a", "--model", "b")
    with pytest.raises(ConfigurationError, match="--demo"):
        parse("a", "--demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--portt", "1"], "Unknown flag `--portt`; did you mean `--port`? See --help."),
        (["m", "--nothing-like-it"], "Unknown flag `--nothing-like-it`. See --help."),
        (
            ["m", "--guided-decoding-backend", "xgrammar"],
            "`--guided-decoding-backend` of vLLM: structured output always",
        ),
        (["m", "--enable-reasoning"], "`--enable-reasoning` of vLLM: `--reasoning-parser NAME` alone"),
        (["m", "--dtype", "float8"], "`--dtype` must be one of auto, half, float16,"),
        (["m", "--max-num-sequences", "1"], "did you mean `--max-num-seqs`?"),
        (["m", "n"], "'n' is one too many"),
        (["m", "--port", "abc"], "`--port` must be a whole number, got 'abc'"),
        (["m", "--port", "1.5"], "`--port` must be a whole number, got '1.5'"),
        (["m", "--port", "70000"], "`--port` must be a number from 0 to 65535, got 70000"),
        (["m", "--port"], "expected one argument"),
        (["m", "--max-model-len", "8.5"], "`--max-model-len` must be a whole number of tokens"),
        (["m", "--max-model-len", "0"], "`--max-model-len` must be a whole number of tokens"),
        (["m", "--gpu-memory-utilization", "1.5"], "`gpu_memory_utilization` must be a share in (0, 1], got 1.5"),
        (["m", "--scheduling-policy", "lifo"], "must be one of fcfs, priority, got 'lifo'"),
        (["m", "--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["m", "--ssl-keyfile", "x"], "both `--ssl-keyfile` and `--ssl-certfile`"),
        (["m", "--root-path", "api/"], "`--root-path` must begin with a slash"),
        (["m", "--shutdown-timeout", "-1"], "`--shutdown-timeout` must be a number at least 0, got -1"),
        (["m", "--shutdown-timeout", "nan"], "`--shutdown-timeout` must be a number at least 0, got nan"),
        (["m", "--api-key", ""], "`--api-key` must be printable ASCII without spaces, and not empty"),
        (["m", "--api-key-file", "/nowhere"], "`--api-key-file` '/nowhere' cannot be read: No such file or directory."),
        (["m", "--enable-log-prompts"], "needs `--enable-log-requests`"),
        (["m", "--cudagraph-capture-sizes", "1", "8"], "of vLLM is `--cuda-graph-sizes` here, got ['1', '8']"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_limit(arguments, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline parallelism"),
        (["--enable-lora"], "`--enable-lora` (an adapter per request) is not built yet; leave it out."),
        (["--speculative-config", '{"method": "ngram"}'], "speculative decoding"),
        (["--load-format", "dummy"], "`--load-format` 'dummy' is not supported, only 'auto' or 'safetensors'"),
    ],
)
def test_what_vllm_has_and_we_have_not_is_refused_with_the_reason(arguments, message):
    with pytest.raises(NotSupportedError, match=re.escape(message)):
        parse("m", *arguments)


def test_what_changes_nothing_is_taken_and_named(caplog):
    caplog.set_level("INFO")
    flags = ["--disable-custom-all-reduce", "--distributed-executor-backend", "mp", "--pipeline-parallel-size", "1"]
    assert parse(*flags, "--load-format", "safetensors", "m", "--speculative-config", "{}") == parse("m")
    for name in ("--disable-custom-all-reduce", "--pipeline-parallel-size", "--speculative-config"):
        assert f"`{name}` of vLLM" in caplog.text


def test_flags_win_over_the_environment_over_a_file_over_defaults(tmp_path):
    path = write(tmp_path, "model: from-file\nport: 1\nmax-num-seqs: 2\nmax_model_len: 3\n")
    settings = parse("--config", path, "--port", "30", HF_PAGED_PORT="20", HF_PAGED_MAX_NUM_SEQS="20")
    assert (settings.model, settings.port, settings.max_num_seqs, settings.max_model_len) == ("from-file", 30, 20, 3)
    assert settings.host == "127.0.0.1"


def test_a_file_holds_what_flags_say(tmp_path):
    path = write(
        tmp_path,
        "model: m\nserved-model-name: [a, b]\nno-enable-prefix-caching: true\ndisable-log-requests: true\n"
        "swap-space: 4\nmax-model-len: 8K\ndefault-chat-template-kwargs: {enable_thinking: false}\n"
        "attention-backend: reference\ncuda-graph-sizes: [1, 2]\n",
    )
    settings = parse("--config", path)
    assert settings.served_model_name == ("a", "b")
    assert (settings.enable_prefix_caching, settings.enable_log_requests) == (False, False)
    assert (settings.max_model_len, settings.attn_backend, settings.cuda_graph_sizes) == (8192, "reference", (1, 2))
    assert settings.default_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt: 1", "unknown key `prt`; did you mean `port`?"),
        ("port: [", "is not YAML"),
        ("- a", "must hold `name: value` lines"),
        ("no-enable-prefix-caching: 5", "`no-enable-prefix-caching` must be true or false, got 5 (in "),
        ("port: yes", "`port` must be a whole number, got True (in "),
        ("port: [[x, x, x, x, x, x, x, x]]", "got [['x', 'x', 'x', 'x', 'x', 'x', ...]] (in "),
        ("pipeline-parallel-size: 2", "pipeline parallelism"),
    ],
)
def test_a_broken_file_gives_one_message(text, message, tmp_path):
    with pytest.raises((ConfigurationError, NotSupportedError), match=re.escape(message)):
        parse("m", "--config", write(tmp_path, text))
    with pytest.raises(UsageError, match="nothing' cannot be read: No such file or directory.$"):
        parse("m", "--config", str(tmp_path / "nothing"))


def aliases(levels):
    """A few lines that stand for ten to the power of `levels` values."""
    lines = ["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels + 1))]
    return "\n".join(lines) + f"\nport: *a{levels}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (aliases(9), "holds more than 10,000 values, its aliases written out"),
        ("port: &a [*a]", "holds more than 10,000 values, its aliases written out"),
        ("port: " + "[" * 2000, "has too many brackets within one another"),
        ("port: 2020-99-99", "is not YAML: month must be in 1..12"),
    ],
    ids=["aliases", "itself", "brackets", "date"],
)
def test_a_file_that_stands_for_too_much_or_for_nothing_is_named(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(f"`--config` {path!r} {message}")):
        parse("m", "--config", path)


def test_the_environment_sets_everything():
    settings = parse(
        HF_PAGED_MODEL="m", HF_PAGED_ENFORCE_EAGER="1", HF_PAGED_ALLOWED_ORIGINS="http://a, http://b", HF_PAGED_SEED="5"
    )
    assert (settings.model, settings.enforce_eager, settings.seed) == ("m", True, 5)
    assert settings.allowed_origins == ("http://a", "http://b")
    with pytest.raises(UsageError, match="HF_PAGED_PORT must be a whole number, got 'x' \\(in the environment\\)"):
        parse("m", HF_PAGED_PORT="x")


def test_variables_that_mean_nothing_are_named(caplog):
    assert parse("m", HF_PAGED_PORT="tcp://10.0.0.1:80").port == 8000
    assert "Kubernetes" in caplog.text
    parse("m", HF_PAGED_MAX_NUM_SEQ="1")
    assert "did you mean HF_PAGED_MAX_NUM_SEQS?" in caplog.text


def test_keys_come_from_flags_the_environment_and_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n", encoding="utf-8")
    assert parse("m", "--api-key", "a", "--api-key", "b", "c").api_key == ("a", "b", "c")
    assert parse("m", HF_PAGED_API_KEY="a,b").api_key == ("a,b",)
    assert parse("m", HF_PAGED_API_KEY='["a", "b"]').api_key == ("a", "b")
    assert parse("m", "--api-key-file", str(path), HF_PAGED_API_KEY="zero").api_key == ("zero", "one", "two")
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no key"):
        parse("m", "--api-key-file", str(path))


def test_keys_are_not_shown(tmp_path):
    settings = parse("m", "--api-key", "sk-secret")
    assert "sk-secret" not in repr(settings)
    assert "sk-secret" not in str(settings.to_dict())
    with pytest.raises(ConfigurationError) as caught:
        parse("m", "--api-key", "sk-secret\n")
    assert "sk-secret" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        parse("--config", write(tmp_path, "model: m\napi-key: {sk-secret: 1}\n"))
    assert "sk-secret" not in str(caught.value)
