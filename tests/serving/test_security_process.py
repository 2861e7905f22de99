"""What can be seen of a server's process from outside, and checkpoints that are made to hurt."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hf_paged.serving.loading import load_service
from hf_paged.serving.settings import ServerSettings
from tests.serving.servers import ROOT, chat, wait_until
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

KEY = "sk-that-nobody-sees"


def listening(process: psutil.Process) -> list[tuple[int, Any]]:
    return [
        (process.pid, connection.laddr) for connection in process.net_connections() if connection.status == "LISTEN"
    ]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_listens_but_the_http_port_and_keys_are_nowhere_cve_2025_32444_cve_2025_30165(start_process):
    server = start_process(
        *("--api-key", KEY, "--trust-request-chat-template", "--log-level", "debug", "--enable-log-requests"),
        *("--enable-log-prompts",),
    ).wait_until_ready()
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        # So that the processes that compile grammars and render templates of requests run.
        regex = client.post("/v1/chat/completions", json=chat(structured_outputs={"regex": "a{3}"}))
        template = client.post("/v1/chat/completions", json=chat(chat_template="{{ messages[0].content }}"))
        assert regex.status_code == template.status_code == 200
        seen = [client.get(path).text for path in ("/server_info", "/metrics", "/openapi.json", "/v1/models")]
        seen += [client.get("/v1/models", headers={"Authorization": f"Bearer {KEY}x"}).text]
    whole = psutil.Process(server.process.pid)
    processes = [whole, *whole.children(recursive=True)]
    assert len(processes) >= 3
    listeners = [place for process in processes for place in listening(process)]
    assert [(pid, address.ip) for pid, address in listeners] == [(whole.pid, "127.0.0.1")]
    assert f":{listeners[0][1].port}" in server.url
    for process in processes:
        seen += process.cmdline()
    server.signal()
    assert server.wait() == 0
    wait_until(lambda: not any(is_alive(process) for process in processes[1:]), timeout=20)
    assert not any(KEY in text for text in [*seen, server.stdout, server.stderr])


# ---------------------------------------------------------------------- checkpoints


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def with_code(checkpoint: Path, folder: Path, trap: Path, model_type: str) -> Path:
    """A checkpoint that brings code for its configuration, its model and its tokenizer."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil_config.Config", "AutoModelForCausalLM": "evil_model.Model"}
    config["model_type"] = model_type
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": [None, "evil_tokenizer.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("evil_config", "evil_model", "evil_tokenizer"):
        (folder / f"{name}.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    return folder


def pickled(checkpoint: Path, folder: Path, trap: Path) -> Path:
    """A checkpoint whose weights are a pickle."""
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Evil(trap)}))
    return folder


def test_checkpoints_with_code_or_pickles_are_refused_with_the_way_out_cve_2025_24357(tiny_checkpoint, tmp_path):  # noqa: F811
    trap = tmp_path / "trapped"
    for make, way_out in (
        (lambda folder: with_code(tiny_checkpoint, folder, trap, "evil"), "trust_remote_code"),
        (lambda folder: pickled(tiny_checkpoint, folder, trap), "save_pretrained"),
    ):
        folder = make(tmp_path / way_out)
        with pytest.raises((OSError, ValueError), match=way_out):
            load_service(ServerSettings(model=str(folder), num_blocks=50))
    assert not trap.exists()


SCRIPT = """
import sys
from hf_paged.serving.api_server import main
for folder in sys.argv[1:]:
    print("##", main(["--model", folder, "--port", "0", "--num-blocks", "50"]), file=sys.stderr, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "optimized"])
def test_checkpoints_run_no_code_of_their_own_cve_2026_41523_cve_2025_24357(tiny_checkpoint, tmp_path, flags):  # noqa: F811
    """Under `python -O`, too, which leaves out what is only asserted."""
    trap = tmp_path / "trapped"
    folders = [
        with_code(tiny_checkpoint, tmp_path / "unknown", trap, "evil"),
        with_code(tiny_checkpoint, tmp_path / "known", trap, "llama"),
        pickled(tiny_checkpoint, tmp_path / "pickled", trap),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT, *map(str, folders)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stderr.split("##")
    assert [part.split()[0] for part in told[1:]] == ["1", "1", "1"], done.stderr[-2000:]
    assert "trust_remote_code" in told[0] and "trust_remote_code" in told[1]
    assert "Only safetensors files are read" in told[2] and "save_pretrained" in told[2]
    assert not trap.exists()
