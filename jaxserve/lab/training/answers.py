"""Training data of a draft head: prompts with the answers that the engine itself gives.

A head must guess what its target says, not what a person would have said: heads trained on regenerated answers accept
half as much again. Half of the answers are greedy, half drawn, so that a head knows the target's second choices, too.

The file has a JSON object a line, in the order of the prompts, and a run that was stopped goes on behind its last line.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.api import SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.offline.jsonl import read_entries
from jaxserve.offline.llm import LLM

_INPUTS = ("messages", "prompt", "prompt_token_ids")
_AT_ONCE = 256  # prompts that the engine is given together, and lines that are written together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be answered.

    Attributes:
      given: text, token ids, or the messages of a chat that a user had the last word in.
      weight: of each token of the answer in the loss.
      max_tokens: of the answer; None: as many as the context leaves.
    """

    given: str | Sequence[int] | Sequence[dict[str, Any]]
    weight: float = 1.0
    max_tokens: int | None = None

    @property
    def is_chat(self) -> bool:
        """The prompt has messages."""
        return not isinstance(self.given, str) and len(self.given) > 0 and isinstance(self.given[0], dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its answer, as tokens; `weight` as in `Question`."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    weight: float


def read_questions(path: Path, *, max_tokens: int | None) -> list[Question]:
    """The prompts of a JSONL file, or of all those of a directory in the order of their names.

    A line has one of "messages", "prompt" and "prompt_token_ids". Of a chat, the messages behind the user's last are
    left out, since the engine answers anew. Raises ConfigError with the file and the line.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    questions = []
    for file in files:
        try:
            with file.open("rb") as opened:
                for entry, problem in read_entries(opened):
                    try:
                        if problem is not None:
                            raise problem
                        questions.append(_question(entry.fields, max_tokens))
                    except InvalidRequest as error:
                        raise ConfigError(f"{file}:{entry.line}: {error}") from error
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if not questions:
        raise ConfigError(f"{path} holds no prompts; give a file or a directory of JSONL, with a prompt in each line")
    return questions


def _question(fields: Any, max_tokens: int | None) -> Question:
    given = [name for name in _INPUTS if fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"a line has exactly one of {', '.join(_INPUTS)}; this one has {sorted(fields)}")
    value = fields[given[0]]
    if given[0] == "messages":
        users = (
            [i for i, m in enumerate(value) if isinstance(m, dict) and m.get("role") == "user"]
            if isinstance(value, list)
            else []
        )
        if not users:
            raise InvalidRequest("messages is a list with a message of a user; this one has none to answer")
        value = value[: users[-1] + 1]
    return Question(given=value, max_tokens=max_tokens)


def answer_questions(
    llm: LLM,
    questions: Sequence[Question],
    out: Path,
    *,
    temperature: float,
    seed: int,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Appends to `out` the answers that it lacks: greedy to every other question, at `temperature` to the rest.

    Raises ConfigError where `out` has the answers to other questions.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    done = count_answers(out, questions, temperature)
    count(min(done, len(questions)), len(questions))
    for start in range(done, len(questions), _AT_ONCE):
        part = questions[start : start + _AT_ONCE]
        sampling = [
            SamplingParams(
                temperature=0.0 if number % 2 == 0 else temperature, seed=seed + number, max_tokens=question.max_tokens
            )
            for number, question in enumerate(part, start=start)
        ]
        outputs: list[Any] = [None] * len(part)
        for is_chat in (True, False):
            where = [i for i, question in enumerate(part) if question.is_chat is is_chat]
            if where:
                ask: Callable[..., list[Any]] = llm.chat if is_chat else llm.generate
                found = ask([part[i].given for i in where], [sampling[i] for i in where], use_tqdm=False)
                for i, output in zip(where, found, strict=True):
                    outputs[i] = output
        with out.open("a", encoding="utf-8") as file:
            for question, output in zip(part, outputs, strict=True):
                line = {
                    "prompt": [*output.prompt_token_ids],
                    "answer": [*output.outputs[0].token_ids],
                    "weight": question.weight,
                    "of": _digest(question, temperature),
                }
                file.write(json.dumps(line) + "\n")
        count(start + len(part), len(questions))


def _digest(question: Question, temperature: float) -> str:
    """Of a question beside its answer, so that answers to others are not taken for those to this one."""
    text = json.dumps([question.given, question.weight, question.max_tokens, temperature])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def count_answers(out: Path, questions: Sequence[Question], temperature: float) -> int:
    """The number of answers that `out` has. Raises ConfigError where they are not to the first of `questions`."""
    done = _count_lines(out)
    if done:
        with out.open(encoding="utf-8") as file:
            for line, question in zip(file, questions, strict=False):
                if json.loads(line)["of"] != _digest(question, temperature):
                    raise ConfigError(
                        f"{out} has the answers to other questions, or to these at another temperature; give another "
                        "directory for the run, or remove that file"
                    )
    return done


def _count_lines(file: Path) -> int:
    """Whole lines; what a stopped run left of another is cut off."""
    if not file.exists():
        return 0
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with file.open("r+b") as opened:
            opened.truncate(whole)
    return data.count(b"\n")


def read_examples(file: Path) -> Iterator[Example]:
    """The lines of a file that `answer_questions` wrote. An empty answer is left out: there is nothing to learn."""
    with file.open(encoding="utf-8") as opened:
        for line in opened:
            found = json.loads(line)
            if found["answer"]:
                yield Example(prompt=tuple(found["prompt"]), answer=tuple(found["answer"]), weight=found["weight"])


def split_examples(examples: Iterable[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """(for training, held out): every so-manieth, so that both have all kinds and both temperatures.

    Raises ConfigError where too few are left.
    """
    every = list(examples)
    if held_out < 1 or len(every) < 2 * held_out:
        raise ConfigError(
            f"{len(every)} answers are too few to hold {held_out} out; give more prompts, or hold out fewer"
        )
    step = len(every) // held_out
    chosen = set(itertools.islice(range(step - 1, len(every), step), held_out))
    return [e for i, e in enumerate(every) if i not in chosen], [every[i] for i in sorted(chosen)]
