"""Tokens of a hash id: golden, stable, never special."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.errors import ConfigError
from longshore.trace.workload import FIRST_TOKEN, check_alphabet, tokens_of

GOLDEN = {
    (0, 1000): (324, 149, 756, 406, 942, 464, 648, 261, 365, 722, 900, 350),
    (1, 1000): (198, 148, 938, 217, 80, 19, 272, 756, 475, 438, 418, 401),
    (123456789, 32000): (176, 21559, 17030, 3823, 25164, 31553, 30825, 22053, 20220, 8068, 3100, 23210),
    (18446744073709551615, 64): (51, 10, 61, 22, 61, 9, 25, 55, 60, 52, 22, 10),
}


def test_golden_vectors() -> None:
    """These numbers are a format: if this fails, old workloads mean something else."""
    for (hash_id, vocab), tokens in GOLDEN.items():
        assert tokens_of(hash_id, len(tokens), vocab) == tokens


ids = st.integers(0, 2**64 - 1)


@given(ids, st.integers(0, 70), st.integers(64, 200_000))
def test_tokens_are_in_the_vocabulary_and_not_special(hash_id: int, length: int, vocab: int) -> None:
    tokens = tokens_of(hash_id, length, vocab)
    assert len(tokens) == length
    assert all(FIRST_TOKEN <= token < vocab for token in tokens)


@given(ids, st.integers(0, 70), st.integers(0, 70))
def test_a_longer_run_begins_with_the_shorter(hash_id: int, a: int, b: int) -> None:
    short, long = sorted((a, b))
    assert tokens_of(hash_id, long, 500)[:short] == tokens_of(hash_id, short, 500)


def test_ids_do_not_share_tokens() -> None:
    runs = {tokens_of(hash_id, 32, 512) for hash_id in range(5000)}
    assert len(runs) == 5000


def test_all_tokens_are_used_about_equally() -> None:
    counts = dict.fromkeys(range(FIRST_TOKEN, 64), 0)
    for hash_id in range(400):
        for token in tokens_of(hash_id, 56, 64):
            counts[token] += 1
    assert all(abs(count - 400) < 6 * math.sqrt(400) for count in counts.values())


@pytest.mark.parametrize(
    ("vocab", "block", "complaint"),
    [(63, 32, "vocab_size: expected at least 64, got 63"), (1000, 4, "block_tokens: expected at least 5")],
)
def test_too_small_an_alphabet_is_refused(vocab: int, block: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_alphabet(vocab, block)


def test_the_least_alphabets_are_taken() -> None:
    check_alphabet(64, 32)
    check_alphabet(1000, 5)
