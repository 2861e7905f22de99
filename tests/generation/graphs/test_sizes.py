"""The steps that graphs are captured for, and the one that a step is padded to."""

from __future__ import annotations

import pytest

from hf_paged.generation.graphs.sizes import GraphShape, ShapeTable, batch_sizes, table_widths


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_sizes_lie_closer_where_padding_would_cost_more(max_num_seqs, sizes):
    assert batch_sizes(max_num_seqs) == sizes


def test_many_requests_take_few_sizes():
    assert batch_sizes(256) == (1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32))


@pytest.mark.parametrize(("asked", "sizes"), [((8, 1, 4, 4), (1, 4, 8)), ((16, 32), (16,)), ((64,), ()), ((), ())])
def test_a_user_chooses_sizes_that_can_occur(asked, sizes):
    assert batch_sizes(16, asked) == sizes


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "widths"),
    [
        (100, 16, (7,)),
        (512, 16, (32,)),
        (1023, 16, (32, 64)),
        (1000, 16, (63,)),
        (8192, 16, (32, 128, 512)),
        (8200, 16, (32, 128, 513)),
        (131072, 128, (4, 16, 64, 256, 1024)),
        (4096, 1024, (1, 4)),
    ],
)
def test_contexts_take_fewer_still(max_model_len, block_size, widths):
    assert table_widths(max_model_len, block_size) == widths


def test_the_largest_are_captured_first():
    assert ShapeTable((1, 2), (4, 16)).all() == [(2, 16), (2, 4), (1, 16), (1, 4)]


def test_a_step_is_padded_to_the_next_or_to_one_of_at_most_twice_its_size():
    table = ShapeTable((1, 2, 4, 8), (4, 16))
    assert table.fitting(2, 4) == [(2, 4), (2, 16), (4, 4), (4, 16)]
    assert table.fitting(3, 5) == [(4, 16), (8, 16)]
    assert table.fitting(8, 16) == [GraphShape(num_requests=8, table_width=16)]


def test_every_step_within_the_limits_fits_somewhere_with_little_padding():
    table = ShapeTable(batch_sizes(200), table_widths(4096, 16))
    for num_requests in range(1, 201):
        for width in range(1, 257):
            best = table.fitting(num_requests, width)[0]
            assert num_requests <= best.num_requests and width <= best.table_width
            assert best.num_requests <= 2 * num_requests and best.table_width <= max(32, 4 * width)
            assert num_requests < 65 or best.num_requests <= 1.3 * num_requests
