"""What is recorded of a request beside logits: put together over chunks, cut, and asked for in part."""

from __future__ import annotations

import pytest
import torch

from hf_paged.generation.recording import Recorded, StepRecorder, TokenRange
from hf_paged.generation.request import HiddenStatesWanted
from hf_paged.generation.step import ScheduledRequest, SchedulerOutput

LAYERS, HIDDEN, HEADS = 3, 4, 2


def hidden(first: int, end: int) -> torch.Tensor:
    """`[layers, positions, hidden_size]`, different everywhere."""
    return (
        torch.arange(first, end).float()[None, :, None] + torch.arange(LAYERS)[:, None, None] / 10 + torch.zeros(HIDDEN)
    )


def weights(first: int, end: int) -> list[torch.Tensor]:
    """Per layer `[heads, positions, keys]`; a position weighs itself by its number and sees nothing behind it."""
    layer = torch.zeros(HEADS, end - first, end)
    for place, position in enumerate(range(first, end)):
        layer[:, place, position] = position + 1
    return [layer, layer * 2]


def recorded(first: int, end: int) -> Recorded:
    return Recorded(first, hidden(first, end), weights(first, end))


def check(one: Recorded, first: int, end: int) -> None:
    assert (one.first_position, one.end_position) == (first, end)
    assert torch.equal(one.hidden_states, hidden(0, end)[:, first:])
    for mine, whole in zip(one.attentions, weights(0, end), strict=True):
        assert torch.equal(mine[..., :end], whole[:, first:])
        assert not mine[..., end:].any()


@pytest.mark.parametrize("cuts", [[5], [1, 5], [2, 3, 5], [1, 2, 3, 4, 5]])
def test_chunks_are_put_together(cuts):
    whole = recorded(0, cuts[0])
    for first, end in zip(cuts, cuts[1:], strict=False):
        whole.append(recorded(first, end))
    check(whole, 0, 5)
    assert whole.attentions[0].shape == (HEADS, 5, 5)


@pytest.mark.parametrize(("first", "end"), [(0, 3), (0, 5), (2, 5), (0, 7), (3, 7), (5, 6)])
def test_what_is_computed_anew_is_known_already(first, end):
    """After a request has lost its blocks."""
    whole = recorded(0, 5)
    whole.append(recorded(first, end))
    check(whole, 0, max(5, end))


def test_only_hidden_states_or_only_attentions():
    states = Recorded(0, hidden(0, 2))
    states.append(Recorded(2, hidden(2, 4)))
    assert torch.equal(states.hidden_states, hidden(0, 4)) and states.attentions is None
    attentions = Recorded(0, None, weights(0, 2))
    attentions.append(Recorded(2, None, weights(2, 4)))
    assert attentions.end_position == 4 and attentions.hidden_states is None


def test_a_gap_is_our_own_mistake():
    with pytest.raises(AssertionError, match="positions 3 to 4 were never recorded"):
        recorded(0, 3).append(recorded(4, 5))


@pytest.mark.parametrize("since", range(8))
def test_since_a_position(since):
    one = recorded(2, 6).since(since)
    assert one.first_position == max(2, since)
    count = max(6 - max(2, since), 0)
    assert one.hidden_states.shape == (LAYERS, count, HIDDEN)
    assert [layer.shape[1] for layer in one.attentions] == [count, count]
    if count:
        check(one, max(2, since), 6)


def test_nothing_yet_goes_on_where_it_should_begin():
    """The tokens before are computed anew, and not wanted."""
    one = recorded(0, 3).since(5)
    one.append(recorded(3, 7))
    assert one.first_position == 5
    assert torch.equal(one.hidden_states, hidden(5, 7))
    assert torch.equal(one.attentions[0], weights(5, 7)[0])


@pytest.mark.parametrize("end", [0, 2, 4, 6, 9])
def test_cut(end):
    one = recorded(2, 6)
    one.cut(end)
    assert one.end_position == min(max(end, 2), 6)
    assert one.hidden_states.shape[1] == one.attentions[0].shape[1] == one.end_position - 2


# --------------------------------------------------------------------------------------- a step


def share(request_id: str, first: int, count: int, **wants) -> ScheduledRequest:
    samples = wants.pop("samples", True)
    return ScheduledRequest(
        request_id=request_id,
        num_computed_tokens=first,
        num_scheduled_tokens=count,
        new_token_ids=(),
        new_block_ids=((),),
        is_new=False,
        sample_ids=(request_id,) if samples else (),
        **wants,
    )


def call(*shares: ScheduledRequest) -> tuple[dict[str, TokenRange], list[torch.Tensor]]:
    """Where the tokens of each request lie in a call with all of them, and the call's hidden states."""
    ranges, start, states = {}, 0, []
    for row, one in enumerate(shares):
        first, count = one.num_computed_tokens, one.num_scheduled_tokens
        ranges[one.request_id] = TokenRange(row, start, start + count, first)
        states.append(hidden(first, first + count) + 100 * row)
        start += count
    return ranges, list(torch.cat(states, dim=1)[:, None])


def test_a_step_records_what_each_request_wants():
    shares = [
        share("all", 4, 3, hidden_states=HiddenStatesWanted()),
        share("nothing", 0, 5),
        share("last", 2, 2, hidden_states=HiddenStatesWanted(layers=(-1, 0), all_tokens=False)),
        share("not yet", 0, 2, hidden_states=HiddenStatesWanted(all_tokens=False), samples=False),
        share("weights", 1, 1, attentions=True),
    ]
    recorder = StepRecorder(SchedulerOutput(0, tuple(shares)))
    ranges, states = call(*shares)
    assert recorder.wants_hidden_states and set(recorder.attention_ranges(ranges)) == {"weights"}
    recorder.take(ranges, states, {"weights": weights(1, 2)})
    found = recorder.recorded
    assert set(found) == {"all", "last", "weights"}
    assert torch.equal(found["all"].hidden_states, hidden(4, 7)) and found["all"].first_position == 4
    assert torch.equal(found["last"].hidden_states, (hidden(3, 4) + 200)[[-1, 0]])
    assert found["last"].first_position == 3
    assert found["weights"].hidden_states is None and found["weights"].first_position == 1


def test_a_step_of_several_calls_goes_on_where_the_last_one_ended():
    """Batch-invariant steps compute a request in tiles."""
    everything = share("all", 0, 5, hidden_states=HiddenStatesWanted())
    last = share("last", 0, 5, hidden_states=HiddenStatesWanted(all_tokens=False))
    recorder = StepRecorder(SchedulerOutput(0, (everything, last)))
    for first, count in ((0, 2), (2, 2), (4, 1)):
        for name in ("all", "last"):
            recorder.take({name: TokenRange(0, 0, count, first)}, list(hidden(first, first + count)[:, None]), {})
    assert torch.equal(recorder.recorded["all"].hidden_states, hidden(0, 5))
    assert torch.equal(recorder.recorded["last"].hidden_states, hidden(4, 5))


def test_a_step_that_nobody_wants_anything_of():
    recorder = StepRecorder(SchedulerOutput(0, (share("a", 0, 3),)))
    assert not recorder.wants_hidden_states
    recorder.take(call(share("a", 0, 3))[0], None, {})
    assert recorder.recorded == {}
