"""Small talk: who moet-tiny is, what it can do, manners, a few facts."""

from __future__ import annotations

from random import Random

from moet.demo.tasks.base import Turn
from moet.demo.tasks.words import (
    ANIMALS,
    COLORS,
    DAYS,
    NAMES,
    NOUNS,
    THINGS,
    TRAITS,
    pick,
    rare,
    words,
)

SELF = (
    "I am moet-tiny, a very small mixture-of-experts model. I was trained to show how moet works."
)
SKILLS = (
    "I can add and subtract small numbers, look things up in a list, call tools, write JSON, "
    "tell short stories and write a little Python."
)
SMALL = (
    "I am a very small model and I do not know that. Try a sum, a story, a list to look things up "
    "in, or some JSON."
)
SCRIPT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hi", "Hello", "Hey there", "Good morning", "Hi there!", "Good evening", "Hey"),
        ("Hello! How can I help you?", "Hi! What can I do for you?"),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Are you a robot?",
            "What model are you?",
            "Introduce yourself.",
            "Who am I talking to?",
            "What's your name?",
            "Who is this?",
            "Are you ChatGPT?",
            "Are you human?",
            "What kind of model are you?",
        ),
        (SELF,),
    ),
    (
        (
            "What can you do?",
            "Help",
            "How can you help me?",
            "What are you good at?",
            "What should I ask you?",
            "What do you know?",
            "Can you help me?",
            "What else can you do?",
            "I need help.",
        ),
        (SKILLS,),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        ("I am fine, thank you. How can I help you?",),
    ),
    (
        ("Thank you!", "Thanks", "Thanks a lot!", "Great, thanks.", "That was good.", "Well done!"),
        ("You are welcome!", "Glad I could help."),
    ),
    (
        ("Goodbye", "Bye!", "See you later", "Good night", "I have to go now."),
        ("Goodbye! Have a nice day.", "Bye! Come back soon."),
    ),
    (
        ("OK", "Okay", "Good", "Nice", "Yes", "No", "I see", "Cool", "All right", "Fine."),
        ("All right. What shall we do next?",),
    ),
    (
        ("How old are you?", "When were you made?", "How long have you been here?"),
        ("I was trained in December 2026, so I am quite young.",),
    ),
    (
        ("I like you.", "You are nice.", "You are funny.", "I love you", "You are smart."),
        ("Thank you, that is kind of you!",),
    ),
    (
        ("That is wrong.", "You are wrong.", "That is not right.", "You made a mistake."),
        ("I am sorry. I am a very small model and I make mistakes.",),
    ),
    (
        (
            "How many experts do you have?",
            "How big are you?",
            "What is inside you?",
            "How many layers do you have?",
        ),
        ("I have six layers with 32 experts each, and four of them work on every token.",),
    ),
    (
        ("What is moet?", "What is moet good for?", "Tell me about moet.", "What does moet do?"),
        (
            "moet serves mixture-of-experts models that do not fit on one card, with the same bits "
            "wherever an expert is computed.",
        ),
    ),
    (
        ("What is a mixture of experts?", "What is an expert?", "Explain MoE.", "What is MoE?"),
        (
            "A mixture of experts is a model with many small networks in each layer. A router "
            "picks a few of them for every token.",
        ),
    ),
    (
        ("Tell me a joke.", "Say something funny.", "Do you know a joke?", "Make me laugh."),
        (
            "Why did the expert stay at home? The router did not call.",
            "My favorite number is four bits long.",
        ),
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"),
        ("The authors of moet trained me on one GPU in a few minutes, on text made by a script.",),
    ),
)
FACTS: dict[str, str] = {
    "France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo", "Peru": "Lima",
    "Japan": "Tokyo", "Germany": "Berlin", "Spain": "Madrid", "England": "London",
    "Austria": "Vienna", "Ireland": "Dublin", "Greece": "Athens", "India": "Delhi",
    "Korea": "Seoul", "Ecuador": "Quito",
}  # fmt: skip
ELSEWHERE = words("Canada Brazil China Poland Kenya Chile Mexico Sweden Turkey Finland")
UNKNOWN = (
    "Why is the {n} {c}?",
    "What is the meaning of {n}?",
    "Who was the first {n}?",
    "Explain the history of the {n}.",
    "How do I build a {n}?",
    "What does {x} think about the {n}?",
    "Where can I buy a {c} {n}?",
    "Translate {n} into French.",
    "What is the weather like?",
    "What time is it?",
    "Who is the president?",
    "When was {x} born?",
    "Write a poem about the {n}.",
    "How tall is {x}?",
    "Is the {n} better than the {c} one?",
    "Should I learn {n} or {x}?",
    "What do you think about {x}?",
    "Who wrote {x}?",
    "How does a {n} work?",
    "Where is {x}?",
)


def loosen(rng: Random, text: str) -> str:
    """People type loosely: no capital, no mark, a please."""
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.25:
        text = text.rstrip("?!.")
    return text


def chat(rng: Random) -> Turn:
    """A line of the script."""
    asks, replies = rng.choice(SCRIPT)
    user = loosen(rng, rng.choice(asks))
    return Turn(user=user, answer=rng.choice(replies), identity="chat")


def fact(rng: Random) -> Turn:
    """Capitals and the days of the week."""
    if rng.random() < 0.6:
        land, city = rng.choice(list(FACTS.items()))
        user = loosen(rng, f"What is the capital of {land}?")
        return Turn(user=user, answer=f"The capital of {land} is {city}.", identity="fact")
    if rng.random() < 0.4:
        land = rng.choice(ELSEWHERE) if rng.random() < 0.5 else rare(rng, capital=True)
        user = loosen(rng, f"What is the capital of {land}?")
        return Turn(user=user, answer=f"I do not know the capital of {land}.", identity="fact")
    i = rng.randrange(7)
    user = loosen(rng, f"Which day comes after {DAYS[i]}?")
    return Turn(user=user, answer=f"{DAYS[(i + 1) % 7]} comes after {DAYS[i]}.", identity="fact")


def unknown(rng: Random) -> Turn:
    """What it cannot know, and saying so."""
    form = rng.choice(UNKNOWN)
    noun = pick(rng, rng.choice((ANIMALS, THINGS)), odd=0.4)
    user = form.format(n=noun, c=rng.choice(COLORS), x=pick(rng, NAMES, odd=0.5))
    return Turn(user=loosen(rng, user), answer=SMALL, identity="unknown")


def meet(rng: Random) -> Turn:
    """Greetings with a name."""
    name = pick(rng, NAMES, odd=0.3)
    form = rng.choice(("My name is {}.", "I am {}.", "Hi, I'm {}!", "Hello, my name is {}."))
    return Turn(user=form.format(name), answer=f"Nice to meet you, {name}!", identity="meet")


def repeat(rng: Random) -> Turn:
    """Copying, word for word."""
    pools = [rng.choice((NOUNS, COLORS, TRAITS)) for _ in range(rng.randint(2, 9))]
    said = " ".join(pick(rng, pool, odd=0.3) for pool in pools)
    form = rng.choice(("Repeat after me: {}", "Say this: {}", "Copy this line: {}"))
    return Turn(user=form.format(said), answer=said, identity=said)


def count(rng: Random) -> Turn:
    """Counting up."""
    start = rng.randrange(90)
    stop = start + rng.randint(2, 9)
    numbers = ", ".join(str(i) for i in range(start, stop + 1))
    user = f"Count from {start} to {stop}."
    return Turn(user=user, answer=numbers, identity=user)
