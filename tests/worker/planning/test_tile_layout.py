"""Tiles cover each fragment once, and under Muon none cuts a matrix."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.planning.tile_layout import (
    TILE_GRAIN,
    lay_out_tiles,
    list_matrices,
)
from barnraise.spec import MUON, OPTIMIZERS, TENSOR_ALIGN, ModelSpec, preset

MODELS = st.builds(
    lambda heads, head_width, layers: ModelSpec(layers, heads * head_width, heads, 16, 300),
    st.integers(1, 12),
    st.sampled_from([16, 17, 32, 64]),
    st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(MODELS, st.integers(1, 40), st.sampled_from(OPTIMIZERS))
def test_tiles_cover_each_element_that_is_trained_once(model, grains, optimizer):
    for fragment in model.fragments():
        layouts = lay_out_tiles(fragment, grains * TILE_GRAIN, optimizer)
        assert layouts[0].begin == 0 and layouts[-1].end == fragment.size
        assert all(one.end == other.begin for one, other in itertools.pairwise(layouts))
        assert all(layout.begin % TILE_GRAIN == 0 for layout in layouts)
        trained = [
            (layout.begin + begin, layout.begin + end)
            for layout in layouts
            for begin, end in (*layout.spans, *((m.begin, m.end) for m in layout.matrices))
        ]
        covered = sorted(trained)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(covered))
        for slot in fragment.slots:
            inside = [
                min(end, slot.offset + slot.size) - max(begin, slot.offset)
                for begin, end in covered
            ]
            assert sum(length for length in inside if length > 0) == slot.size, slot


@settings(max_examples=30, deadline=None)
@given(MODELS, st.integers(1, 40))
def test_second_moments_are_those_of_norms_and_biases_in_order(model, grains):
    block = model.fragments()[1]
    layouts = lay_out_tiles(block, grains * TILE_GRAIN, MUON)
    vectors = sum(slot.size for slot in block.slots if len(slot.shape) == 1)
    assert vectors <= layouts[-1].second_end <= vectors + TENSOR_ALIGN * len(block.slots) + 64
    for one, other in itertools.pairwise(layouts):
        assert one.second_end == other.second_begin
    for layout in layouts:
        assert all(begin % TENSOR_ALIGN == 0 for begin, _ in layout.spans)


def test_queries_keys_and_values_are_matrices_of_their_own():
    embedding, block, *_, final = preset("gpt2-124m").fragments()
    shapes = [(matrix.rows, matrix.columns) for matrix in list_matrices(block)]
    assert shapes == [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
    assert not list_matrices(embedding) and not list_matrices(final)


def test_large_blocks_are_cut_into_several_tiles():
    block = preset("gpt2-124m").fragments()[1]
    layouts = lay_out_tiles(block, block.size // 8, MUON)
    assert [len(layout.matrices) for layout in layouts] == [3, 1, 1, 1]
    assert max(layout.elements for layout in layouts) < 0.35 * block.size
