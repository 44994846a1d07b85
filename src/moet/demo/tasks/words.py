"""The vocabulary of moet-tiny's world."""

from __future__ import annotations

from random import Random


def words(text: str) -> list[str]:
    """A list, written as it reads."""
    return text.split()


NAMES = words(
    "Ada Ben Cora Dan Ella Finn Gus Hana Ivan Jade Karl Lena Mia Noah Olga Pia Quinn Rosa Sam "
    "Tara Uma Vera Will Yara Zoe"
)
ANIMALS = words(
    "fox owl bear cat dog hare mouse frog goat horse duck crow deer wolf bee whale lion turtle "
    "robin otter"
)
THINGS = words(
    "lantern map key bell kite boat drum book hat cup rope shell stone coin ladder basket mirror "
    "clock blanket flute"
)
PLACES = words(
    "forest river hill village garden harbor meadow castle market island valley bridge lake barn "
    "tower"
)
COLORS = words("red blue green yellow white black brown pink gray orange purple silver")
TRAITS = words(
    "brave kind quiet clever small happy sleepy proud gentle curious patient old young lucky "
    "hungry shy"
)
CITIES = words(
    "Paris Rome Oslo Cairo Lima Tokyo Berlin Madrid London Vienna Dublin Athens Delhi Seoul "
    "Boston Quito"
)
FOODS = words("apples pears plums eggs nuts figs cakes carrots beans lemons")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
ROOMS = words("kitchen bedroom hall office cellar attic bathroom")
ADJECTIVES = sorted({*COLORS, *TRAITS, "amber", "cold", "warm", "bright", "dark", "round", "tall"})
NOUNS = sorted({*ANIMALS, *THINGS, *PLACES})

ONSETS = words("b c d f g h j k l m n p r s t v w z br ch dr fl gr pl sh st th tr")
VOWELS = words("a e i o u a e i o ai ea oo")
CODAS = ["", "", "", *words("n r l s t m x ck nd rt")]


def rare(rng: Random, *, capital: bool = False) -> str:
    """A word nobody has seen, so that copying has to be copying: brundo, Theask, wal42."""
    parts = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
    word = "".join(parts) + rng.choice(CODAS)
    if not capital and rng.random() < 0.1:
        word += str(rng.randrange(10, 1000))
    return word.capitalize() if capital or rng.random() < 0.1 else word


def pick(rng: Random, pool: list[str], *, odd: float = 0.2) -> str:
    """A word of the pool, or now and then a rare one that looks like it."""
    word = rng.choice(pool)
    return rare(rng, capital=word[0].isupper()) if rng.random() < odd else word
