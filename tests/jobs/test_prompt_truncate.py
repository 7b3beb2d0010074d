from hypothesis import given
from hypothesis import strategies as st

from batchgen.jobs.truncate import cut_text, longest_fitting


def test_each_side_keeps_the_other():
    assert cut_text("abcdef", 4, "right") == "abcd"
    assert cut_text("abcdef", 4, "left") == "cdef"
    assert cut_text("abcdef", 4, "middle") == "abef"
    assert cut_text("abcdef", 3, "middle") == "abf"
    for side in ("left", "right", "middle"):
        assert cut_text("abcdef", 0, side) == ""
        assert cut_text("abcdef", 6, side) == "abcdef"


@given(text=st.text(max_size=30), side=st.sampled_from(["left", "right", "middle"]), data=st.data())
def test_cutting_keeps_so_many_characters_in_order(text, side, data):
    kept = data.draw(st.integers(0, len(text)))
    cut = cut_text(text, kept, side)
    assert len(cut) == kept
    rest = iter(text)
    assert all(character in rest for character in cut)


@given(length=st.integers(1, 5000), edge=st.integers(-1, 4999), guess=st.integers(-5, 6000))
def test_the_longest_that_fits_is_found_with_few_tries(length, edge, guess):
    edge = min(edge, length - 1)
    tried = []

    def fits(kept):
        assert 0 <= kept < length
        tried.append(kept)
        return kept <= edge

    found = longest_fitting(length, guess, fits)
    assert found == (edge if edge >= 0 else None)
    assert len(tried) <= 40


def test_a_good_guess_never_tries_much_longer_texts():
    tried = []

    def fits(kept):
        tried.append(kept)
        return kept <= 1000

    assert longest_fitting(10_000_000, 1020, fits) == 1000
    assert max(tried) <= 1200
    assert len(tried) <= 12
