from collections.abc import Callable

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.sequence import Sequence

MakeSequence = Callable[..., Sequence]
Admit = Callable[[BlockManager, Sequence], bool]


def test_a_waiting_sequence_gets_all_its_blocks_or_none(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(4, 16)
    assert not admit(blocks, make_sequence(range(65)))
    running = make_sequence(range(48))
    assert admit(blocks, running)
    later = make_sequence([9] * 17)
    assert not admit(blocks, later)
    assert later.block_tables == ([],)
    assert blocks.pool.num_free == 1
    assert admit(blocks, make_sequence([9] * 16))
    assert blocks.pool.num_free == 0


def test_cached_blocks_that_a_hit_revives_are_not_counted_as_free_twice(
    make_sequence: MakeSequence, admit: Admit
) -> None:
    blocks = BlockManager(4, 16)
    first = make_sequence(range(48))
    admit(blocks, first)
    first.num_computed_tokens = 48
    blocks.cache_computed(first)
    blocks.free(first)
    holder = make_sequence([9] * 16)
    admit(blocks, holder)
    # 3 free blocks, all of them cached; the hit takes 2 and 1 is left for the 2 that are new.
    assert not admit(blocks, make_sequence([*range(32), *[5] * 32]))
    again = make_sequence([*range(32), *[5] * 16])
    assert admit(blocks, again)
    assert again.num_computed_tokens == 32


def test_only_the_last_partly_filled_block_of_a_fork_is_copied_and_the_last_writer_keeps_it(
    make_sequence: MakeSequence, admit: Admit
) -> None:
    blocks = BlockManager(20, 16)
    parent = make_sequence(range(40))
    admit(blocks, parent)
    parent.num_computed_tokens = 40
    children = [make_sequence(range(40)) for _ in range(2)]
    for child in children:
        blocks.fork(parent, child)
    full, partial = parent.block_tables[0][:2], parent.block_tables[0][2]
    assert blocks.pool.num_free == 17
    copies = [blocks.grow([(sequence, 41)]) for sequence in (parent, *children)]
    assert [len(each) for each in copies if each is not None] == [1, 1, 0]
    assert all(copy[0] == partial for each in copies for copy in each or [])
    assert children[1].block_tables[0][2] == partial
    tails = {sequence.block_tables[0][2] for sequence in (parent, *children)}
    assert len(tails) == 3
    assert all(sequence.block_tables[0][:2] == full for sequence in (parent, *children))
    assert blocks.pool.num_free == 15
    for sequence in (parent, *children):
        blocks.free(sequence)
    assert blocks.pool.num_free == 20
    assert set(blocks.pool.ref_counts) == {0}


def test_a_fork_at_a_block_edge_copies_nothing(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(20, 16)
    parent, child = make_sequence(range(32)), make_sequence(range(32))
    admit(blocks, parent)
    parent.num_computed_tokens = 32
    blocks.fork(parent, child)
    assert blocks.grow([(parent, 33)]) == []
    assert blocks.grow([(child, 33)]) == []
    assert parent.block_tables[0][:2] == child.block_tables[0][:2]
    assert parent.block_tables[0][2] != child.block_tables[0][2]


def test_growing_without_blocks_changes_nothing(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(3, 16)
    parent, child = make_sequence(range(40)), make_sequence(range(40))
    admit(blocks, parent)
    parent.num_computed_tokens = 40
    blocks.fork(parent, child)
    before = [table.copy() for table in child.block_tables]
    assert blocks.grow([(child, 41)]) is None
    assert list(child.block_tables) == before
    assert blocks.pool.ref_counts.count(2) == 3


def test_every_group_gets_blocks_of_its_own(make_sequence: MakeSequence, admit: Admit) -> None:
    blocks = BlockManager(7, 16, group_windows=(None, None))
    assert blocks.blocks_for(33) == 6
    sequence = make_sequence(range(33), num_groups=2)
    assert not admit(blocks, make_sequence(range(49), num_groups=2))
    assert admit(blocks, sequence)
    assert [len(table) for table in sequence.block_tables] == [3, 3]
    assert len({block for table in sequence.block_tables for block in table}) == 6
    sequence.num_computed_tokens = 48
    assert blocks.grow([(sequence, 49)]) is None
