"""Keys of random streams: of a row's place alone, and far apart for neighbours."""

from batchgen.seeds import mix64, row_seed


def test_known_values_of_the_published_generator() -> None:
    # The first outputs of splitmix64 from state 0 and from state 1234567, as its authors give them.
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1234567) == 6457827717110365317


def test_places_have_different_keys_that_fit_a_signed_integer() -> None:
    keys = {row_seed(seed, file, row) for seed in range(3) for file in range(20) for row in range(500)}
    assert len(keys) == 3 * 20 * 500
    assert all(0 <= key < 2**63 for key in keys)
    assert row_seed(0, 1, 2) == row_seed(0, 1, 2) != row_seed(0, 2, 1)
    assert row_seed(-1, 0, 0) != row_seed(1, 0, 0)


def test_bits_of_neighbours_differ_by_half() -> None:
    different = sum((row_seed(0, 0, row) ^ row_seed(0, 0, row + 1)).bit_count() for row in range(1000))
    assert 31 < different / 1000 < 32
