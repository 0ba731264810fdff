"""Text of the kind that the demo model was trained on: chats and stories, one JSON object a line.

    python scripts/demo_text.py chats.jsonl [--chats 1200]
    jaxserve calibrate-cache demo ranges.json --data chats.jsonl

The second command makes `jaxserve/demo_model/cache_scales.json`.
"""

import argparse
import json
import random
from pathlib import Path

from demo_tasks import TASKS, Conversation, conversation, list_conversation, long_conversation

KINDS = ("text", "story", "talk", *(task for task in TASKS if task != "lookup_long"))
LONG_CHARACTERS = 4000  # of a long chat as JSON: somewhat less than the model's context


def conversations(count: int, seed: int) -> list[Conversation]:
    """All kinds alike; one of ten is about a long list, one of a hundred a long chat."""
    rng = random.Random(seed)

    def one(number: int) -> Conversation:
        if number % 100 == 0:
            return long_conversation(rng, lambda messages: len(json.dumps(messages)) < LONG_CHARACTERS)
        if number % 10 == 0:
            return list_conversation(rng, rng.randint(2, 40), 6)
        return conversation(rng, KINDS[number % len(KINDS)], rng.choice((1, 1, 2, 3)))

    return [one(number) for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--chats", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chats = conversations(args.chats, args.seed)
    lines = [json.dumps({"text": c.text} if c.text is not None else {"messages": c.messages}) for c in chats]
    args.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {args.path}: {len(lines)} chats and stories")


if __name__ == "__main__":
    main()
