"""How layers share one pool of KV blocks: groups of equal size, windows, padding."""

import pytest

from batchgen.errors import UnsupportedModelError
from batchgen.kernels.kv import KVCacheSpec
from batchgen.models.kv_layout import KVLayout, kv_layout


def lay_out(windows: list[int | None], max_len: int = 8192) -> KVLayout:
    layout = kv_layout([KVCacheSpec(2, 64, 16, "float32", window=window) for window in windows], max_len)
    check(layout, windows)
    return layout


def check(layout: KVLayout, windows: list[int | None]) -> None:
    assert len(layout.groups) == len(layout.places) == len(windows)
    assert set(layout.groups) == set(range(len(layout.windows)))
    assert layout.spec.window is None
    # Layers of one group never share memory; those of another group may.
    assert len(set(zip(layout.groups, layout.places, strict=True))) == len(windows)
    for group, window in zip(layout.groups, windows, strict=True):
        kept = layout.windows[group]
        assert kept is None or kept == window, "a layer keeps at least what it sees"


def hybrid(num_layers: int, window: int, full_every: int) -> list[int | None]:
    return [None if index % full_every == full_every - 1 else window for index in range(num_layers)]


@pytest.mark.parametrize("window", [None, 4096])
def test_equal_layers_are_one_group(window: int | None) -> None:
    layout = lay_out([window] * 32)
    assert (layout.windows, layout.num_places) == ((window,), 32)
    assert layout.places == tuple(range(32))


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    assert lay_out([4096] * 4, max_len=4096).windows == (None,)
    assert lay_out([None, 4096] * 4, max_len=4096).windows == (None,)
    assert lay_out([None, 4096] * 4, max_len=4200).windows == (None,), "too little to gain for a second table"


@pytest.mark.parametrize(
    ("full_every", "num_layers", "num_groups"), [(2, 26, 2), (4, 32, 4), (2, 2, 2), (3, 3, 3)]
)
def test_counts_that_divide_leave_no_place_empty(full_every: int, num_layers: int, num_groups: int) -> None:
    layout = lay_out(hybrid(num_layers, 128, full_every))
    assert len(layout.windows) == num_groups
    assert layout.windows.count(None) == 1
    assert layout.num_places * num_groups == num_layers


def test_counts_that_do_not_divide_are_padded_where_that_is_cheap() -> None:
    # 10 full layers and 52 with a window: 5 groups of 13.
    layout = lay_out(hybrid(62, 1024, 6))
    assert (layout.num_places, layout.windows.count(None), layout.windows.count(1024)) == (13, 1, 4)
    assert layout.blocks_for(8192) * layout.num_places < 0.4 * 62 * 8192 / 16


def test_few_windowed_layers_are_kept_whole() -> None:
    # Splitting 27 and 1 would need ten tables a sequence to save three in a hundred bytes.
    assert lay_out([None] * 27 + [4096]).windows == (None,)


def test_several_windows() -> None:
    layout = lay_out([None, 64, 512, None, 64, 512])
    assert sorted(window or 0 for window in layout.windows) == [0, 64, 512]
    assert layout.num_places == 2


def test_blocks_of_a_sequence() -> None:
    layout = lay_out([None, 20])
    assert layout.blocks_for(10) == 2
    assert layout.blocks_for(160) == 10 + 3
    # 19 positions before a chunk of 100, anywhere among blocks of 16: never more than the sequence has.
    assert layout.blocks_for(160, chunk=100) == 10 + 9
    assert layout.blocks_for(160, chunk=160) == 10 + 10


def test_layers_of_other_shapes_are_refused() -> None:
    specs = [KVCacheSpec(2, 64, 16, "float32"), KVCacheSpec(4, 64, 16, "float32")]
    with pytest.raises(UnsupportedModelError, match="different shapes"):
        kv_layout(specs, 100)
