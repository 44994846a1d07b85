"""The vocabulary of moet-tiny's world."""

from __future__ import annotations


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
