"""Where hf_paged keeps files that it can make again: the packaged model, and what is built at first use."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from .errors import ConfigurationError


def cache_folder() -> Path:
    """Returns the user's cache folder of hf_paged, which may not exist yet.

    `HF_PAGED_CACHE` names it; without that it is the platform's own place: `~/Library/Caches` on macOS,
    `%LOCALAPPDATA%` on Windows, `$XDG_CACHE_HOME` or `~/.cache` elsewhere.
    """
    chosen = os.environ.get("HF_PAGED_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "hf_paged"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "hf_paged" / "Cache"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "hf_paged"


def writable_cache_folder() -> Path:
    """Returns the user's cache folder, made if it was not there.

    Raises:
        ConfigurationError: If it cannot be written.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {str(folder)!r} cannot be written ({error.strerror or error}); let HF_PAGED_CACHE name "
            "one that can."
        ) from None
