"""What a GPU chooses is what the CPU chooses."""

from __future__ import annotations

import pytest

from tests.kernels.triton.interpreted import run_interpreted


def test_triton_chooses_the_same_tokens():
    pytest.importorskip("triton")
    cases = run_interpreted("-m", "tests.generation.sampling.run_triton_choices")
    assert len(cases) == 4 and all(case["same"] for case in cases), cases
