"""LiteLLM's proxy (PyPI `litellm[proxy]`) in front of two of our servers.

python examples/gateways/litellm/run.py
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.serving.servers import Command
from examples.gateways.common.environments import python_environment
from examples.gateways.common.program import Front, Gateway, Setup, end
from examples.gateways.common.servers import MODEL_NAME, gateway_process, without_ours

NAME, VERSION = "litellm", "1.105.0"
KEY = "sk-loopback"
# Nothing leaves the machine: prices of models come from the package, and nothing is reported.
VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_MASTER_KEY": KEY,
}
# A server whose queue is full has room within a second: none is left alone for a while, and what it refuses goes back
# to the client at once. A client that leaves before its answer ends the request, as one that leaves a stream does.
RECOMMENDED = {
    "general_settings": {"cancel_on_disconnect": True},
    "router_settings": {"disable_cooldowns": True, "num_retries": 0, "routing_strategy": "least-busy"},
}
KNOWN = ("known: refusals carry `llm_provider-retry-after` instead of Retry-After",)


def prepare(log: Callable[[str], None]) -> Path:
    """Installs it, once."""
    return python_environment(NAME, (f"litellm[proxy]=={VERSION}",), log)


def configuration(urls: list[str], recommended: bool) -> dict[str, Any]:
    """Returns what its configuration file says; one `model_name` for all servers makes them one."""
    deployments = [
        {
            "model_name": MODEL_NAME,
            "litellm_params": {"model": f"hosted_vllm/{MODEL_NAME}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in urls
    ]
    settings = RECOMMENDED if recommended else {}
    return {"model_list": deployments, "litellm_settings": {"telemetry": False}, **settings}


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Front]:
    """Starts it and waits until it is ready."""
    config = setup.folder / "litellm.yaml"
    urls = [server.url for server in setup.servers]
    config.write_text(json.dumps(configuration(urls, setup.recommended), indent=2))  # JSON is YAML
    words = (str(setup.environment / "litellm"), "--config", str(config), "--host", "127.0.0.1")
    command = Command("LiteLLM", words, without_ours(**VARIABLES), ready="/health/readiness")
    with gateway_process(command, setup.folder) as proxy:
        yield Front(proxy.url, MODEL_NAME, {"Authorization": f"Bearer {KEY}"})


if __name__ == "__main__":
    end(Gateway(f"LiteLLM {VERSION}", prepare, start, KNOWN))
