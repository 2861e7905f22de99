"""Stop strings against a naive oracle that looks at the whole text after each piece."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.generation.stop_strings import StopStringMatcher


def stream(pieces, stop, include=False, num_uncounted=0):
    """Returns (pieces released, matched, number of pieces taken)."""
    matcher = StopStringMatcher(stop, include)
    released = []
    for i, piece in enumerate(pieces):
        released.append(matcher.append(piece, can_stop=i >= num_uncounted))
        if matcher.matched is not None:
            return released, matcher.matched, i + 1
    released.append(matcher.finish())
    return released, None, len(pieces)


def oracle(pieces, stop, include, num_uncounted):
    """The earliest end past the uncounted text; of equal ends the longest string."""
    text = "".join(pieces)
    free = len("".join(pieces[:num_uncounted]))
    ends = [
        (end, -len(s), s)
        for end in range(free + 1, len(text) + 1)
        for s in stop
        if text[:end].endswith(s)
    ]  # fmt: skip
    if not ends:
        return text, None
    end, _, matched = min(ends)
    return text[: end if include else end - len(matched)], matched


texts = st.text(alphabet="ab ", max_size=5)


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(texts, max_size=12),
    stop=st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
    num_uncounted=st.integers(0, 4),
)
def test_equals_the_naive_oracle(pieces, stop, include, num_uncounted):
    released, matched, taken = stream(pieces, stop, include, num_uncounted)
    assert ("".join(released), matched) == oracle(pieces, stop, include, num_uncounted)
    # Nothing is held back that could not begin a stop string.
    for i in range(taken - (matched is not None)):
        text, shown = "".join(pieces[: i + 1]), "".join(released[: i + 1])
        longest = max(
            (n for n in range(len(text) + 1) if any(len(s) > n and s[:n] == text[len(text) - n :] for s in stop)),
            default=0,
        )
        assert text[len(shown) :] == text[len(text) - longest :]


def test_inside_a_token_and_across_tokens():
    """vllm-project/vllm#3672"""
    assert stream(["Hello wor", "ld. More"], ["ld."]) == (["Hello wor", ""], "ld.", 2)
    assert stream(["a S", "T", "OP b"], ["STOP"]) == (["a ", "", ""], "STOP", 3)
    assert stream(["STOP b"], ["STOP"]) == ([""], "STOP", 1)
    assert stream(["a STOP b"], ["STOP"], include=True) == (["a STOP"], "STOP", 1)


def test_held_text_arrives_when_the_answer_ends_otherwise():
    """ggml-org/llama.cpp#15007"""
    assert stream(["x ", "TRE"], ["TREXXXX"]) == (["x ", "", "TRE"], None, 2)


def test_long_stop_strings_do_not_delay_other_text():
    """vllm-project/vllm#11089"""
    released, _, _ = stream(["Hello", " world"], ["z" * 40])
    assert released == ["Hello", " world", ""]


def test_first_end_wins_then_the_longest():
    assert stream(["abcd"], ["bcd", "bc"])[1] == "bc"
    assert stream(["abc"], ["c", "abc", "bc"]) == ([""], "abc", 1)
    assert stream(["a", "b", "c"], ["abX", "bc"]) == (["", "", "a"], "bc", 3)


def test_no_stop_before_min_tokens():
    """vllm-project/vllm#21987: the text of the first tokens cannot end the answer, but may begin what ends it."""
    assert stream(["\n", "\n", "x", "\n", "y"], ["\n"], num_uncounted=3) == (["\n", "\n", "x", ""], "\n", 4)
    assert stream(["a", "\n", "\n", "b"], ["\n\n"], num_uncounted=2) == (["a", "", ""], "\n\n", 3)
    assert stream(["\n\n", "\n"], ["\n\n"], num_uncounted=1) == (["\n", ""], "\n\n", 2)


def test_no_stop_strings():
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], None, 3)


def test_memory_grows_with_the_length_of_a_stop_string_and_not_with_its_square():
    stop = "z" * 100_000
    tracemalloc.start()
    matcher = StopStringMatcher([stop])
    assert matcher.append("azz") == "a" and matcher.append("b") == "zzb"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
