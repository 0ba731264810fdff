"""What the buffer says of pictures, against loops over tokens; and what the compiled step makes of it."""

import numpy as np
import pytest

from jaxserve.runtime.pack import Layout, pack, split_grants, unpack
from jaxserve.runtime.picture_inputs import NO_SLOT, PictureRows, PictureSizes, picture_inputs
from jaxserve.sched.draft import row_setup
from jaxserve.sched.plan import Bucket, Chunk, EncoderPool, PicturePlace, RowPicture, RowSetup, StepPlan
from jaxserve.sched.state import Sequence
from jaxserve.testing import make_picture, make_request
from jaxserve.values.content import PlacedPicture

MAX_ROWS, PAGE = 4, 4
BUCKET = Bucket(16, 4, False)


def positions(num_tokens: int, placed: list[PlacedPicture]) -> tuple[np.ndarray, int]:
    """A picture's tokens have the frame, the row and the column 100, 200 and 300 beyond; later ones are 7 back."""
    found = np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))
    for one in placed:
        found[:, one.start : one.end] += np.array([[100], [200], [300]], np.int32)
    return found, -7


def rows_with(sizes: PictureSizes) -> PictureRows:
    rows = PictureRows(sizes, MAX_ROWS, positions if sizes.has_sections else None)
    request = make_request("a", [9] * 12, pictures=[make_picture(1, 5, "cat"), make_picture(6, 2, "dog")])
    seq = Sequence(request, 0, 0, 64)
    seq.row = 2
    rows.set_up(row_setup(seq))
    return rows


PLAN = StepPlan(
    step_id=0,
    decode_rows=(0, 1),
    decode_positions=(5, 8),
    # An end of the first picture and all of the second; then text, and a token that was generated before a preemption.
    chunks=(Chunk(2, 4, (9, 9, 9, 9, 5, 5, 5, 5, 3), True), Chunk(3, 0, (1, 2), False)),
    pictures=(PicturePlace(2, 1, 5, (7, 2)), PicturePlace(2, 6, 2, (1,))),
)


@pytest.mark.parametrize("has_sections", [True, False])
def test_slots_and_turns_of_a_mixed_step(has_sections: bool) -> None:
    sizes = PictureSizes(EncoderPool(8, PAGE, 1), has_sections, (4,))
    layout = Layout.of(BUCKET, max_rows=MAX_ROWS, num_params=1, page_size=PAGE, num_groups=1, pictures=sizes)
    rows = rows_with(sizes)
    params, stops = np.zeros((MAX_ROWS + 1, 1), np.int32), np.zeros((MAX_ROWS + 1, 4), np.int32)
    grants, _ = split_grants((), layout.max_grants, MAX_ROWS)
    buffer = pack(PLAN, layout, params, stops, {}, grants, rows)
    length = np.array([5, 8, 0, 0, 0], np.int32)
    inputs = unpack(buffer, layout, length)
    pool = np.zeros((sizes.pool_lines, 3), np.float32)
    found = picture_inputs(pool, inputs.slots, inputs.turns, inputs.deltas, inputs.positions, inputs.token_rows)
    slots = [NO_SLOT] * 16
    slots[2:6] = [7 * PAGE + 3, 2 * PAGE, PAGE, PAGE + 1]  # of the first picture its fourth and fifth embedding
    assert np.asarray(found.slots).tolist() == slots
    if not has_sections:
        assert found.positions is None
        return
    turns = np.zeros((3, 16), np.int64)
    turns[:, 0], turns[:, 1] = 5, 8  # rows without pictures go on where they are
    turns[:, 2:10] = np.arange(4, 12)
    turns[:, 2:6] += np.array([[100], [200], [300]])
    turns[:, 10] = 12 - 7
    turns[:, 11:13] = [0, 1]
    assert np.asarray(found.positions).tolist() == turns.tolist()


def test_a_decode_step_turns_by_the_delta_of_its_row() -> None:
    sizes = PictureSizes(EncoderPool(8, PAGE, 1), True, (4,))
    layout = Layout.of(
        Bucket(4, 4, True), max_rows=MAX_ROWS, num_params=1, page_size=PAGE, num_groups=1, pictures=sizes
    )
    rows = rows_with(sizes)
    params, stops = np.zeros((MAX_ROWS + 1, 1), np.int32), np.zeros((MAX_ROWS + 1, 4), np.int32)
    plan = StepPlan(step_id=1, decode_rows=(0, 2), decode_positions=(5, 13))
    length = np.array([5, 0, 13, 0, 0], np.int32)
    for expected in (13 - 7, 13):  # once the row is another's, nothing is left of the picture
        inputs = unpack(pack(plan, layout, params, stops, {}, (), rows), layout, length)
        assert inputs.slots is None and inputs.turns is None
        found = picture_inputs(np.zeros((1, 1)), None, None, inputs.deltas, inputs.positions, inputs.token_rows)
        assert np.asarray(found.positions).tolist() == [5, expected, 0, 0]
        rows.forget(2)


def test_a_text_model_has_no_section_of_pictures() -> None:
    layout = Layout.of(BUCKET, max_rows=MAX_ROWS, num_params=1, page_size=PAGE, num_groups=1)
    assert not {"slots", "turns", "deltas"} & {name for name, _, _ in layout.sections}


def test_a_picture_of_a_row_is_read_back_from_its_setup() -> None:
    placed = make_picture(3, 4, "cat")
    found = RowPicture.of(placed).placed
    assert found == placed and found.picture.grid == placed.picture.grid and found.span == placed.span
    assert RowSetup.__dataclass_fields__["pictures"].default == ()
