"""The process as its users meet it: flags in, a ready line or one clear message out."""

from __future__ import annotations

import gc
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from transformers import T5Config

from hf_paged.errors import ConfigurationError
from hf_paged.serving import loading, model_loading, process_list
from hf_paged.serving.api_server import main
from hf_paged.serving.listening import allow_successors, bind, url
from hf_paged.serving.settings import ServerSettings
from tests.serving.servers import ROOT, chat, wait_until


def run(*arguments: str, module: bool = True, **environment: str) -> subprocess.CompletedProcess:
    program = ["-m", "hf_paged.serving.api_server"] if module else ["-m", "hf_paged.cli", "serve"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, *program, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100
    )


# ---------------------------------------------------------------------- starting


def test_a_started_server_says_where_it_is_and_what_to_try_but_never_its_keys(start_process, tmp_path):
    (tmp_path / "keys").write_text("sk-from-file\n", encoding="utf-8")
    process = start_process(
        *("--api-key", "sk-secret-1", "--api-key=sk-secret-2", "--api-key-file", str(tmp_path / "keys")),
        *("--log-level", "debug", "--enable-log-requests"),
    ).wait_until_ready()
    wait_until(lambda: len(process.stdout.splitlines()) == 3)
    ready, curl, page = process.stdout.splitlines()
    assert page == f"Page: {process.url}/" and httpx.get(f"{process.url}/").status_code == 200
    assert ready.startswith(f"Serving tiny at {process.url} (256 blocks of 16 tokens, context of 4096 tokens, ")
    assert process.url.startswith("http://127.0.0.1:"), "it is not reachable from elsewhere unless told"
    words = shlex.split(curl.removeprefix("Try: "))
    assert words[:2] == ["curl", f"{process.url}/v1/chat/completions"]
    headers = dict(word.replace("YOUR_KEY", "sk-secret-1").split(": ") for word in (words[3], words[5]))
    assert httpx.post(words[1], content=words[-1], headers=headers, timeout=60).status_code == 200
    with httpx.Client(base_url=process.url, timeout=60) as client:
        assert client.get("/v1/models").status_code == 401
        for key in ("sk-secret-1", "sk-secret-2", "sk-from-file"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/chat/completions", json=chat(), headers=headers).status_code == 200
            assert "sk-" not in client.get("/server_info", headers=headers).text
        client.post("/v1/chat/completions", json=chat(), headers={"Authorization": "Bearer sk-wrong"})
    if sys.platform.startswith("linux"):
        shown = Path(f"/proc/{process.process.pid}/cmdline").read_bytes()
        assert b"secret" not in shown
        assert b"--api-key\0***********\0--api-key=***********\0" in shown
        assert b"--log-level\0debug\0" in shown
    assert "HF_PAGED_API_KEY" in process.stderr, "there are better places for a key"
    process.signal()
    assert process.wait() == 0
    assert "sk-" not in process.stdout + process.stderr


def test_command_lines_are_covered_only_where_they_hold_a_secret(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--api-key", "abc", "--api-key=abc", "abcd", '["abc", "z"]'])
    monkeypatch.setattr(sys, "orig_argv", [])
    process_list.hide(["abc"])
    assert sys.argv == ["x", "--api-key", "***", "--api-key=***", "abcd", '["***", "z"]']


@pytest.mark.parametrize("module", [True, False])
def test_help_is_grouped_and_comes_without_loading_torch(module):
    done = run("--help", module=module)
    assert done.returncode == 0
    assert "Scheduling and limits:" in done.stdout
    assert "--gpu-memory-utilization" in done.stdout
    names = "import sys; from hf_paged.serving.api_server import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    check = f"{names}\nprint(sorted({{'torch', 'transformers', 'fastapi'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert loaded.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", [True, False])
def test_wrong_usage_is_one_line_and_exit_code_two(module):
    done = run("m", "--prt", "1", module=module)
    assert done.returncode == 2
    assert done.stderr == "hf-paged: Unknown flag `--prt`; did you mean `--port`? See --help.\n"
    done = run(module=module)
    assert done.returncode == 2
    assert "Name a MODEL" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attn-backend", "triton"], "triton"),
        (["--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"], "do not make a certificate"),
    ],
)
def test_what_cannot_be_done_is_refused_at_start_in_one_line(tiny_checkpoint, flags, message, capfd):
    assert main([str(tiny_checkpoint), "--port", "0", "--device", "cpu", *flags]) == 1
    captured = capfd.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "2"], "`--tensor-parallel-size` 2 is not built yet"),
        (["--quantization", "awq"], "`quantization` 'awq' does not fit"),
        (["--dtype", "float17"], "`--dtype` must be one of auto, half"),
        (["--device", "cuda:99"], "`--device` 'cuda:99' is not there: torch"),
        (["--device", "gpu"], "`--device` 'gpu' is no device of torch"),
        (["--num-blocks", "1", "--block-size", "0"], "`block_size` must be a whole number of at least 1"),
        (["--chat-template", "nothing.jinja"], "`--chat-template` 'nothing.jinja' is neither a file"),
        (
            ["--tool-call-parser", "nothing", "--enable-auto-tool-choice"],
            "Unknown tool-call parser 'nothing'; available: hermes,",
        ),
        (["--reasoning-parser", "nothing"], "Unknown reasoning parser 'nothing'; available: think,"),
        (["--attn-backend", "nothing"], "attention backend 'nothing'; available: "),
        (["--override-generation-config", '{"top_z": 1}'], "not 'top_z'"),
        (["--override-generation-config", '{"max_new_tokens": 0}'], "-config`: `max_tokens` must be"),
        (["--override-generation-config", '{"temperature": "a"}'], "`temperature` must be a number"),
        (["--tool-call-parser", "auto"], "`--tool-call-parser` is auto, but the model's chat template"),
        (["--max-model-len", "9k"], "`--max-model-len` 9000 is more than the 8192 tokens of this model"),
        (["--chat-template", "{{ a }}\n{% if %}"], "`--chat-template` is no template that Jinja takes: line 2: "),
    ],
)
def test_wrong_usage_is_found_before_anything_is_loaded(tiny_checkpoint, flags, message, capfd, monkeypatch):
    monkeypatch.setattr(model_loading, "LLM", None)
    assert main([str(tiny_checkpoint), "--port", "0", *flags]) == 2
    captured = capfd.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""


def test_a_broken_template_is_named_with_its_file_and_line(tiny_checkpoint, tmp_path, capfd):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}\n\n{{ x | no_filter }}", encoding="utf-8")
    assert main([str(tiny_checkpoint), "--port", "0", "--chat-template", str(path)]) == 2
    assert f"`--chat-template` '{path}' is no template that Jinja takes: line 3: " in capfd.readouterr().err
    path.write_bytes(b"\xff")
    assert main([str(tiny_checkpoint), "--port", "0", "--chat-template", str(path)]) == 2
    assert "it is no text in UTF-8" in capfd.readouterr().err


def test_wrong_usage_comes_without_loading_torch(tmp_path):
    """Also a model that is not there."""
    calls = [
        ["m", "-tp", "2"],
        ["m", "--tool-call-parser", "x"],
        ["m", "--chat-template", "/no"],
        [str(tmp_path / "no")],
    ]
    program = f"from hf_paged.serving.api_server import main\nprint([main([*a, '--port', '0']) for a in {calls}])"
    check = f"{program}\nimport sys; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert loaded.stdout.splitlines() == ["[2, 2, 2, 1]", "[]"]


def test_a_tokenizer_that_cannot_be_read_is_left_to_the_models_loading(tiny_checkpoint, capfd):
    assert main([str(tiny_checkpoint), "--port", "0", "--tokenizer", "./nosuch"]) == 1
    assert "nosuch" in capfd.readouterr().err


def test_models_that_are_none_or_of_another_kind_are_refused_at_start(tmp_path, capfd):
    T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path / "t5")
    for model, message in ((tmp_path / "t5", "is no decoder-only language model"), (tmp_path / "none", "no folder")):
        assert main([str(model), "--port", "0"]) == 1
        captured = capfd.readouterr()
        assert message in captured.err
        assert "Traceback" not in captured.err


def test_a_port_in_use_is_noticed_before_a_model_is_loaded(capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["no/such-model", "--port", str(taken.getsockname()[1])]) == 1
    error = capfd.readouterr().err
    assert "is in use; give another `--port`" in error
    assert "Loading" not in error


# ---------------------------------------------------------------------- listening


def test_two_that_are_still_loading_do_not_get_the_same_port():
    with bind(ServerSettings(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} is in use"):
            bind(ServerSettings(port=port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    bind(ServerSettings(port=port)).close()


def test_a_port_whose_connections_are_dying_out_is_free():
    with bind(ServerSettings(port=0)) as first:
        allow_successors(first)
        first.listen()
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            accepted.close()  # the side that closes first keeps the connection for a minute
            client.recv(1)
    with bind(ServerSettings(port=port)), pytest.raises(ConfigurationError, match="in use"):
        bind(ServerSettings(port=port))


def test_addresses_that_are_none_are_told():
    for host in ("256.0.0.1", "no.such.host.invalid", "203.0.113.1"):
        with pytest.raises(ConfigurationError, match=host):
            bind(ServerSettings(host=host, port=0))


def test_urls_are_such_that_a_client_on_this_machine_can_use_them():
    with bind(ServerSettings(host="0.0.0.0", port=0)) as bound:
        assert url(ServerSettings(root_path="/api"), bound) == f"http://127.0.0.1:{bound.getsockname()[1]}/api"
    try:
        bound = bind(ServerSettings(host="::1", port=0))
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert url(ServerSettings(), bound) == f"http://[::1]:{bound.getsockname()[1]}"


def test_a_unix_socket_is_taken_over_only_from_the_dead(tmp_path):
    path = str(tmp_path / "socket")
    with bind(ServerSettings(uds=path)) as first:
        first.listen()
        with pytest.raises(ConfigurationError, match="in use"):
            bind(ServerSettings(uds=path))
    bind(ServerSettings(uds=path)).close()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigurationError, match="in use"):
        bind(ServerSettings(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_a_server_on_a_unix_socket(start_process, tmp_path):
    path = str(tmp_path / "socket")
    process = start_process("--uds", path).wait_until_ready()
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=60) as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    process.signal()
    assert process.wait() == 0
    assert not os.path.exists(path)


@pytest.mark.slow
def test_a_server_with_tls(start_process, tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
            + ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl to make a certificate with")
    process = start_process("--ssl-keyfile", key, "--ssl-certfile", certificate).wait_until_ready()
    assert process.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=process.url, verify=certificate, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    process.signal()
    assert process.wait() == 0


# ---------------------------------------------------------------------- running


def test_what_was_loaded_is_hidden_from_the_garbage_collector_before_anybody_is_served(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    hidden = []
    server = SimpleNamespace(exit_code=0, stop=None, run=lambda sockets: hidden.append(gc.get_freeze_count()))
    engine = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(loading, "load_service", lambda settings: SimpleNamespace(engine=engine, close=lambda: None))
    monkeypatch.setattr("hf_paged.serving.app.make_app", lambda service: None)
    monkeypatch.setattr("hf_paged.serving.lifecycle.make_server", lambda *args, **kwargs: server)
    before = gc.get_freeze_count()
    try:
        assert main([str(tmp_path), "--port", "0"]) == 0
    finally:
        gc.unfreeze()
    assert hidden[0] > before + 100_000


# ---------------------------------------------------------------------- status


def test_routers_find_the_numbers_that_they_look_for(client):
    assert client.get("/version").json()["version"]
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/get_load").json() == {"load": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    loads = client.get("/v1/loads").json()
    assert client.get("/loads").json()["loads"] == loads["loads"]
    assert loads["loads"][0]["num_running_reqs"] == 0
    assert loads["loads"][0]["max_total_num_tokens"] == 4096
    info = client.get("/server_info").json()
    assert (info["served_model_name"], info["max_model_len"], info["tp_size"]) == ("tiny", 4096, 1)
    assert info["settings"]["port"] == 8000
    assert "api_key" not in info["settings"]
    assert "demo" not in info["settings"], "once it is served, its model is one like others"
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert client.get("/ping").json() == client.post("/ping").json() == client.get("/health").json()
