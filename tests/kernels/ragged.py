"""Random ragged batches that fit one bucket, so that a test compiles once and runs many."""

from hypothesis import strategies as st

from jaxserve.kernels.cases import Case, Room
from jaxserve.kernels.paged_attention import AttentionSpec

MAX_ROWS, MAX_TOKENS, MAX_CONTEXT = 6, 96, 120


@st.composite
def ragged_rows(draw, page_size: int):
    """Decode rows, then pieces of prompts; lengths on and beside page edges; no rows at all, too."""
    edges = [1, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size + 1]
    length = st.one_of(st.sampled_from([e for e in edges if 0 < e <= 70]), st.integers(1, 70))
    decodes = draw(st.lists(length, max_size=3))
    rows = [(1, context) for context in decodes]
    room = MAX_TOKENS - len(rows)
    for _ in range(draw(st.integers(0, 3))):
        q_len = draw(st.integers(1, max(1, min(40, room))))
        if q_len > room:
            break
        earlier = draw(st.sampled_from([0, 1, page_size, 2 * page_size - 1, 33]))
        rows.append((q_len, min(q_len + earlier, MAX_CONTEXT)))
        room -= q_len
    return tuple(rows)


def bucketed(rows, page_size: int, spec: AttentionSpec, query_dtype: str, cache_dtype: str) -> tuple[Case, Room]:
    """The rows as a case of the bucket (MAX_ROWS, MAX_TOKENS), run by the mixed step."""
    case = Case(
        name=f"{rows}/{page_size}",
        spec=spec,
        rows=rows,
        page_size=page_size,
        query_dtype=query_dtype,
        cache_dtype=cache_dtype,
        padding_rows=MAX_ROWS - len(rows),
        padding_tokens=MAX_TOKENS - sum(n for n, _ in rows),
        mixed=True,
    )
    columns = -(-MAX_CONTEXT // page_size)
    return case, Room(columns=columns, num_pages=(MAX_ROWS + 1) * columns + 3)
