"""Drafts that the host finds in a sequence, against a search in plain Python."""

import random

import pytest

from jaxserve.engine.lookup import History, LookupOptions


def expected(tokens: list[int], most: int, options: LookupOptions) -> list[int]:
    for length in range(options.max_len, options.min_len - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:] and length < len(tokens):
                found = list(tokens)
                for at in range(end, end + most):
                    found.append(found[at])
                return found[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_latest_place_of_the_longest_run(seed: int) -> None:
    rng = random.Random(seed)
    options = LookupOptions(min_len=rng.randint(1, 2), max_len=rng.randint(2, 4), window=rng.choice([8, 4096]))
    # Ids whose bytes are alike, so that a search that forgets where a token begins is found out.
    ids = rng.choice([[0, 1, 256, 65536], [0x01010101, 0x01010102, 0x01020101], [5, 6]])
    tokens = rng.choices(ids, k=rng.randint(1, 30))
    history = History(tokens, options)
    for _ in range(4):
        more = rng.choices(ids, k=rng.randint(0, 3))
        most = rng.randint(1, 6)
        whole = [*tokens[-options.window :], *more]
        assert history.follow(more, most) == expected(whole, most, options)
        drawn = rng.choices(ids, k=rng.randint(0, 3))
        history.extend(drawn)
        tokens += drawn
