"""The running sequences: the rows of the device, and which of their sequences prefill and which decode.

A step is planned from these lists. Sequences enter and leave them when `core` says so.
"""

from collections.abc import Iterator

from jaxserve.sched.state import Sequence, SequenceState


class RunningSet:
    """Mutated only by the scheduler that made it.

    Attributes:
      prefilling: prompt not all planned, in order of admission.
      decoding: the sequences that draw a token or more in this step. Replaced and never changed in place, since plans
        in flight keep it.
      decode_rows: rows of `decoding`; the same tuple for as long as they stay the same.
      ending: sequences that have given up their row after their last feed, and keep their pages until its token is
        here.
      num_left: number of rows, and of `ending` sequences' pages, that have been given up so far.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.decode_rows: tuple[int, ...] = ()
        self.ending: dict[Sequence, None] = {}
        self.num_left = 0
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._freed_rows: list[int] = []  # given up since the last plan
        self._by_row: dict[int, Sequence] = {}
        self._joining: list[Sequence] = []  # will decode from the next step on
        self._at_will: list[Sequence] = []  # sequences of `decoding` that need not wait for a commit
        self._stepwise: list[Sequence] = []  # sequences that decode, but only once their last token is committed
        self._unsure: list[Sequence] = []  # fed all they will be, unless the step in flight fed less than it could
        self._stale = False  # `decoding` holds a sequence that left, or lacks one that joined

    def __len__(self) -> int:
        return len(self._by_row)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_row.values())

    @property
    def has_free_row(self) -> bool:
        """Whether another sequence could enter."""
        return bool(self._free_rows)

    def enter(self, seq: Sequence) -> None:
        """Gives a row to a sequence, whose prompt is to be computed."""
        seq.row = self._free_rows.pop()
        seq.move(SequenceState.RUNNING)
        self._by_row[seq.row] = seq
        self.prefilling.append(seq)

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Takes back the row of `seq`, if it has one. It can be given away at once: the next plan frees it first."""
        seq.move(state)
        if seq.row < 0:
            del self.ending[seq]
            self.num_left += 1
            return
        self._give_up_row(seq)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        self._stale = True

    def end_prefill(self, seq: Sequence) -> None:
        """The last chunk is planned; the sequence decodes from the next step on."""
        self.prefilling.remove(seq)
        self._joining.append(seq)
        self._stale = True

    def note_lengths(self) -> None:
        """Sequences that decode have been fed all they will be, or turned out not to have been."""
        self._stale = True

    def _give_up_row(self, seq: Sequence) -> None:
        del self._by_row[seq.row]
        self._free_rows.append(seq.row)
        if seq.is_set_up:
            self._freed_rows.append(seq.row)
            seq.is_set_up = False
        self.num_left += 1
        seq.row = -1

    def refresh(self) -> None:
        """Brings `decoding` up to date, and takes the rows of sequences that have surely been fed all they will be.

        Must come before a sequence that left could enter again.
        """
        if self._stale:
            alive: list[Sequence] = []
            unsure: list[Sequence] = []
            for seq in (*self._at_will, *self._stepwise, *self._unsure, *self._joining):
                if seq.state is not SequenceState.RUNNING:
                    continue
                if seq.num_fed < seq.max_fed:
                    alive.append(seq)
                elif seq.num_unsure:
                    unsure.append(seq)
                else:
                    self._give_up_row(seq)
                    self.ending[seq] = None
            self._unsure = unsure
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
        for seq in self.ending:
            assert seq.state is SequenceState.RUNNING and seq.row == -1 and seq.num_fed == seq.max_fed, seq
