"""A process that compiles: reads jobs from stdin and answers each with a line of JSON on stdout.

{"list": true}                              -> {"variants": [{"name": ..., "kernel": ..., "targets": [...]}, ...]}
{"variant": NAME, "target": "sm_90"}        -> a row: what was compiled, and its figures or an error
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_paged.kernels import triton as kernels
from hf_paged.kernels.triton.variant import KernelVariant

from .architectures import ARCHITECTURES, Architecture
from .machine_code import read_figures

_READER = Path(__file__).with_name("machine_code.py")
_LISTS = "all_configurations"


def find_variants() -> dict[str, KernelVariant]:
    """Returns what all modules of kernels list, by name."""
    found: dict[str, KernelVariant] = {}
    for info in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        module = importlib.import_module(info.name)
        lists = getattr(module, _LISTS, None)
        if lists is None or lists.__module__ != module.__name__:
            continue
        for variant in lists():
            assert found.get(variant.name, variant) == variant, f"two kernels are listed as {variant.name!r}"
            found[variant.name] = variant
    return found


def compile_variant(variant: KernelVariant, target: str, cache: Path) -> dict[str, Any]:
    """Returns the row of a kernel on an architecture; compiles it unless its figures are known.

    Args:
        variant (`KernelVariant`):
            The kernel in one of its uses.
        target (`str`):
            The architecture.
        cache (`Path`):
            Folder of known figures.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    row = {
        "name": variant.name,
        "kernel": variant.kernel.rpartition(":")[2],
        "target": target,
        "num_warps": variant.num_warps,
        "has_dot": variant.has_dot,
        "wide_loads": variant.wide_loads,
        "version": ".".join(triton.__version__.split(".")[:2]),
    }
    architecture = ARCHITECTURES[target]
    try:
        source = source_of(variant)
        options = compile_options(variant, architecture)
        known = cache / f"{_key(source, target, options, triton.__version__)}.json"
        if not known.exists():
            gpu = GPUTarget(architecture.backend, architecture.arch, architecture.warp_size)
            compiled = triton.compile(source, target=gpu, options=options)
            tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
            _write(known, read_figures(compiled, tools).to_dict())
        figures = json.loads(known.read_text(encoding="utf-8"))
    except Exception as error:
        words = " ".join(str(error).split())
        return {**row, "error": f"{type(error).__name__}: {words[-400:]}"}
    occupancy = architecture.occupancy(figures["registers"], figures["shared"], variant.num_warps)
    return {**row, "figures": figures, "occupancy": occupancy}


def compile_options(variant: KernelVariant, architecture: Architecture) -> dict[str, int]:
    """Returns the words for Triton's compiler.

    Args:
        variant (`KernelVariant`):
            The kernel in one of its uses.
        architecture (`Architecture`):
            What it is compiled for.
    """
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None and architecture.backend == "cuda":
        options["maxnreg"] = variant.max_registers
    return options


def source_of(variant: KernelVariant) -> Any:
    """Returns what Triton compiles.

    Args:
        variant (`KernelVariant`):
            The kernel in one of its uses.
    """
    from triton.compiler import ASTSource

    module, _, name = variant.kernel.partition(":")
    function = getattr(importlib.import_module(module), name)
    names = function.arg_names
    given = {*variant.signature, *variant.constexprs}
    assert given == set(names), f"arguments that are not named, or named too often: {sorted(given ^ set(names))}"
    return ASTSource(
        fn=function,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constexprs.items()},
        # In an order that is the same in every process: the key of what is known depends on it.
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if name in variant.divisible},
    )


def _key(source: Any, target: str, options: dict[str, int], version: str) -> str:
    """A hash of all that the figures depend on."""
    constants = sorted((index, str(value)) for index, value in source.constants.items())
    text = f"{source.hash()} {constants} {sorted(source.signature.items())} {target} {options} {version}"
    return hashlib.sha256(text.encode() + _READER.read_bytes()).hexdigest()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def answer(job: dict[str, Any], variants: dict[str, KernelVariant], cache: Path) -> dict[str, Any]:
    """Returns what a job asks for.

    Args:
        job (`dict[str, Any]`):
            A line of stdin.
        variants (`dict[str, KernelVariant]`):
            All kernels, by name.
        cache (`Path`):
            Folder of known figures.
    """
    if "list" in job:
        listed = [
            {
                "name": variant.name,
                "kernel": variant.kernel,
                "has_dot": variant.has_dot,
                "targets": [target for target in ARCHITECTURES if variant.is_for(target)],
            }
            for variant in variants.values()
        ]
        return {"variants": listed}
    return compile_variant(variants[job["variant"]], job["target"], cache)


def main() -> None:
    """Answers jobs until stdin ends."""
    # Compilers print what they like: file descriptor 1 becomes stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cache = Path(sys.argv[1])
    variants = find_variants()
    with tempfile.TemporaryDirectory(prefix="hf-paged-gates-") as folder:
        # What Triton keeps of a compilation is large and not read again: figures are.
        os.environ["TRITON_CACHE_DIR"] = folder
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), variants, cache)), file=answers, flush=True)


if __name__ == "__main__":
    main()
