"""Who runs: rows, and which of their sequences prefill and which decode.

Owns the rows of the device and the lists that a step is planned from. Refuses to choose: sequences enter and leave when
the scheduler says so.
"""

from collections.abc import Iterator

from jaxserve.sched.state import Sequence, SequenceState


class RunningSet:
    """Mutated only by the scheduler that made it.

    Attributes:
      prefilling: prompt not all planned, in order of admission.
      decoding: what feeds one token in this step. Replaced and never changed in place, since plans in flight keep it.
      decode_rows: rows of `decoding`; the same tuple for as long as they stay the same.
      num_left: how many rows have been given up so far.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.decode_rows: tuple[int, ...] = ()
        self.num_left = 0
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._freed_rows: list[int] = []  # given up since the last plan
        self._by_row: dict[int, Sequence] = {}
        self._joining: list[Sequence] = []  # will decode from the next step on
        self._at_will: list[Sequence] = []  # those of `decoding` that need to wait for nothing
        self._stepwise: list[Sequence] = []  # decode, but only once their last token is committed
        self._stale = False  # `decoding` holds somebody who left, or lacks somebody who joined

    def __len__(self) -> int:
        return len(self._by_row)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_row.values())

    @property
    def has_free_row(self) -> bool:
        """Whether another sequence could enter."""
        return bool(self._free_rows)

    @property
    def has_stepwise(self) -> bool:
        """Whether somebody decodes who must see each token before the next is drawn."""
        return bool(self._stepwise)

    def enter(self, seq: Sequence) -> None:
        """Gives a row to a sequence, whose prompt is to be computed."""
        seq.row = self._free_rows.pop()
        seq.move(SequenceState.RUNNING)
        self._by_row[seq.row] = seq
        self.prefilling.append(seq)

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Takes the row back. It can be given away at once: the next plan frees it first."""
        seq.move(state)
        del self._by_row[seq.row]
        self._free_rows.append(seq.row)
        self._freed_rows.append(seq.row)
        self.num_left += 1
        seq.row = -1
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self._stale = True

    def end_prefill(self, seq: Sequence) -> None:
        """The last chunk is planned; the sequence decodes from the next step on."""
        self.prefilling.remove(seq)
        self._joining.append(seq)
        self._stale = True

    def note_last_feed(self) -> None:
        """Somebody in `decoding` has been fed all it will be."""
        self._stale = True

    def refresh(self) -> None:
        """Brings `decoding` up to date. Must come before a sequence that left could enter again."""
        if self._stale:
            alive = [
                seq
                for seq in (*self._at_will, *self._stepwise, *self._joining)
                if seq.state is SequenceState.RUNNING and seq.num_fed < seq.max_fed
            ]
            self._at_will = [seq for seq in alive if not seq.stepwise]
            self._stepwise = [seq for seq in alive if seq.stepwise]
            self._joining = []
            self._stale = False
        elif not self._stepwise:
            return
        ready = [seq for seq in self._stepwise if seq.num_fed < len(seq.tokens)]
        self.decoding = [*self._at_will, *ready] if ready else self._at_will
        self.decode_rows = tuple([seq.row for seq in self.decoding])

    def take_freed_rows(self) -> tuple[int, ...]:
        """Rows given up since the last call: each stands in one plan."""
        freed, self._freed_rows = self._freed_rows, []
        return tuple(freed)

    def check(self) -> None:
        """Proves that no row is lost or owned twice."""
        assert sorted([*self._free_rows, *self._by_row]) == list(range(self.max_rows)), "a row is lost"
        assert len(set(self._freed_rows)) == len(self._freed_rows), self._freed_rows
        for row, seq in self._by_row.items():
            assert seq.state is SequenceState.RUNNING and seq.row == row, seq
