"""x"""
import random
from demo_tasks import TASKS, conversation, list_conversation, long_conversation
from jaxserve.lab.training.answers import Question

# Share of the questions of each task. Stories have the longest answers, and are what visitors ask for.
MIX = {
    "story": 0.16,
    "talk": 0.08,
    "add": 0.09,
    "add_steps": 0.09,
    "lookup": 0.09,
    "lookup_long": 0.02,
    "sort": 0.12,
    "sort_letters": 0.12,
    "reverse": 0.07,
    "reverse_dashes": 0.07,
    "json": 0.09,
}


def demo_questions(count: int, seed: int) -> list[Question]:
    """`count` chats of the tasks of the demo model, each up to its last question; the same ones for the same seed."""
    rng = random.Random(f"draft {seed}")
    questions = []
    for _ in range(count):
        task = rng.choices(list(MIX), list(MIX.values()))[0]
        if task == "lookup_long":
            chat = long_conversation(rng, lambda messages: sum(len(m["content"]) for m in messages) < 1900)
        elif task == "lookup" and rng.random() < 0.5:
            chat = list_conversation(rng, rng.randint(2, 40), rng.randint(1, 3))
        else:
            chat = conversation(rng, task, rng.choices((1, 2, 3), (0.8, 0.13, 0.07))[0])
        questions.append(Question(given=chat.messages[:-1], max_tokens=160))
    return questions
