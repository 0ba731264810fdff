"""One sequence's ids, as they come, into text that is safe to show.

A stream must get three things right: half a UTF-8 character, the space before a word, and text that may be the
beginning of a stop string. The engine handles ends and limits, and decides which ids are pushed.

Each push decodes a short window of the last ids, never the whole sequence, so the cost per token is constant. The
window begins a few ids back, which gives the decoder the context it needs (a first word loses its space, a later one
keeps it) and the bytes an unfinished character began with. Most ids are whole characters whatever stands before them;
in the middle of a text, between whole characters, such an id adds its own text and nothing need be decoded at all.
"""

from collections.abc import Sequence

from jaxserve.errors import UnsupportedOption
from jaxserve.text.base import Tokenizer

_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 8  # ids of the prompt that the first window holds
_MAX_WINDOW = 10  # ids; then the window is cut
_KEPT = 4  # ids kept by a cut: a UTF-8 character has at most four bytes, an id at least one


class PieceTexts:
    """The texts that single ids add, looked up once for all sequences. Mutated by the thread that pushes.

    Attributes:
      known: text by id, of the ids looked up so far. Empty for ids without text and for parts of characters.
    """

    __slots__ = ("_tokenizer", "known")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.known: dict[int, str] = {}
        self._tokenizer = tokenizer

    def find(self, token_id: int) -> str:
        """The entry of `known`, made if need be."""
        text = self.known.get(token_id)
        if text is None:
            try:
                text = self._tokenizer.token_bytes(token_id).decode()
            except (UnicodeDecodeError, UnsupportedOption):
                text = ""
            if _REPLACEMENT in text:
                text = ""
            self.known[token_id] = text
        return text


class Detokenizer:
    """Incremental decoding of one sequence. Mutated by its owner through `push` and `flush` only.

    All pushes and the flush together give `decode(prompt + ids)` without the text of the prompt, cut at the first
    stop string. "First" is the one whose last character comes first; of several that end there, the longest. The
    result does not depend on how the ids were split into pushes.

    Args:
      tokenizer: any `Tokenizer`.
      prompt_ids: the ids before the sequence; only their end matters.
      skip_special_tokens: special ids give no text, wherever they stand.
      stop: non-empty strings that end the text.
      include_stop_str: the text ends after the stop string rather than before.
      min_tokens: a stop string that is complete within so many ids does not count.
      pieces: of the tokenizer, shared with others.

    Attributes:
      stopped: the stop string that was met, else None. Later pushes give no text.
      num_tokens: ids consumed, up to and including the one that completed the stop string.
    """

    __slots__ = (
        "_floor",
        "_held",
        "_include",
        "_min_tokens",
        "_pieces",
        "_prompt_open",
        "_shown",
        "_skip",
        "_skipped",
        "_starts",
        "_stop",
        "_text",
        "_tokenizer",
        "_window",
        "num_tokens",
        "stopped",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        *,
        min_tokens: int = 0,
        pieces: PieceTexts | None = None,
    ) -> None:
        assert all(stop), stop
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = stop
        self._starts = frozenset(string[0] for string in stop)
        self._include = include_stop_str
        self._min_tokens = min_tokens
        self._pieces = PieceTexts(tokenizer) if pieces is None else pieces
        self.stopped: str | None = None
        self.num_tokens = 0
        self._held = ""  # shown by no push yet, since a stop string may begin here
        self._floor = 0  # stop strings must end behind this place of `_held`

        self._window = self._prompt_context(prompt_ids)
        self._text = self._decode(self._window)  # text of the window
        self._shown = len(self._text)  # characters of it that were released
        # Whether a trailing U+FFFD of the prompt is its own or the first half of a character shows with the next ids.
        self._prompt_open = self._text.endswith(_REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids, returns the text that is now certain (often empty)."""
        if self.stopped is not None:
            return ""
        if not self._stop:
            self.num_tokens += len(token_ids)
            return self._advance(token_ids)
        shown = []
        for token_id in token_ids:
            self.num_tokens += 1
            shown.append(self._release(self._advance((token_id,)), final=False))
            if self.stopped is not None:
                break
        return "".join(shown)

    def flush(self) -> str:
        """Returns what was held back; nothing more may be pushed. A second call returns nothing."""
        rest = "" if self._prompt_open else self._text[self._shown :]
        self._shown = len(self._text)
        return "" if self.stopped is not None else self._release(rest, final=True)

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == _PROMPT_CONTEXT:
                break
            if token_id not in self._skipped:
                context.append(token_id)
        return context[::-1]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _advance(self, token_ids: Sequence[int]) -> str:
        """Adds ids to the window, returns the text that no later id can change."""
        # Nothing is held back, and the first word, which loses its space, is out already.
        if len(token_ids) == 1 and self._text and self._shown == len(self._text) and not self._prompt_open:
            token_id = token_ids[0]
            if token_id in self._skipped:
                return ""
            piece = self._pieces.find(token_id)
            if piece:
                self._window.append(token_id)
                self._text += piece
                self._shown = len(self._text)
                if len(self._window) > _MAX_WINDOW:
                    self._cut_window()
                return piece
        new_ids = [i for i in token_ids if i not in self._skipped]
        if not new_ids:
            return ""
        text = self._decode([*self._window, *new_ids])
        if text == self._text and text and not text.endswith(_REPLACEMENT):
            return ""  # ids without text (padding of the vocabulary) would only push the context out of the window
        self._window += new_ids
        if self._prompt_open and text != self._text:
            self._prompt_open = False
            if text[self._shown - 1] != _REPLACEMENT:
                self._shown -= 1
        self._text = text
        stable = len(text) - text.endswith(_REPLACEMENT)
        new_text = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if len(self._window) > _MAX_WINDOW and not self._prompt_open:
            self._cut_window()
        return new_text

    def _cut_window(self) -> None:
        """Drops old ids, if the rest of the window alone decodes to the same end; otherwise a later push tries."""
        kept = self._window[-_KEPT:]
        text = self._decode(kept)
        pending = len(self._text) - self._shown
        if len(text) > pending and text[-pending - 1 :] == self._text[-pending - 1 :]:
            self._window, self._text, self._shown = kept, text, len(text) - pending

    def _release(self, new_text: str, final: bool) -> str:
        """Passes text through the search for stop strings."""
        if not self._stop:
            return new_text
        held = self._held + new_text
        if self.num_tokens <= self._min_tokens:
            self._floor = len(held)
        found = [
            (start + len(string), start, string)
            for string in self._stop
            if (start := held.find(string, max(0, self._floor - len(string) + 1))) >= 0
        ]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return held[: end if self._include else start]
        release = len(held) if final else self._first_possible_stop(held)
        self._held = held[release:]
        self._floor = max(0, self._floor - release)
        return held[:release]

    def _first_possible_stop(self, held: str) -> int:
        """Where the longest end of `held` begins that is a proper beginning of a stop string."""
        longest = max(map(len, self._stop))
        for start in range(max(0, len(held) - longest + 1), len(held)):
            if held[start] in self._starts:
                tail = held[start:]
                if any(string.startswith(tail) for string in self._stop):
                    return start
        return len(held)
