"""Deduplication: exact figures, and results that neither order nor sharding changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data import Document, drop_copies_of, drop_exact_copies, drop_near_copies
from glm5.data.filters import BANDS, CONTAINMENT_FLOOR, ROWS, jaccard, shingle_set, signature
from glm5.data.hashing import mix64, permutation

WORDS = [f"word{n}" for n in range(500)]


def prose(seed: int, length: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=length)  # noqa: S311


def edited(words: list[str], changes: int, seed: int) -> list[str]:
    draw = random.Random(seed)  # noqa: S311
    words = list(words)
    for at in draw.sample(range(len(words)), changes):
        words[at] = f"new{draw.random()}"
    return words


# ------------------------------------------------------------------------------------------------ shingles
def test_shingles_by_hand() -> None:
    assert len(shingle_set("")) == len(shingle_set(" \n\t ")) == 0
    assert len(shingle_set("a b c d e")) == 1
    assert len(shingle_set("a b c d e f")) == 2
    assert len(shingle_set("only two")) == 1
    assert len(shingle_set("a a a a a a a a")) == 1  # a set
    assert np.array_equal(shingle_set("def f(x): return x"), shingle_set("def  f(x):\n\treturn x\n"))
    a, b = shingle_set("a b c d e f g"), shingle_set("a b c d e f h")
    assert jaccard(a, b) == 2 / 4
    assert jaccard(a, a) == 1.0
    assert jaccard(a, shingle_set("")) == jaccard(shingle_set(""), shingle_set("")) == 0.0
    assert not np.array_equal(shingle_set("a b c d e"), shingle_set("b a c d e"))  # order counts
    assert not np.array_equal(shingle_set("a b"), shingle_set("a b b"))


def test_hashes_are_fixed_for_all_time() -> None:
    assert mix64(np.array([0, 1], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert shingle_set("def f ( x").tolist() == [1238965312364094132]
    assert permutation(8, seed=0, epoch=0).tolist() == [0, 1, 6, 3, 5, 4, 2, 7]


def test_signature_estimates_similarity() -> None:
    base = prose(0, 3000)
    errors = []
    for seed, changes in enumerate((0, 30, 100, 200, 400)):
        a, b = shingle_set(" ".join(base)), shingle_set(" ".join(edited(base, changes, seed)))
        agree = float((signature(a) == signature(b)).mean())
        errors.append(abs(agree - jaccard(a, b)))
    assert errors[0] == 0.0
    assert max(errors) < 4 * 0.5 / (BANDS * ROWS) ** 0.5  # four standard errors at the worst similarity
    assert len(signature(shingle_set(""))) == 0


# ------------------------------------------------------------------------------------------------ exact
def test_exact_copies_across_shards() -> None:
    shards = [[Document(f"s{s}/d{n}", f"text {s * n}") for n in range(4)] for s in range(4)]
    flat = [document for shard in shards for document in shard]
    kept, copies = drop_exact_copies(flat)
    assert len({d.text for d in flat}) == len(kept) == len({d.text for d in kept})
    assert drop_exact_copies(reversed(flat)) == (kept, copies)
    assert [(c.id, c.of) for c in copies][:3] == [("s0/d1", "s0/d0"), ("s0/d2", "s0/d0"), ("s0/d3", "s0/d0")]
    assert [c.id for c in copies if c.of == "s1/d2"] == ["s2/d1"]


# ------------------------------------------------------------------------------------------------ near
@given(order=st.permutations(range(12)))
@settings(max_examples=20, deadline=None)
def test_near_copies_do_not_depend_on_order(order: list[int]) -> None:
    documents = []
    for family in range(4):
        base = prose(family, 400)
        documents += [Document(f"f{family}v{v}", " ".join(edited(base, 6 * v, v))) for v in range(3)]
    kept, copies = drop_near_copies([documents[n] for n in order], threshold=0.7)
    assert [d.id for d in kept] == [f"f{family}v0" for family in range(4)]
    assert {(c.id, c.of) for c in copies} == {(f"f{f}v{v}", f"f{f}v0") for f in range(4) for v in (1, 2)}


def test_planted_copies_are_found_and_nothing_else() -> None:
    originals = [Document(f"a{n:03d}", " ".join(prose(n, 300))) for n in range(150)]
    planted = [Document(f"z{n:03d}", " ".join(edited(prose(n, 300), 8, n))) for n in range(0, 150, 3)]
    kept, copies = drop_near_copies([*planted, *originals], threshold=0.6)
    assert [d.id for d in kept] == [d.id for d in originals]
    assert [(c.id, c.of) for c in copies] == [(f"z{n:03d}", f"a{n:03d}") for n in range(0, 150, 3)]
    exact = {d.id: shingle_set(d.text) for d in (*planted, *originals)}
    assert all(c.similarity == jaccard(exact[c.id], exact[c.of]) for c in copies)


def test_a_chain_of_copies_leaves_one() -> None:
    words = prose(0, 400)
    chain = [words]
    for step in range(3):
        chain.append(edited(chain[-1], 8, step))
    texts = [Document(f"{n}", " ".join(words)) for n, words in enumerate(chain)]
    assert jaccard(shingle_set(texts[0].text), shingle_set(texts[3].text)) < 0.7
    kept, copies = drop_near_copies(texts, threshold=0.7)
    assert [d.id for d in kept] == ["0"]
    assert {c.of for c in copies} == {"0"}


def test_texts_without_words_are_not_copies_of_each_other() -> None:
    blanks = [Document("a", "  "), Document("b", "\n\n"), Document("c", "")]
    assert drop_near_copies(blanks) == (blanks, [])
    assert drop_near_copies([]) == ([], [])


# ------------------------------------------------------------------------------------------------ held out
def test_training_copies_of_held_out_text_go() -> None:
    held_out = [Document("h1", " ".join(prose(1, 300))), Document("h2", " ".join(prose(2, 300)))]
    train = [
        Document("same", held_out[0].text),
        Document("edited", " ".join(edited(prose(2, 300), 10, 0))),
        Document("fresh", " ".join(prose(3, 300))),
        Document("contains", " ".join([*prose(4, 3000), *prose(1, 300), *prose(5, 3000)])),
        Document("empty", ""),
    ]
    kept, copies = drop_copies_of(held_out, train)
    assert [d.id for d in kept] == ["fresh", "empty"]
    assert [(c.id, c.of) for c in copies] == [("same", "h1"), ("edited", "h2"), ("contains", "h1")]
    assert next(c.similarity for c in copies) == [c.similarity for c in copies][2] == 1.0
    overlap = jaccard(shingle_set(train[1].text), shingle_set(held_out[1].text))
    assert copies[1].similarity >= overlap > 0.5


def test_a_shared_licence_is_not_a_copy() -> None:
    licence = " ".join(prose(9, 60))
    assert len(shingle_set(licence)) < CONTAINMENT_FLOOR
    held_out = [Document("stub", licence + " pass")]
    train = [Document("module", licence + " " + " ".join(prose(1, 400)))]
    assert drop_copies_of(held_out, train) == (train, [])
    assert drop_copies_of(train, held_out) == (held_out, [])


def test_held_out_filter_agrees_with_counting_by_hand() -> None:
    held_out = [Document(f"h{n}", " ".join(prose(n % 3, 120 + n))) for n in range(6)]
    train = [Document(f"t{n}", " ".join(edited(prose(n % 5, 150), 4 * n, n))) for n in range(15)]
    expected = {}
    for document in train:
        own, best = set(shingle_set(document.text).tolist()), (0.0, "")
        for other in held_out:
            theirs = set(shingle_set(other.text).tolist())
            common = len(own & theirs)
            share = max(common / len(own | theirs), common / len(theirs) if len(theirs) >= CONTAINMENT_FLOOR else 0)
            best = max(best, (share, other.id), key=lambda pair: pair[0])
        if best[0] >= 0.5:
            expected[document.id] = best
    kept, copies = drop_copies_of(held_out, train, 0.5)
    assert {c.id: (c.similarity, c.of) for c in copies} == expected
    assert 0 < len(copies) < len(train)
    assert len(kept) + len(copies) == len(train)
    assert drop_copies_of([], train) == (train, [])


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_the_same_survivors_whatever_the_shards(shards: int) -> None:
    """The same text in the first and the last shard: one is left, and always the same one."""
    documents = [Document(f"d{n:02d}", " ".join(prose(n % 6, 200))) for n in range(12)]
    parts = [documents[n::shards] for n in range(shards)]
    kept, _ = drop_near_copies(document for part in parts for document in part)
    assert [d.id for d in kept] == [f"d{n:02d}" for n in range(6)]
