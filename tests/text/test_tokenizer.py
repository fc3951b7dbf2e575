"""The tokenizer: lossless, deterministic, deaf to special tokens in users' text, and readable by transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import Split

from glm5.text import StreamDecoder, Tokenizer, load_tokenizer
from glm5.text.special import CONTROL_TOKENS, SPECIAL_TOKENS, SPLIT, STRUCTURE_TOKENS
from glm5.utils.errors import DataError, FileError

VOCAB = 400


def corpus() -> list[str]:
    """A few thousand words over a small alphabet, with code-like signs, digits and non-Latin text."""
    draw = random.Random(0)  # noqa: S311
    words = ["def", "return", "self", "value", "naïve", "数据", "模型", "x1", "<think>", "0x1F", "don't", "Größe"]
    return [
        " ".join(draw.choices(words, k=40)) + "\n    " + "".join(draw.choices("abcdef(){}:=\n\t ", k=80))
        for _ in range(60)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(corpus(), VOCAB)


# ------------------------------------------------------------------------------------------------ round trips
@given(text=st.text())
@settings(max_examples=300, deadline=None)
def test_every_unicode_string_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert not set(ids) & set(tokenizer.special.values())
    assert tokenizer.encode(text.encode()) == ids


@given(data=st.binary())
@settings(max_examples=300, deadline=None)
def test_every_byte_string_comes_back(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


@pytest.mark.parametrize("data", [b"\xff", b"ab\x80cd", b"\xe4\xb8", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80" * 3])
def test_invalid_utf8_is_one_token_a_byte_and_shows_as_replacement(tokenizer: Tokenizer, data: bytes) -> None:
    ids = tokenizer.encode(data)
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")
    assert "\ufffd" in tokenizer.decode(ids)


def test_byte_alphabet_covers_every_byte(tokenizer: Tokenizer) -> None:
    every = bytes(range(256))
    assert tokenizer.decode_bytes(tokenizer.encode(every)) == every
    assert sorted(len(tokenizer.encode(bytes([byte]))) for byte in range(256)) == [1] * 256


def test_lone_surrogates_are_refused_with_a_way_out(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+D800 at character 2.*surrogatepass"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode_batch(["fine", "\udcff"])
    data = "ab\ud800".encode("utf-8", "surrogatepass")
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_empty_input(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == tokenizer.encode(b"") == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode_bytes([]) == b""
    assert tokenizer.encode_batch([]) == []


def test_batches_equal_single_calls(tokenizer: Tokenizer) -> None:
    texts = [*corpus()[:8], "", "<|user|>", "é"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


# ------------------------------------------------------------------------------------------------ special tokens
@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_only_where_allowed(tokenizer: Tokenizer, token: str) -> None:
    id = tokenizer.special_id(token)
    text = f"a{token}b"
    plain = tokenizer.encode(text)
    assert id not in plain
    assert not set(plain) & set(tokenizer.special.values())
    assert tokenizer.decode(plain) == text
    allowed = tokenizer.encode(text, allow_special=True)
    assert allowed.count(id) == 1
    assert tokenizer.decode(allowed) == text
    assert tokenizer.encode(token, allow_special=True) == [id]
    assert id not in tokenizer.encode(token)


@given(pieces=st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "user", "<", "think", "/no", " ", "\n"])))
@settings(max_examples=200, deadline=None)
def test_no_spelling_of_text_makes_a_special_id(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special.values())
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_attributes_and_groups(tokenizer: Tokenizer) -> None:
    assert len(SPECIAL_TOKENS) == len(set(SPECIAL_TOKENS)) == 36
    assert list(tokenizer.special) == list(SPECIAL_TOKENS)
    for offset in (0, 154_820):  # the published layout has the same order: stop ids 154820, 154827, 154829
        stops = [offset + SPECIAL_TOKENS.index(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]
        assert stops == [offset, offset + 7, offset + 9]
    assert tokenizer.stop_ids == (tokenizer.end_of_text_id, tokenizer.user_id, tokenizer.observation_id)
    assert tokenizer.prefix_ids == (tokenizer.gmask_id, tokenizer.sop_id)
    assert tokenizer.decode(tokenizer.prefix_ids) == "[gMASK]<sop>"
    assert tokenizer.decode([tokenizer.end_think_id, tokenizer.tool_call_id]) == "</think><tool_call>"
    with pytest.raises(DataError, match="no special token <nope>"):
        tokenizer.special_id("<nope>")


def test_control_tokens_can_be_skipped_and_structure_stays(tokenizer: Tokenizer) -> None:
    text = "[gMASK]<sop><|user|>hi<|assistant|><think>so</think>yes<|endoftext|>"
    ids = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(ids, skip_control=True) == "hi<think>so</think>yes"
    assert set(CONTROL_TOKENS).isdisjoint(STRUCTURE_TOKENS)


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**9])
def test_ids_without_a_token_are_named(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(DataError, match=f"token id {bad} has no token: the vocabulary has {VOCAB}"):
        tokenizer.decode([65, bad])
    with pytest.raises(DataError, match=str(bad)):
        StreamDecoder(tokenizer).push([bad])


# ------------------------------------------------------------------------------------------------ the split
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12345678", ["123", "456", "78"]),
        ("a1b22", ["a", "1", "b", "22"]),
        (" 1234", [" ", "123", "4"]),
        ("It's WE'RE 'tis", ["It", "'s", " WE", "'RE", " '", "tis"]),
        ("x = y[0]\n    return", ["x", " =", " y", "[", "0", "]\n", "   ", " return"]),
        ("a  b", ["a", " ", " b"]),
        ("end  \n\n  go", ["end", "  \n\n", " ", " go"]),
        ("\tif\r\n", ["\tif", "\r\n"]),
        ("snake_case(x)", ["snake", "_case", "(x", ")"]),
        ("中文测试，好", ["中文测试", "，好"]),
        ("e\u0301a", ["e", "\u0301a"]),
        ("a\u00a0\u3000b", ["a", "\u00a0", "\u3000b"]),
        ("!!! ok", ["!!!", " ok"]),
    ],
)
def test_split_pieces(text: str, pieces: list[str]) -> None:
    split = Split(Regex(SPLIT), behavior="isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_split_loses_nothing(text: str) -> None:
    pieces = Split(Regex(SPLIT), behavior="isolated").pre_tokenize_str(text)
    assert "".join(piece for piece, _ in pieces) == text


def test_merges_stay_inside_the_split(tokenizer: Tokenizer) -> None:
    longer = 0
    for id in range(len(SPECIAL_TOKENS), VOCAB):
        text = tokenizer.decode_bytes([id]).decode("utf-8", "ignore")
        longer += len(text) > 1
        word = text if text[:1].isalnum() else text[1:]
        assert word.isalpha() or (word.isnumeric() and len(word) <= 3) or not any(map(str.isalnum, text)), text
    assert longer > 50


# ------------------------------------------------------------------------------------------------ training
def test_training_is_deterministic_across_processes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_tokenizer as t;"
        "print(t.Tokenizer.train(t.corpus(), t.VOCAB).fingerprint)"
    )
    for hash_seed, threads in (("1", "1"), ("2", "2")):
        result = subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent)],
            env={"PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == tokenizer.fingerprint


def test_training_fills_the_vocabulary_and_compresses(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB
    text = " ".join(corpus())
    bare = Tokenizer.train(["x"], len(SPECIAL_TOKENS) + 256)
    assert len(bare.encode(text)) == len(text.encode())
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2


def test_training_errors() -> None:
    with pytest.raises(DataError, match="vocab_size=291 is below the 292"):
        Tokenizer.train(["text"], 291)
    with pytest.raises(DataError, match="gives only 292 tokens of the 400 asked for"):
        Tokenizer.train(["abc"], 400)
    with pytest.raises(DataError, match="gives only 292"):
        Tokenizer.train([], 300)


def test_text_bytes_per_id(tokenizer: Tokenizer) -> None:
    sizes = tokenizer.text_bytes_per_id()
    assert len(sizes) == VOCAB
    assert all(sizes[id] == 0 for id in tokenizer.special.values())
    text = "def naïve(数据):\n    return <think>"
    assert sum(sizes[id] for id in tokenizer.encode(text)) == len(text.encode())


# ------------------------------------------------------------------------------------------------ files
def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "deep" / "er")
    text = "def f(x):\n  return '<think>' + x  # 数据 1234\r\n"
    for path in (tmp_path / "deep" / "er", tmp_path / "deep" / "er" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.special == tokenizer.special
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.decode(loaded.encode(text, allow_special=True), skip_control=True) == text


def test_transformers_loads_what_was_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_of_text_id
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.all_special_tokens == list(CONTROL_TOKENS)
    for text in [*corpus()[:5], "", "[gMASK]<sop><|user|>hi<|assistant|><think>1234</think>  é\r\n\n x"]:
        ids = tokenizer.encode(text, allow_special=True)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids) == tokenizer.decode(ids) == text
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_control=True)
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "theirs").encode(corpus()[0]) == tokenizer.encode(corpus()[0])


def test_a_published_layout_loads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As GLM's file: special tokens after the vocabulary and not in it, whole words first, a prefix template."""
    spec = json.loads(tokenizer._full.to_str())
    base = {token: id - 36 for token, id in spec["model"]["vocab"].items() if token not in SPECIAL_TOKENS}
    spec["model"] |= {"vocab": base, "ignore_merges": True}
    spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]  # the older spelling
    for token in spec["added_tokens"]:
        token["id"] += len(base)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    published = load_tokenizer(tmp_path)
    assert published.vocab_size == VOCAB
    assert published.end_of_text_id == VOCAB - 36
    assert published.stop_ids == (VOCAB - 36, VOCAB - 29, VOCAB - 27)
    for text in ["<|user|>hi", "/nothink", "<think>", *corpus()[:3]]:
        assert published.encode(text) == [id - 36 for id in tokenizer.encode(text)]
        assert published.decode(published.encode(text, allow_special=True)) == text
    assert published.encode("/nothink", allow_special=True) == [published.special_id("/nothink")]


def test_whole_word_lookup_cannot_reach_special_tokens(tokenizer: Tokenizer) -> None:
    """A file that lists special tokens in the vocabulary too, and looks words up before merging."""
    spec = json.loads(tokenizer._full.to_str())
    assert "/nothink" in spec["model"]["vocab"]
    spec["model"]["ignore_merges"] = True
    reachable = Tokenizer(Backend.from_str(json.dumps(spec)))
    assert not set(reachable.encode("/nothink")) & set(reachable.special.values())


def test_unusable_files_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(FileError, match=r"tokenizer\.json.*no such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(FileError, match="no such file"):
        load_tokenizer(tmp_path)  # an empty directory
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is a run, not a model"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for damage in (b"", whole[: len(whole) // 2], b"\xff\xfe", b"{}", b"[]"):
        (tmp_path / "tokenizer.json").write_bytes(damage)
        with pytest.raises(DataError, match=r"tokenizer\.json is not a usable"):
            load_tokenizer(tmp_path)
    spec = json.loads(whole)
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(DataError, match=r"not byte-level BPE \(its model is WordLevel\)"):
        load_tokenizer(tmp_path)


def test_saving_where_one_may_not(
    tokenizer: Tokenizer, tmp_path: Path, read_only: Callable[[Path], AbstractContextManager[None]]
) -> None:
    with read_only(tmp_path), pytest.raises(FileError):
        tokenizer.save(tmp_path / "out")


# ------------------------------------------------------------------------------------------------ streaming
@given(data=st.one_of(st.binary(), st.text().map(str.encode)), cuts=st.lists(st.integers(0, 40)))
@settings(max_examples=300, deadline=None)
def test_streams_join_to_the_whole(tokenizer: Tokenizer, data: bytes, cuts: list[int]) -> None:
    ids = tokenizer.encode(data)
    stream, pieces, start = StreamDecoder(tokenizer), [], 0
    for cut in sorted(min(cut, len(ids)) for cut in cuts):
        pieces.append(stream.push(ids[start:cut]))
        start = cut
    pieces += [stream.push(ids[start:]), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@given(text=st.text(min_size=1))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_streams_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push([id]) for byte in text.encode() for id in tokenizer.encode(bytes([byte]))]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_cut_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode(b"ok" + "数".encode()[:2])
    assert "".join(stream.push([id]) for id in ids) == "ok"
    assert stream.finish() == "\ufffd"
    assert stream.push(tokenizer.encode("new")) == "new"
    assert stream.finish() == ""


def test_streams_skip_control_tokens(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer, skip_control=True)
    assert stream.push(tokenizer.encode("<|user|>a<think>", allow_special=True)) == "a<think>"
