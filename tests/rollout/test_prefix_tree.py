from random import Random

import numpy as np
import pytest

from rla_lightning.rollout.prefix_tree import prefix_rows, related


def laid_out(sequences: list[tuple[int, ...]], width: int | None = 10_000, budget: int = 10_000) -> list[tuple[list[int], ...]]:
    return [(r.tokens.tolist(), r.depths.tolist(), r.ends.tolist()) for r in prefix_rows(sequences, width, budget)]


def test_samples_of_one_prompt_share_it():
    # the prompt 5 6, then 1, 1 2 or 3: depth first 5 6 1 2 3, and 1 is a prefix of 1 2
    (row,) = prefix_rows([(5, 6, 3), (5, 6, 1, 2), (5, 6, 1)], 10_000, 100)
    assert row.tokens.tolist() == [5, 6, 1, 2, 3]
    assert row.depths.tolist() == [0, 1, 2, 3, 2]
    assert row.ends.tolist() == [5, 5, 4, 4, 5]  # what is below 1 ends where 3 begins
    assert row.sequences == (2, 1, 0)
    assert [path.tolist() for path in row.paths] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 4]]
    assert not row.is_chain


def test_turns_of_one_conversation_are_a_chain():
    turns = [(5, 6, 1), (5, 6, 1, 7, 2), (5, 6, 1, 7, 2, 8, 3)]
    (row,) = prefix_rows(turns, 8, 3)  # whatever the budget: a later turn is as long on its own
    assert (row.tokens.tolist(), row.ends.tolist()) == ([5, 6, 1, 7, 2, 8, 3], [7] * 7)
    assert row.is_chain
    assert [len(path) for path in row.paths] == [3, 5, 7]


def test_rows_are_shared_only_where_it_is_less_work():
    long = [(*tuple(range(20)), 50, i, *range(100, 140)) for i in range(2)]  # 62 tokens each, 21 of them shared
    # together 103 + 103^2 / (12 d), apart 2 (62 + 62^2 / (12 d)): 2921 / (12 d) < 21 from d = 11.6 on
    assert [len(row.tokens) for row in prefix_rows(long, 11, 1000)] == [62, 62]
    assert [len(row.tokens) for row in prefix_rows(long, 12, 1000)] == [103]
    assert [len(row.tokens) for row in prefix_rows(long, 12, 102)] == [62, 62]  # over the budget
    little = [(*range(12), *range(100 * i, 100 * i + 30)) for i in (1, 2)]  # 12 of 42 are less than 30%
    assert [len(row.tokens) for row in prefix_rows(little, 10_000, 1000)] == [42, 42]
    assert [len(row.tokens) for row in prefix_rows(long, None, 1000)] == [62, 62]  # a model that cannot
    assert laid_out([(1, 2), (3, 4)]) == [([1, 2], [0, 1], [2, 2]), ([3, 4], [0, 1], [2, 2])]


def test_equal_sequences_are_one():
    (row,) = prefix_rows([(4, 2), (4, 2)], 64, 100)
    assert row.tokens.tolist() == [4, 2]
    assert [path.tolist() for path in row.paths] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_every_path_spells_its_sequence_and_sees_itself_alone(seed):
    rng = Random(seed)
    sequences = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 9))) for _ in range(40)]
    rows = prefix_rows(sequences, rng.choice([1, 4, 64]), rng.choice([1, 12, 1000]))
    assert sorted(index for row in rows for index in row.sequences) == list(range(40))
    for row in rows:
        assert len(set(map(tuple, (row.tokens[path].tolist() for path in row.paths)))) <= len(row.paths)
        index = np.arange(len(row.tokens))
        for sequence, path in zip(row.sequences, row.paths, strict=True):
            assert tuple(row.tokens[path].tolist()) == sequences[sequence]
            assert row.depths[path].tolist() == list(range(len(path)))
            for node in path:  # sees those before it whose subtree it is in: the path up to here
                seen = index[(index <= node) & (node < row.ends)]
                assert seen.tolist() == path[: row.depths[node] + 1].tolist()


def test_related_are_samples_of_a_prompt_and_turns_of_a_conversation():
    sequences = [(1, 2, 9), (7, 7), (1, 2, 8), (1, 2, 9, 5, 6), (1, 3, 9), (7, 7, 7)]
    prompts = [2, 1, 2, 4, 2, 1]
    assert sorted(related(sequences, prompts)) == [[1, 5], [2, 0, 3], [4]]  # in the order of their tokens
    assert related([], []) == []
