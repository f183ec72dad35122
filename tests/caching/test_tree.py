"""The trees of blocks: shared by all chains, and gone with whoever holds them."""

from __future__ import annotations

import random

from kvpolicy.caching.tree import Node, Tree


def test_chains_share_their_beginning() -> None:
    tree = Tree()
    first, second = tree.nodes("abc"), tree.nodes("abx")
    assert first[:2] == second[:2] and first[2] is not second[2] and len(tree) == 4
    assert [node.position for node in first] == [0, 1, 2] and first[2].parent is first[1]


def test_a_chain_is_read_from_its_last_block() -> None:
    (*_, last) = Tree().nodes("abcde")
    path = last.chain
    assert len(path) == 5 and list(path) == list("abcde") and list(reversed(path)) == list("edcba")
    assert (path[4], path[3], path[0], path[-1], path[-5]) == ("e", "d", "a", "e", "a")
    assert path[1:3] == ["b", "c"] and "c" in path and path.index("c") == 2


def test_a_block_knows_the_longest_chain_that_it_was_in() -> None:
    tree = Tree()
    first = tree.nodes("abc")
    tree.nodes("ab")
    tree.nodes("axyz")
    assert [node.reach for node in first] == [4, 3, 3]


def test_nodes_from_some_index_on_are_those_of_these_keys() -> None:
    """Whether somebody holds what is before them or not."""
    tree = Tree()
    assert [(node.key, node.position) for node in tree.nodes("abcd", 2)] == [("c", 2), ("d", 3)] and not len(tree)
    held = tree.nodes("ab")
    assert [(node.key, node.position) for node in tree.nodes("abcd", 3)] == [("d", 3)] and len(held) == 2


def test_nothing_is_kept_of_what_nobody_holds() -> None:
    tree = Tree()
    nodes = tree.nodes("abc")
    last = nodes[-1]
    del nodes
    assert len(tree) == 3, "what is before a block is held by it"
    del last
    assert len(tree) == 0


def test_a_long_chain_is_let_go_of() -> None:
    tree = Tree()
    nodes = tree.nodes(range(200_000))
    last = nodes[-1]
    del nodes
    assert last.chain[0] == 0
    del last
    assert len(tree) == 0


def test_a_chain_has_the_nodes_that_somebody_holds() -> None:
    """Chains that share beginnings, parts of which nobody holds any more."""
    rng, tree = random.Random(5), Tree()
    held: list[list[Node]] = []
    for _ in range(2000):
        word = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        chain = [word[:length] for length in range(1, len(word) + 1)]
        before = {node.key: node for nodes in held for node in nodes}
        nodes = tree.nodes(chain)
        assert [node.key for node in nodes] == chain
        first = rng.randint(0, len(chain))
        assert tree.nodes(chain, first) == nodes[first:]
        assert [node.parent for node in nodes] == [None, *nodes[:-1]]
        assert all(before.get(node.key, node) is node and node.reach >= len(chain) for node in nodes)
        held.append(nodes)
        if len(held) > 5:
            del held[rng.randrange(5)]
