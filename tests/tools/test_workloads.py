"""The workloads have the shapes they claim, from real text, the same every time."""

from __future__ import annotations

import pytest

from hf_paged.errors import UnknownNameError
from hf_paged.tools.bench.workloads import WORKLOADS, TextTokens, Workload, build_workload, mixed_lengths
from hf_paged.tools.prompts import user_prompts

RING = list(range(5000))


def test_w1_has_the_documented_number_of_tokens():
    workload = mixed_lengths(TextTokens(RING))
    assert (len(workload), workload.num_prompt_tokens, workload.num_output_tokens) == (64, 8974, 8807)
    lengths = [*map(len, workload.prompts), *workload.output_lengths]
    assert min(lengths) >= 16 and max(lengths) <= 256


def test_w2_shares_exactly_512_tokens():
    workload = build_workload("W2", TextTokens(RING))
    assert len({tuple(prompt[:512]) for prompt in workload.prompts}) == 1
    assert len({prompt[512] for prompt in workload.prompts}) == 64
    assert all(512 + 16 <= len(prompt) <= 512 + 64 for prompt in workload.prompts)
    assert set(workload.output_lengths) == {32}


def test_w3_and_w4_have_fixed_lengths():
    w3, w4 = (build_workload(name, TextTokens(RING)) for name in ("W3", "W4"))
    assert ([len(p) for p in w3.prompts], w3.output_lengths) == ([128], [128])
    assert ([len(p) for p in w4.prompts], w4.output_lengths) == ([4000] * 4, [64] * 4)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_requests(name: str):
    assert build_workload(name, TextTokens(RING), 3) == build_workload(name, TextTokens(RING), 3)
    assert len(build_workload(name, TextTokens(RING), 3)) == 3


def test_building_twice_gives_other_texts_of_the_same_lengths():
    text = TextTokens(RING)
    first, second = mixed_lengths(text), mixed_lengths(text)
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
    assert first.output_lengths == second.output_lengths
    starts = [p[0] for p in first.prompts + second.prompts]
    assert len(set(starts)) == len(starts), "no two prompts may share a prefix"


def test_a_piece_goes_round_the_ring():
    assert TextTokens([7, 8, 9]).cut(5) in ([7, 8, 9, 7, 8], [8, 9, 7, 8, 9], [9, 7, 8, 9, 7])


def test_a_sample_stands_for_the_whole():
    workload = mixed_lengths(TextTokens(RING))
    sample = workload.sample(8)
    mean = workload.num_output_tokens / len(workload)
    assert len(sample) == 8
    assert sample.num_output_tokens / 8 == pytest.approx(mean, rel=0.25)
    assert workload.sample(64) is workload


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="W1, W2, W3, W4"):
        build_workload("W9", TextTokens(RING))


def test_the_packaged_prompts_are_real_and_different():
    prompts = user_prompts()
    assert len(prompts) == len(set(prompts)) == 50
    words = [len(prompt.split()) for prompt in prompts]
    assert min(words) >= 10 and max(words) >= 180


def test_a_workload_survives_json(tiny_checkpoint):
    from transformers import AutoTokenizer

    workload = mixed_lengths(TextTokens.from_tokenizer(AutoTokenizer.from_pretrained(tiny_checkpoint)), 4)
    assert Workload(**workload.to_dict()) == workload
