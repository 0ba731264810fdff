"""Text for the demo model: stories, chats and tasks that have one right answer.

This file owns every sentence the demo model ever sees. Training draws conversations from it,
evaluation and tests draw held-out items from it, and the tokenizer takes its words from it. It
needs the standard library only, and everything is a function of a seeded ``random.Random``.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Message = dict[str, str]

TASKS = (
    "add",
    "add_steps",
    "lookup",
    "lookup_long",
    "sort",
    "sort_letters",
    "reverse",
    "reverse_dashes",
    "json",
)

# ---------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


# One vocabulary piece each: keys of lists, words to sort, things in stories.
NOUNS = _words(
    "acorn anchor apple arrow badge bag ball banana barn basket bath bean bed bell bench berry "
    "bike boat bone book boot bottle bowl box branch bread brick bridge broom brush bucket button "
    "cabin cake camera candle cap car card carrot cart castle chain chair cheese cherry clock "
    "cloud coat coin comb cookie corn cradle crown cup curtain desk dish doll door drawer dress "
    "drum egg engine envelope fan feather fence ferry flag flute fork fountain garden gate gift "
    "glass globe glove grape guitar hammer hat hill honey hook horn house ink island jacket jar "
    "jelly jug kettle key kite knife ladder lamp leaf lemon letter lock log magnet map marble mask "
    "melon mirror mug nail needle nest net notebook nut oar onion oven paint pan paper peach pear "
    "pearl pen pencil piano pie pillow pipe plate plum pocket potato puzzle quilt radio raft rake "
    "ribbon ring road rock roof rope rose rug saddle sail salt sand scarf shell ship shoe sink "
    "skirt sled soap sock sofa spoon stamp star stone stool stove sugar table tent thread ticket "
    "tile tomato tower toy train tray tree truck trumpet tunnel umbrella vase violin wall watch "
    "water wheel whistle window wood wool yarn zipper"
)

ANIMALS = _words(
    "fox cat dog rabbit mouse bear owl frog duck pony turtle hedgehog squirrel wolf lamb goat "
    "kitten puppy deer otter penguin beaver robin badger"
)

COLORS = _words("red blue green yellow white black brown pink gray purple")

NAMES = _words(
    "Milo Lily Tom Anna Ben Mia Sam Nora Leo Ruby Max Ella Finn Rosa Otto Ida Hugo Clara Felix Luna Jack Zoe Oscar Emma"
)

# Never in the vocabulary: they fall apart into letters, as any word a visitor may think of.
LETTER_WORDS = _words(
    "able actor again agent alarm album alley amber angel ankle apron arena atlas attic autumn "
    "bacon bamboo banjo beach beard beast birth blade blank blaze bloom board bonus brain "
    "breeze bride brief bronze buddy buffalo cabbage cable cactus camel canal candy canoe canyon "
    "cargo carpet cattle cedar chalk charm chess chief chili choir cider cinema circle circus "
    "citrus clay cliff clover coach cobra cocoa coral cotton couch cousin coyote cradles cream "
    "creek cricket crust crystal curve daisy dance delta denim diamond diary dinner dollar dolphin "
    "donkey dragon eagle early earth easel echo elbow ember enamel energy equal escape event fable "
    "falcon fancy farmer fever fiber field finger flame flour forest fossil frame frost future "
    "galaxy garlic gecko genius ghost giant ginger glacier goose grain gravel guard habit harbor "
    "hazel heart helmet heron hiker hobby hotel iceberg idea igloo image index insect iris "
    "ivory jaguar jewel joker jungle kayak kernel kidney kiosk kiwi koala label laptop laser lava "
    "lawyer legend level lilac limit linen lizard lobby lunch lyric magic mango maple market mayor "
    "meadow medal metal meteor moment monkey motor movie muffin mural museum music napkin "
    "nation nature nephew nickel noble noodle north novel nurse oasis ocean olive "
    "opera orange orbit orchid organ oxygen oyster paddle palace panda panther parade parrot "
    "party pasta pastry pebble pepper petal phone photo pigeon pilot pirate pixel planet plaza "
    "point polar police pond poppy powder prism pulse pumpkin pupil quail quarter "
    "queen quest quick quill rabbi racket radar raven razor recipe record region rhyme rifle "
    "robot rocket royal ruler safari salad salmon sample satin sauce scale school science "
    "screen season seed shadow shark sheep shelf signal silver singer siren sketch slope smoke "
    "snake solar spark spice spider sponge square stair steam storm street studio summer "
    "swamp syrup tablet tango taxi teacher temple tennis theory tiger timber toast token tooth "
    "topic torch town trail triangle trophy tulip turkey tuxedo uncle union urban valley vapor "
    "velvet video vinyl virus vision vowel wagon waiter walnut walrus weasel whale wheat willow "
    "winter wizard world yacht yogurt zebra zero zigzag"
)
CITIES = _words(
    "Quito Paris Oslo Lima Rome Cairo Tokyo Delhi Berlin Madrid Lisbon Dublin Vienna Prague "
    "Warsaw Athens Nairobi Boston Denver Dallas Sydney Lagos Hanoi Seoul Turin Zurich Geneva "
    "Krakow Porto Malmo Bergen Lyon Havana Bogota Accra Dakar Tunis Riga Sofia"
)


def bucket(text: str) -> int:
    """A stable number in 0..99, the same in every process (unlike ``hash``)."""
    return hashlib.sha256(text.encode()).digest()[0] * 100 // 256


def is_held_out_sum(a: int, b: int) -> bool:
    """Whether this pair, in either order, is kept out of training (about two in a hundred)."""
    return bucket(f"sum {min(a, b)} {max(a, b)}") < 2


HELD_OUT_WORDS = tuple(word for word in LETTER_WORDS if bucket("word " + word) < 18)
TRAIN_WORDS = tuple(word for word in LETTER_WORDS if bucket("word " + word) >= 18)

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr pl pr sh sk sl sn sp st th tr qu")
_VOWELS = _words("a e i o u a e i o u ai ea ee oa oo ou y")
_CODAS = ["", "", "", *_words("b d g k l m n p r s t x ck ll nd ng nt rd rk st")]


def made_up_word(rng: random.Random, longest: int = 8) -> str:
    """A pronounceable word of 3 to ``longest`` letters that most likely means nothing."""
    while True:
        parts = [
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 2, 3)))
        ]
        word = "".join(parts)
        if rng.random() < 0.2:  # words may begin with a vowel, too
            word = word.lstrip("bcdfghjklmnpqrstvwz")
        if 3 <= len(word) <= longest and word not in _CLOSED_WORDS:
            return word


_CLOSED_WORDS = frozenset(NOUNS) | frozenset(ANIMALS) | frozenset(COLORS) | frozenset(LETTER_WORDS)


def _letter_word(rng: random.Random, held_out: bool) -> str:
    if held_out:
        return rng.choice(HELD_OUT_WORDS)
    if rng.random() < 0.35:
        return rng.choice(TRAIN_WORDS)
    if rng.random() < 0.12:  # words of the vocabulary, inside quotes, are letters as well
        return rng.choice(NOUNS)
    return made_up_word(rng)


# ---------------------------------------------------------------------------------------------
# Tasks with one right answer: each returns (question, answer)
# ---------------------------------------------------------------------------------------------

_ADD = (
    "What is {a}+{b}?",
    "What is {a} + {b}?",
    "Please add {a} and {b}.",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "{a}+{b}",
    "{a}+{b}=",
    "How much is {a} plus {b}?",
    "How much is {a}+{b}?",
    "What is {a} plus {b}?",
    "Can you add {a} and {b}?",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
)
_ADD_STEPS = (
    "Add {a} and {b} step by step.",
    "Please add {a} and {b} step by step.",
    "What is {a}+{b}? Show the steps.",
    "What is {a} + {b}? Show your work.",
    "Compute {a} + {b} step by step.",
    "How do you add {a} and {b}?",
)


def _two_numbers(rng: random.Random, held_out: bool) -> tuple[int, int]:
    small = not held_out and rng.random() < 0.12
    while True:
        if small:
            a, b = rng.randrange(10 ** rng.randint(1, 3)), rng.randrange(10 ** rng.randint(1, 3))
        else:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
        if is_held_out_sum(a, b) == held_out:
            return a, b


def add(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """The sum of two numbers, mostly of three digits."""
    a, b = _two_numbers(rng, held_out)
    return rng.choice(_ADD).format(a=a, b=b), str(a + b)


def add_steps(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """The same sum, column by column from the right, with the carry written out."""
    while True:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if is_held_out_sum(a, b) == held_out:
            break
    steps, carry = [], 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return rng.choice(_ADD_STEPS).format(a=a, b=b), " ".join(steps) + f" so {a + b}"


_LIST_INTRO = (
    "List: {pairs}. ",
    "Here is a list: {pairs}. ",
    "Here are some numbers: {pairs}. ",
    "Look at this list: {pairs}. ",
    "Remember these numbers: {pairs}. ",
    "Given the list {pairs}. ",
)
_LIST_FIRST = (
    "Find {key}.",
    "What is {key}?",
    "Look up {key}.",
    "What is the number of {key}?",
    "Which number goes with {key}?",
    "Please find {key}.",
    "Tell me the number of {key}.",
)
_LIST_NEXT = (
    *_LIST_FIRST,
    "And {key}?",
    "What about {key}?",
    "Now find {key}.",
    "And what is {key}?",
)


def _pairs(rng: random.Random, count: int) -> dict[str, int]:
    return {key: rng.randint(10, 99) for key in rng.sample(NOUNS, count)}


def _list_question(rng: random.Random, pairs: dict[str, int], key: str) -> str:
    listed = ", ".join(f"{k}:{v}" for k, v in pairs.items())
    return rng.choice(_LIST_INTRO).format(pairs=listed) + rng.choice(_LIST_FIRST).format(key=key)


def _found(pairs: dict[str, int], key: str) -> str:
    return f"I found {key}:{pairs[key]}."


def lookup_turns(rng: random.Random, pairs: int, questions: int) -> list[tuple[str, str]]:
    """Several questions about one list; the list itself is in the first question.

    A key may come up twice: the second time its value stands in an answer close by, an easier
    case from which the harder one is learnt sooner.
    """
    table = _pairs(rng, pairs)
    keys = rng.choices(list(table), k=questions)
    turns = [(_list_question(rng, table, keys[0]), _found(table, keys[0]))]
    for key in keys[1:]:
        turns.append((rng.choice(_LIST_NEXT).format(key=key), _found(table, key)))
    return turns


_SORT = (
    "Sort these words: {words}.",
    "Please sort these words: {words}.",
    "Put these words in order: {words}.",
    "Sort {words}.",
    "Can you sort these words? {words}",
    "Write these words in ABC order: {words}.",
    "Sort the words {words} from A to Z.",
)


def sort(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """Three to five words of the vocabulary in alphabetical order (in training up to seven)."""
    words = rng.sample(NOUNS, rng.randint(3, 5 if held_out else 7))
    return _sort_turn(rng, words)


@functools.cache
def _spoken_starts() -> tuple[str, ...]:
    return tuple(word for word in spoken_words()[0] if len(word) > 1)


def sort_letters(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """Three words the vocabulary does not have; the first two letters settle the order.

    Words that begin with one of the vocabulary ("seed", with "see") are left out: the tokenizer
    cuts them there, so their letters are out of sight.
    """
    words: list[str] = []
    while len(words) < 3:
        pool = HELD_OUT_WORDS if held_out else TRAIN_WORDS
        word = rng.choice(pool) if rng.random() < 0.4 else made_up_word(rng, longest=7)
        if word.startswith(_spoken_starts()):
            continue
        if all(word[:2] != other[:2] for other in words):
            words.append(word)
    return _sort_turn(rng, words)


def _sort_turn(rng: random.Random, words: list[str]) -> tuple[str, str]:
    question = rng.choice(_SORT).format(words=", ".join(words))
    return question, "Sorted: " + ", ".join(sorted(words))


_REVERSE = (
    'Reverse "{word}".',
    'Spell "{word}" backwards.',
    'Write "{word}" backwards.',
    'What is "{word}" backwards?',
    'Please reverse the word "{word}".',
    'Can you spell "{word}" backwards?',
    'Say the word "{word}" in reverse.',
)
_REVERSE_DASHES = (
    'Reverse "{word}" letter by letter.',
    'Spell "{word}" backwards, letter by letter.',
    'Spell "{word}" backwards with dashes.',
    'Write the letters of "{word}" in reverse order.',
    'Please spell "{word}" in reverse with dashes.',
)


def reverse(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A word of letters, written backwards."""
    word = _letter_word(rng, held_out)
    question = rng.choice(_REVERSE)
    if not held_out and word not in _CLOSED_WORDS and rng.random() < 0.15:
        question = question.replace('"', "")
    return question.format(word=word), word[::-1]


def reverse_dashes(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """The same, letter by letter with dashes."""
    word = _letter_word(rng, held_out)
    return rng.choice(_REVERSE_DASHES).format(word=word), "-".join(word[::-1])


_JSON = (
    "Fill in {fields}: {sentence}",
    "Make a JSON object with {fields}: {sentence}",
    "Turn this into JSON with {fields}: {sentence}",
    "Write JSON with {fields}: {sentence}",
    "Extract {fields} as JSON: {sentence}",
    "{sentence} Give me JSON with {fields}.",
)
_PEOPLE = (
    "My friend {name} from {city} is {age}.",
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "I met {name} in {city}. {name} is {age}.",
    "In {city} there is a baker called {name}, who is {age}.",
    "{name}, {age}, comes from {city}.",
)
_PETS = (
    "{name} has a {color} {pet}.",
    "{name} owns a {pet}. It is {color}.",
    "The {pet} of {name} is {color}.",
    "I saw {name} with a {color} {pet}.",
    "A {color} {pet} lives with {name}.",
)


def json_object(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A small JSON object whose values stand in one sentence."""
    known = rng.random() < 0.4
    name = rng.choice(NAMES) if known else made_up_word(rng, longest=7).capitalize()
    values: dict[str, str | int] = {"name": name}
    if rng.random() < 0.65:
        city = rng.choice(CITIES) if rng.random() < 0.4 else made_up_word(rng, 7).capitalize()
        values |= {"age": rng.randint(5, 99), "city": city}
        sentence = rng.choice(_PEOPLE).format(**values)
    else:
        values |= {"pet": rng.choice(ANIMALS), "color": rng.choice(COLORS)}
        sentence = rng.choice(_PETS).format(**values)
    keys = list(values)
    if rng.random() < 0.3:
        rng.shuffle(keys)
    fields = ", ".join(keys)
    if rng.random() < 0.3:
        fields = ", ".join(keys[:-1]) + " and " + keys[-1]
    body = ", ".join(
        f'"{key}": "{values[key]}"' if isinstance(values[key], str) else f'"{key}": {values[key]}' for key in keys
    )
    return rng.choice(_JSON).format(fields=fields, sentence=sentence), "{" + body + "}"


# ---------------------------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------------------------

_ADJECTIVES = _words("little brave kind shy clever young funny quiet happy lazy curious gentle")
_TIMES = (
    "One day",
    "One morning",
    "One evening",
    "One sunny day",
    "One cold night",
    "One spring day",
)
_PLACES = (
    "in the forest",
    "by the river",
    "near a small village",
    "on a green hill",
    "in a quiet valley",
    "at the edge of the sea",
    "under an old tree",
    "in a warm house",
)
_GOALS = (
    ("wanted to find {a} {thing}", "look for {a} {thing}"),
    ("wanted to bake a big cake", "bake a cake"),
    ("wanted to build a boat", "build a boat"),
    ("wanted to see the sea", "walk to the sea"),
    ("wanted to learn a new song", "learn a song"),
    ("wanted to help a friend", "help a friend"),
    ("wanted to count the stars", "count the stars"),
    ("wanted to plant a garden", "plant a garden"),
)
_TROUBLES = (
    "But it began to rain, and the path was full of mud.",
    "But the wind was strong and the night was dark.",
    "But the way was long, and soon {name} was lost.",
    "But a big stone lay on the road.",
    "But the bridge was broken and the water was deep.",
    "But {name} was too small and could not do it alone.",
    "But nobody knew where to start.",
)
_HELPS = (
    'A {friend} came by and said, "Do not worry, I can help you."',
    'Then a {friend} sat down and asked, "Why are you sad?"',
    'An old {friend} smiled and said, "Let us do it together."',
    "Soon {name} met a {friend}, who knew what to do.",
    'A friendly {friend} called out, "Come with me!"',
)
_ACTIONS = (
    "They worked all day and did not give up.",
    "They walked side by side and sang a song.",
    "They shared some bread and made a plan.",
    "They tried again and again, until it worked.",
    "They took {a} {thing} and used it in a clever way.",
    "They waited for the sun and then went on.",
)
_FEELINGS = _words("happy proud glad thankful cheerful")
_ENDS = (
    "In the end, {name} was very {feeling}.",
    "At last they went home, and {name} felt {feeling}.",
    "That night {name} slept well and dreamed of the {friend}.",
    "From that day on, {name} and the {friend} were best friends.",
    "{name} thanked the {friend} and gave the {friend} {a} {thing}.",
    "And {name} learned that good friends make hard things easy.",
)
_OPENINGS = (
    "Once upon a time, there was a {adj} {animal} named {name}.",
    "Once upon a time, a {adj} {animal} named {name} lived {place}.",
    "Once there was a {adj} {animal} called {name}.",
    "There once was a {adj} {animal} named {name}, who lived {place}.",
    "Long ago, a {adj} {animal} called {name} lived {place}.",
    "{name} was a {adj} {animal} who lived {place}.",
)
_LIKES = (
    "{name} liked to play with {a} {color} {thing}.",
    "Every day {name} went for a walk {place2}.",
    "{name} had {a} {color} {thing} and took good care of it.",
    "Everybody said that {name} was very {adj2}.",
    "{name} loved honey, songs and long walks.",
)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def story(
    rng: random.Random,
    animal: str | None = None,
    name: str | None = None,
    thing: str | None = None,
    long: bool = False,
) -> str:
    """One short story: somebody wants something, meets trouble and is helped by a friend."""
    animal = animal or rng.choice(ANIMALS)
    name = name or rng.choice(NAMES)
    thing = thing or rng.choice(NOUNS)
    friend = rng.choice([a for a in ANIMALS if a != animal])
    adj, adj2 = rng.sample(_ADJECTIVES, 2)
    place, place2 = rng.sample(_PLACES, 2)
    color = rng.choice(COLORS)
    goal, todo = rng.choice(_GOALS)
    sentences = [rng.choice(_OPENINGS)]
    if long or rng.random() < 0.6:
        sentences.append(rng.choice(_LIKES))
    if rng.random() < 0.75:
        sentences.append(f"{rng.choice(_TIMES)}, {{name}} {goal}.")
    else:
        sentences.append(f'{rng.choice(_TIMES)}, {{name}} said, "Today I will {todo}."')
    sentences.append(rng.choice(_TROUBLES))
    sentences.append(rng.choice(_HELPS))
    sentences.append(rng.choice(_ACTIONS))
    sentences.append(rng.choice(_ENDS))
    text = " ".join(sentences)
    text = text.replace("a {adj}", f"{_article(adj)} {adj}")
    text = text.replace("A {friend}", f"{_article(friend).capitalize()} {friend}")
    text = text.replace("a {friend}", f"{_article(friend)} {friend}")
    text = text.replace("{a} {color}", f"{_article(color)} {color}")
    return text.format(
        animal=animal,
        name=name,
        thing=thing,
        friend=friend,
        adj=adj,
        adj2=adj2,
        place=place,
        place2=place2,
        color=color,
        feeling=rng.choice(_FEELINGS),
        a=_article(thing),
    )


_STORY_ASK = (
    "Tell me a story about {a} {animal}.",
    "Please tell me a story about {a} {animal}.",
    "Can you tell me a story about {a} {animal}?",
    "Write a short story about {a} {animal}.",
    "I want a story about {a} {animal}.",
    "A story about {a} {animal}, please.",
)
_STORY_ASK_NAMED = (
    "Tell me a story about {a} {animal} named {name}.",
    "Write a story about {a} {animal} called {name}.",
    "Can you tell me a story about {name} the {animal}?",
)
_STORY_ASK_ANY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Write a story for me.",
    "Tell me another story.",
)


def story_turn(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story."""
    kind = rng.random()
    animal, name = rng.choice(ANIMALS), rng.choice(NAMES)
    if kind < 0.25:
        return rng.choice(_STORY_ASK_ANY), story(rng)
    values = {"a": _article(animal), "animal": animal, "name": name}
    if kind < 0.75:
        return rng.choice(_STORY_ASK).format(**values), story(rng, animal)
    return rng.choice(_STORY_ASK_NAMED).format(**values), story(rng, animal, name)


# ---------------------------------------------------------------------------------------------
# Small talk
# ---------------------------------------------------------------------------------------------

UNKNOWN = "I do not know that. I am only a tiny demo model."

_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello!",
            "Hi!",
            "Hi there!",
            "Hello",
            "Hey!",
            "Good morning!",
            "Hi",
            "Hey",
            "Hello there!",
        ),
        "Hello! I am the demo model of jaxserve. What can I do for you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am a tiny demo model that comes with jaxserve. I know a few tasks and some stories.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help!", "Help"),
        "I can add two numbers, find a key in a list, sort words, spell a word backwards, "
        "fill a small JSON object and tell a short story.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?"),
        "I am fine, thank you. Shall I add two numbers or tell you a story?",
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot!", "Great, thank you!"),
        "You are welcome!",
    ),
    (
        ("Goodbye!", "Bye!", "See you later!", "Good night!", "Bye", "Goodbye"),
        "Goodbye! It was nice to talk to you.",
    ),
    (
        ("Are you smart?", "Do you know everything?", "Can you answer all questions?"),
        "No. I am very small, so please ask me only what I was trained for.",
    ),
    (
        ("Are you human?", "Are you a person?", "Are you real?"),
        "No, I am a small computer program.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained on two processor cores with the scripts of jaxserve.",
    ),
    (
        ("What is jaxserve?", "Tell me about jaxserve.", "What does jaxserve do?"),
        "It is an engine that serves language models with JAX. I am its demo model.",
    ),
    (
        (
            "What is the capital of France?",
            "What time is it?",
            "Write a poem.",
            "How is the weather?",
            "What do you think about art?",
            "Who won the game?",
            "What is the meaning of life?",
            "Can you write code?",
            "Do you speak German?",
            "What should I eat today?",
        ),
        UNKNOWN,
    ),
)


# Questions about anything else; not read for the vocabulary, so some of their words are letters.
_ANYTHING = (
    "Who {did} {the} {noun}?",
    "Why is {the} {noun} {color}?",
    "Where is {the} {noun}?",
    "Where can I buy a {noun}?",
    "When will the {animal} come?",
    "How old is {name}?",
    "How do I make a {noun}?",
    "Who is {name}?",
    "What is the best {noun}?",
    "What does a {animal} eat?",
    "Is a {animal} bigger than a {other}?",
    "Why do you like the {noun}?",
    "Do you like {color}?",
    "What is a {made_up}?",
    "Tell me about the {made_up}.",
    "Can you {made_up} the {noun}?",
)


def _anything(rng: random.Random) -> str:
    return rng.choice(_ANYTHING).format(
        did=rng.choice(("made", "wrote", "found", "broke", "took", "sold", "bought")),
        the=rng.choice(("the", "this", "that", "my")),
        noun=rng.choice(NOUNS),
        color=rng.choice(COLORS),
        animal=rng.choice(ANIMALS),
        other=rng.choice(ANIMALS),
        name=rng.choice(NAMES),
        made_up=made_up_word(rng),
    )


def small_talk(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A greeting or a question about the model, with its one pleasant and honest answer."""
    if rng.random() < 0.3:
        return _anything(rng), UNKNOWN
    questions, answer = rng.choice(_SMALL_TALK)
    return rng.choice(questions), answer


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the demo model of jaxserve.",
    "You are a helpful assistant. Answer in one line.",
    "Answer the question.",
    "Be kind and be correct.",
    "You are a tiny model. Do your best.",
    "You are a helpful, friendly and honest assistant.",
)

# ---------------------------------------------------------------------------------------------
# Conversations for training
# ---------------------------------------------------------------------------------------------

_SINGLE: dict[str, Callable[..., tuple[str, str]]] = {
    "add": add,
    "add_steps": add_steps,
    "sort": sort,
    "sort_letters": sort_letters,
    "reverse": reverse,
    "reverse_dashes": reverse_dashes,
    "json": json_object,
    "talk": small_talk,
}


@dataclass
class Conversation:
    """What one packed segment holds: a chat, or (``text``) a story without any chat around it.

    ``story_turns`` are the indices of messages that are free text, which count less in the loss.
    """

    messages: list[Message] = field(default_factory=list)
    text: str | None = None
    story_turns: set[int] = field(default_factory=set)

    def ask(self, question: str, answer: str, is_story: bool = False) -> None:
        """Append one question and its answer."""
        self.messages.append({"role": "user", "content": question})
        if is_story:
            self.story_turns.add(len(self.messages))
        self.messages.append({"role": "assistant", "content": answer})


def _start(rng: random.Random) -> Conversation:
    chat = Conversation()
    if rng.random() < 0.3:
        chat.messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return chat


def loosely(rng: random.Random, question: str) -> str:
    """Now and then the small letter or the missing full stop of a hurried visitor."""
    if rng.random() < 0.05:
        question = question[:1].lower() + question[1:]
    if rng.random() < 0.05 and question[-1] in ".?!" and len(question) > 8:
        question = question[:-1]
    return question


def conversation(rng: random.Random, task: str, turns: int = 1) -> Conversation:
    """A training conversation whose first task is ``task``, and ``turns`` turns of mixed ones.

    ``task`` is one of the names in ``TASKS`` (but not lookup_long), "talk", "story" (asked for in
    a chat) or "text" (a story with no chat around it).
    """
    if task == "text":
        return Conversation(text=story(rng, long=rng.random() < 0.5))
    chat = _start(rng)
    if task == "lookup":
        for question, answer in lookup_turns(rng, rng.randint(2, 12), rng.randint(1, 5)):
            chat.ask(loosely(rng, question), answer)
    for turn in range(turns):
        kind = task if turn == 0 else rng.choice(("talk", *_SINGLE))
        if kind == "lookup":
            continue
        if kind == "story":
            chat.ask(*story_turn(rng), is_story=True)
        else:
            question, answer = _SINGLE[kind](rng)
            chat.ask(loosely(rng, question), answer)
    return chat


def list_conversation(rng: random.Random, pairs: int, questions: int) -> Conversation:
    """Many questions about one long list."""
    chat = _start(rng)
    for question, answer in lookup_turns(rng, pairs, questions):
        chat.ask(question, answer)
    return chat


def long_conversation(
    rng: random.Random,
    fits: Callable[[list[Message]], bool],
    other: float = 0.35,
    held_out: bool = False,
) -> Conversation:
    """A list, then questions about it among other tasks, as long as ``fits(messages)`` allows."""
    chat = _start(rng)
    table = _pairs(rng, rng.randint(20, 40))
    keys = list(table)
    chat.ask(_list_question(rng, table, key := rng.choice(keys)), _found(table, key))
    while True:
        before = len(chat.messages)
        if rng.random() < other:
            kind = rng.choice(("add", "add_steps", "reverse", "sort", "json", "story", "talk"))
            if kind == "story":
                chat.ask(*story_turn(rng), is_story=True)
            else:
                chat.ask(*_SINGLE[kind](rng, held_out))
        else:
            key = rng.choice(keys)
            chat.ask(rng.choice(_LIST_NEXT).format(key=key), _found(table, key))
        if not fits(chat.messages):
            del chat.messages[before:]
            chat.story_turns = {turn for turn in chat.story_turns if turn < before}
            break
    if held_out:  # the last question is about the list
        key = rng.choice(keys)
        del chat.messages[-2:]
        chat.ask(rng.choice(_LIST_NEXT).format(key=key), _found(table, key))
    return chat


# ---------------------------------------------------------------------------------------------
# Held-out items
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One question that training never drew, and its only right answer."""

    task: str
    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""


def _shorter_than(limit: int) -> Callable[[list[Message]], bool]:
    return lambda messages: sum(len(m["content"]) for m in messages) < limit


def held_out_items(task: str, n: int, seed: int) -> list[Item]:
    """``n`` items of ``task`` that training does not contain, the same ones for the same seed.

    Sums are kept apart by a hash and words by name; for the other tasks the items are drawn
    afresh, where meeting one of training again is most unlikely. ``lookup`` asks one question
    about a list of 2 to 40 pairs, ``lookup_long`` ends a chat of many turns (500-950 tokens).
    """
    rng = random.Random(f"held out {task} {seed}")
    items = []
    for _ in range(n):
        if task == "lookup":
            chat = list_conversation(rng, rng.randint(2, 40), 1)
        elif task == "lookup_long":
            fits = _shorter_than(rng.randint(1500, 2150))
            chat = long_conversation(rng, fits, held_out=True)
        elif task in _SINGLE:
            chat = _start(rng)
            chat.ask(*_SINGLE[task](rng, True))
        else:
            raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
        *messages, last = chat.messages
        items.append(Item(task=task, answer=last["content"], messages=tuple(messages)))
    return items


def check(item: Item, text: str) -> bool:
    """Whether ``text`` is exactly the right answer, white space around it aside."""
    return text.strip() == item.answer


def spoken_words() -> tuple[set[str], set[str]]:
    """The words the tokenizer keeps whole: (all of them, those that may open a text).

    Read off the templates, so the vocabulary changes only if a sentence does. Words that are
    meant to be letters are left out.
    """
    starts = [
        *(_ADD + _ADD_STEPS + _LIST_INTRO + _LIST_NEXT + _SORT + _REVERSE + _REVERSE_DASHES),
        *(_JSON + _PEOPLE + _PETS + _STORY_ASK + _STORY_ASK_NAMED + _STORY_ASK_ANY + _OPENINGS),
        *(text for questions, answer in _SMALL_TALK for text in (*questions, answer)),
        *SYSTEM_PROMPTS,
        *("I found", "Sorted: so"),
    ]
    middles = [
        *(_TIMES + _PLACES + _TROUBLES + _HELPS + _ACTIONS + _ENDS + _LIKES),
        *(part for goal in _GOALS for part in goal),
        *('said, "Today I will', "an An name age city pet color"),
    ]
    words: set[str] = set()
    opening = set(NAMES)
    for template in (*starts, *("0 " + text for text in middles)):
        for index, raw in enumerate(re.sub(r"\{\w+\}", "0", template).split(" ")):
            word = raw.strip(".,:?!\"'()")
            if not word.isalpha():
                continue
            words.add(word)
            if word[0].isupper() and (index == 0 or raw.startswith('"')):
                opening.add(word)
    words |= {*NOUNS, *ANIMALS, *COLORS, *NAMES, *_ADJECTIVES, *_FEELINGS}
    words -= {*LETTER_WORDS, *CITIES}
    return words, opening & words
