from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.messages import Feature
from batchgen.engine.prefix_cache import cache_root
from batchgen.engine.sequence import Sequence

MakeSequence = Callable[..., Sequence]
Admit = Callable[[BlockManager, Sequence], bool]


def computed(admit: Admit, blocks: BlockManager, sequence: Sequence) -> Sequence:
    assert admit(blocks, sequence)
    sequence.num_computed_tokens = len(sequence.token_ids)
    blocks.cache_computed(sequence)
    return sequence


# BG-25: a prompt that is wholly in the cache leaves one token to compute.
@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (15, 0)])
def test_a_hit_never_covers_the_last_token(
    make_sequence: MakeSequence, admit: Admit, length: int, hit: int
) -> None:
    blocks = BlockManager(20, 16)
    first = computed(admit, blocks, make_sequence(range(length)))
    second = make_sequence(range(length))
    assert admit(blocks, second)
    assert second.num_computed_tokens == hit
    assert second.block_tables[0][: hit // 16] == first.block_tables[0][: hit // 16]
    assert not set(second.block_tables[0][hit // 16 :]) & set(first.block_tables[0])
    assert (blocks.cache.num_queried_tokens, blocks.cache.num_hit_tokens) == (2 * length, hit)


def test_a_hit_ends_at_the_first_block_that_differs(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(20, 16)
    computed(admit, blocks, make_sequence(range(48)))
    other = [*range(16), 99, *range(17, 48), 1]
    second = make_sequence(other)
    admit(blocks, second)
    assert second.num_computed_tokens == 16
    shifted = make_sequence([99, *range(47)])
    admit(blocks, shifted)
    assert shifted.num_computed_tokens == 0


def test_freed_blocks_stay_findable_until_reused_and_the_tail_goes_first(
    make_sequence: MakeSequence, admit: Admit
) -> None:
    blocks = BlockManager(4, 16)
    blocks.free(computed(admit, blocks, make_sequence(range(64))))
    assert blocks.pool.num_free == 4
    intruder = make_sequence([99] * 20)
    admit(blocks, intruder)
    blocks.free(intruder)
    again = make_sequence(range(64))
    admit(blocks, again)
    assert again.num_computed_tokens == 32


def test_roots_keep_apart_what_must_not_be_shared(make_sequence: MakeSequence, admit: Admit) -> None:
    image = Feature(offset=0, length=4, content_hash=b"one")
    roots = [
        cache_root(),
        cache_root(cache_salt=""),
        cache_root(cache_salt="a"),
        cache_root(adapter_hash=b"a"),
        cache_root(kv_dtype="float16"),
        cache_root(features=[image]),
        cache_root(features=[Feature(offset=1, length=4, content_hash=b"one")]),
        cache_root(features=[Feature(offset=0, length=5, content_hash=b"one")]),
        cache_root(features=[Feature(offset=0, length=4, content_hash=b"two")]),
        cache_root(features=[image, image]),
    ]
    assert len(set(roots)) == len(roots)
    assert cache_root(features=[image]) == cache_root(features=(image,))
    blocks = BlockManager(100, 16)
    for root in roots:
        sequence = computed(admit, blocks, make_sequence(range(40), cache_root=root))
        again = make_sequence(range(40), cache_root=root)
        admit(blocks, again)
        assert again.block_tables[0][:2] == sequence.block_tables[0][:2]
    assert blocks.cache.num_hit_tokens == 32 * len(roots)


def test_a_request_may_refuse_to_read_the_cache(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(20, 16)
    computed(admit, blocks, make_sequence(range(40)))
    sequence = make_sequence(range(40), skip_reading_prefix_cache=True)
    admit(blocks, sequence)
    assert sequence.num_computed_tokens == 0


def test_tokens_that_are_not_known_yet_fill_no_hashed_block(
    make_sequence: MakeSequence, admit: Admit
) -> None:
    blocks = BlockManager(20, 16)
    sequence = computed(admit, blocks, make_sequence(range(31)))
    sequence.num_placeholders = 1
    assert blocks.grow([(sequence, 32)]) == []
    sequence.num_computed_tokens = 32
    blocks.cache_computed(sequence)
    assert sequence.num_cached_blocks == 1
    sequence.token_ids.append(5)
    sequence.num_placeholders = 0
    blocks.cache_computed(sequence)
    assert sequence.num_cached_blocks == 2


def test_with_two_groups_a_hit_needs_the_block_of_both(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(20, 16, group_windows=(None, None))
    first = computed(admit, blocks, make_sequence(range(40), num_groups=2))
    assert not set(first.block_tables[0]) & set(first.block_tables[1])
    second = make_sequence(range(40), num_groups=2)
    admit(blocks, second)
    assert second.num_computed_tokens == 32
    assert [table[:2] for table in second.block_tables] == [table[:2] for table in first.block_tables]
    for sequence in (first, second):
        blocks.free(sequence)
    # Besides the blank ones, hand out one cached block: that of the first group that ends the prefix.
    assert blocks.pool.num_cached == 4
    blocks.pool.allocate(17)
    third = make_sequence(range(40), num_groups=2)
    assert [len(table) for table in blocks.lookup(third, 39).tables] == [1, 1]


# The name says nothing of the weights: another adapter loaded under it finds none of the old one's blocks.
def test_an_adapter_loaded_anew_under_its_name_is_another_one(
    make_scheduler: Any, make_request: Any, execute: Any
) -> None:
    scheduler = make_scheduler()
    hits = []
    for number, content in enumerate([b"old", b"old", b"new", b"new", b"old", b""]):
        request = make_request(str(number), range(40), adapter="x" if content else None, max_tokens=1)
        scheduler.add(request, cache_root(adapter_hash=content))
        hits.append(scheduler.update(execute(scheduler.schedule()))[-1].num_cached_tokens)
    assert hits == [0, 32, 0, 32, 32, 0]


def test_hits_are_counted_in_tokens(make_scheduler: Any, make_request: Any, execute: Any) -> None:
    scheduler = make_scheduler()
    for number, (length, skip) in enumerate([(40, None), (40, None), (20, None), (40, True)]):
        request = make_request(str(number), range(length), max_tokens=1, skip_reading_prefix_cache=skip)
        scheduler.add(request)
        scheduler.update(execute(scheduler.schedule()))
    cache = scheduler.blocks.cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (40 + 40 + 20, 32 + 16)
