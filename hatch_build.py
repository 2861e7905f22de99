"""Puts the compiled native library into the wheel; run by hatchling.

Without HF_PAGED_BUILD_NATIVE=1 the wheel is pure Python and the library is built at first use: an installation from
source then needs neither torch nor a compiler while it is being built.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "hf_paged/kernels/cpu"


class NativeLibraryHook(BuildHookInterface):
    """Compiles `csrc/` with the package's own code, and names the platform in the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling; `version` is `"standard"` or `"editable"`."""
        if version == "editable" or os.environ.get("HF_PAGED_BUILD_NATIVE") != "1":
            return
        sys.path.insert(0, self.root)
        from hf_paged.kernels.cpu import building, library_cache

        self._folder = tempfile.TemporaryDirectory(prefix="hf_paged-wheel-")
        library = Path(self._folder.name) / library_cache.LIBRARY_NAME
        building.compile_library(library, building.find_compiler(), building.find_torch(), building.SOURCES)
        manifest = library_cache.write_manifest(library, building.source_hash(building.SOURCES))
        for path in (library, manifest):
            build_data["force_include"][str(path)] = f"{PACKAGE}/{path.name}"
        # Torch's stable ABI: one library for all Pythons.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
