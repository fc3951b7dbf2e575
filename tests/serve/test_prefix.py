"""The prefix tree: what it finds, what it lets go and in which order, and the two tiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.serve.pages import Copy, PagePool
from glm5.serve.prefix import Node, Policy, PrefixTree, page_keys
from glm5.utils.errors import ConfigError

SIZE = 2


class NewTree(Protocol):
    def __call__(self, pages: int = 8, host_pages: int = 0, policy: Policy = "lru") -> PrefixTree: ...


@pytest.fixture
def new_tree() -> Iterator[NewTree]:
    """Makes trees, which must be sound when the test ends."""
    made = []

    def make(pages: int = 8, host_pages: int = 0, policy: Policy = "lru") -> PrefixTree:
        made.append(PrefixTree(PagePool(pages, host_pages, page_size=SIZE), policy=policy))
        return made[-1]

    yield make
    for tree in made:
        tree.check()
        tree.pool.check()


def put(tree: PrefixTree, text: str) -> list[int]:
    """Insert a text as a sequence does that has read it alone, and then ends."""
    keys = page_keys([ord(c) for c in text], SIZE)
    pages = tree.insert(keys, tree.pool.device.allocate(len(keys)))
    for page in pages:
        tree.pool.device.release(page)
    return pages


def find(tree: PrefixTree, text: str) -> list[Node]:
    return tree.match(page_keys([ord(c) for c in text], SIZE))


def use(tree: PrefixTree, text: str) -> None:
    nodes = find(tree, text)
    tree.touch(nodes)


def texts(tree: PrefixTree) -> dict[str, str]:
    """Every node as its whole text, with the tier that it is in."""
    out = {}
    for node in tree.nodes():
        text, at = "", node
        while at.parent is not None:
            text = "".join(map(chr, memoryview(at.key).cast("i"))) + text
            at = at.parent
        out[text] = "host" if node.page is None else "device"
    return out


def test_whole_pages_are_found_and_only_from_the_beginning(new_tree: NewTree) -> None:
    tree = new_tree()
    pages = put(tree, "abcdef")
    assert [node.page for node in find(tree, "abcdxy")] == pages[:2]
    assert [node.page for node in find(tree, "abcdefg")] == pages
    assert find(tree, "a") == find(tree, "cdef") == find(tree, "bacdef") == []


def test_keys_are_of_whole_pages() -> None:
    ids = [2**31 - 1, 0, 5, 6, 7]
    assert page_keys(ids, 2) == page_keys(ids[:4], 2)
    assert page_keys(ids, 2, start=1) == page_keys([5, 6], 2)
    assert page_keys([5], 2) == []


def test_a_text_that_is_known_keeps_its_first_pages(new_tree: NewTree) -> None:
    """Two sequences read the same beginning at once: one copy stays, and the second sequence goes on with that."""
    tree = new_tree()
    first = put(tree, "abcd")
    keys = page_keys([ord(c) for c in "abcdef"], SIZE)
    own = tree.pool.device.allocate(3)
    held = tree.insert(keys, own)
    assert held == [*first, own[2]]
    assert [tree.pool.device.refs[p] for p in (*held, *own[:2])] == [2, 2, 2, 0, 0]
    for page in held:
        tree.pool.device.release(page)


def test_least_recently_used_leaves_go_first(new_tree: NewTree) -> None:
    tree = new_tree(pages=6)
    for text in ("aabb", "aacc", "ddee"):
        put(tree, text)
    use(tree, "aabb")
    assert tree.evict(1) == 1
    assert set(texts(tree)) == {"aa", "aabb", "dd", "ddee"}
    tree.evict(2)
    assert set(texts(tree)) == {"aa", "aabb"}
    tree.evict(1)
    assert set(texts(tree)) == {"aa"}  # a parent never goes before its children
    assert tree.evict(5) == 1
    assert tree.pool.device.free == 6


def test_least_frequently_used_leaves_go_first(new_tree: NewTree) -> None:
    tree = new_tree(policy="frequency")
    put(tree, "aa")
    put(tree, "bb")
    for text in ("aa", "aa", "bb"):
        use(tree, text)
    tree.evict(1)
    assert set(texts(tree)) == {"aa"}


def test_what_a_page_table_holds_stays(new_tree: NewTree) -> None:
    tree = new_tree(host_pages=4)
    put(tree, "aabb")
    put(tree, "cc")
    held = find(tree, "aabb")
    tree.acquire(held)
    assert tree.evict(10) == 1
    assert texts(tree) == {"aa": "device", "aabb": "device", "cc": "host"}
    tree.abandon(held)
    assert tree.evict(10) == 2


def test_a_pinned_page_holds_up_those_above_it(new_tree: NewTree) -> None:
    tree = new_tree()
    _, page = put(tree, "aabb")
    tree.pool.device.pin(page)
    assert tree.evict(2) == 0
    tree.pool.device.unpin(page)
    assert tree.evict(2) == 2


def test_pages_go_to_the_host_and_come_back(new_tree: NewTree) -> None:
    tree = new_tree(pages=2, host_pages=2)
    put(tree, "aabb")
    tree.evict(2)
    assert texts(tree) == {"aa": "host", "aabb": "host"}
    assert tree.pool.device.free == 2
    assert tree.pool.take_copies() == (Copy("to_host", 1, 0), Copy("to_host", 0, 1))
    nodes = find(tree, "aabb")
    tree.acquire(nodes)
    for node, page in zip(nodes, tree.pool.device.allocate(2), strict=True):
        tree.restore(node, page)
    restored = [node.page for node in nodes]
    assert tree.pool.take_copies() == (Copy("to_device", 1, restored[0]), Copy("to_device", 0, restored[1]))
    assert tree.pool.host.free == 2
    tree.abandon(nodes)
    assert tree.pool.device.idle == 2


def test_a_full_host_drops_what_was_used_longest_ago(new_tree: NewTree) -> None:
    tree = new_tree(pages=4, host_pages=2)
    for text in ("aa", "bb", "cc", "dd"):
        put(tree, text)
    tree.evict(3)
    assert texts(tree) == {"bb": "host", "cc": "host", "dd": "device"}
    use(tree, "bb")
    tree.evict(1)
    assert texts(tree) == {"bb": "host", "dd": "host"}


def test_without_room_on_the_host_a_page_is_dropped_with_what_hangs_on_it(new_tree: NewTree) -> None:
    tree = new_tree(pages=2, host_pages=1)
    put(tree, "aabb")
    tree.evict(1)
    slot = find(tree, "aabb")[1].slot
    assert slot is not None
    tree.pool.host.pin(slot)  # it can't make room
    assert tree.evict(1) == 1
    assert texts(tree) == {}
    assert (tree.pool.device.free, tree.pool.host.free) == (2, 0)
    tree.pool.host.unpin(slot)
    assert tree.pool.host.free == 1


def test_a_page_read_again_replaces_its_copy_on_the_host(new_tree: NewTree) -> None:
    tree = new_tree(pages=3, host_pages=2)
    put(tree, "aabb")
    tree.evict(2)
    put(tree, "aacc")
    assert texts(tree) == {"aa": "device", "aabb": "host", "aacc": "device"}
    assert tree.pool.host.free == 1


def test_new_weights_see_nothing_of_the_old(new_tree: NewTree) -> None:
    tree = new_tree()
    put(tree, "aabb")
    tree.set_version("1")
    assert texts(tree) == {}
    put(tree, "aa")
    tree.set_version("2", keep=True)
    assert find(tree, "aa") == []
    put(tree, "aa")
    assert tree.pool.device.idle == 2
    assert tree.evict(1) == 1  # the old one was used longest ago
    assert len(find(tree, "aa")) == 1
    tree.evict(1)
    assert tree.pool.device.free == 8


def test_kept_pages_are_found_again_when_their_weights_come_back(new_tree: NewTree) -> None:
    tree = new_tree()
    pages = put(tree, "aabb")
    tree.set_version("1", keep=True)
    tree.set_version("0", keep=True)
    assert [node.page for node in find(tree, "aabb")] == pages


def test_forget_drops_all_that_shares_the_first_page(new_tree: NewTree) -> None:
    tree = new_tree(host_pages=1)
    for text in ("aabb", "aacc", "dd"):
        put(tree, text)
    tree.evict(1)
    tree.forget(page_keys([ord("a")] * 2, SIZE))
    assert texts(tree) == {"dd": "device"}
    tree.forget([])
    assert tree.evict(9) == 1
    assert tree.pool.host.free == 0


def test_a_flush_leaves_page_tables_alone(new_tree: NewTree) -> None:
    tree = new_tree(host_pages=2)
    put(tree, "aabb")
    tree.evict(1)
    nodes = find(tree, "aa")
    tree.acquire(nodes)
    page = nodes[0].page
    assert page is not None
    tree.flush()
    assert (tree.pool.device.free, tree.pool.host.free) == (7, 2)
    tree.pool.device.release(page)
    assert tree.pool.device.free == 8


def test_policy_must_be_known() -> None:
    with pytest.raises(ConfigError, match="policy='fifo'"):
        PrefixTree(PagePool(1), policy="fifo")


TEXTS = st.text(alphabet="ab", min_size=2, max_size=10)


@given(known=st.lists(TEXTS, max_size=8), asked=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_longest_known_beginning_is_found(known: list[str], asked: str) -> None:
    tree = PrefixTree(PagePool(60, page_size=SIZE))
    for text in known:
        put(tree, text)
    beginnings = [asked[:n] for n in range(0, len(asked) + 1, SIZE)]
    whole = max(
        len(b) for b in beginnings if not b or any(text[: len(text) // SIZE * SIZE].startswith(b) for text in known)
    )
    assert len(find(tree, asked)) * SIZE == whole
    tree.check()


@given(
    st.lists(st.tuples(st.sampled_from(["put", "use", "evict", "hold", "drop"]), TEXTS), max_size=40),
    st.sampled_from(["lru", "frequency"]),
)
@settings(max_examples=100, deadline=None)
def test_the_order_of_eviction_is_that_of_a_plain_search(operations: list[tuple[str, str]], policy: Policy) -> None:
    """The lazy heap against the definition: of all idle leaves, the one of least rank."""
    tree = PrefixTree(PagePool(250, page_size=SIZE), policy=policy)
    held: list[list[Node]] = []

    def is_idle(node: Node) -> bool:
        return node.page is not None and tree.pool.device.is_idle(node.page)

    for what, text in operations:
        if what == "put":
            put(tree, text)
        elif what == "use":
            use(tree, text)
        elif what == "hold":
            held.append(find(tree, text))
            tree.acquire(held[-1])
        elif what == "drop" and held:
            tree.abandon(held.pop(0))
        elif what == "evict":
            before = {id(node): node for node in tree.nodes()}
            leaves = [n for n in before.values() if not n.children and is_idle(n)]
            wanted = min(leaves, key=lambda n: (n.uses if policy == "frequency" else 0, n.used), default=None)
            assert tree.evict(1) == (wanted is not None)
            gone = before.keys() - {id(node) for node in tree.nodes()}
            assert gone == ({id(wanted)} if wanted else set())
        tree.check()
