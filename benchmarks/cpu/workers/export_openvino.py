"""Writes a Transformers folder as an OpenVINO model with its own weights: `python export_openvino.py MODEL FOLDER`."""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export


def main() -> None:
    """Exports the model that the command line names."""
    model, folder = sys.argv[1:]
    # "auto" and no quantization: bf16 weights stay bf16. The tokenizer is not needed, prompts are token ids.
    main_export(
        model,
        folder,
        task="text-generation-with-past",
        convert_tokenizer=False,
        library_name="transformers",
    )


if __name__ == "__main__":
    main()
