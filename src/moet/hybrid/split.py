"""Which experts of each layer get the slots of a card. Pure: same counts, same split, everywhere.

A split never changes an output bit, only how much of a step the card can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moet.base.errors import UsageError

Split = Mapping[int, tuple[int, ...]]
"""Layer -> its experts on the card, the hottest first."""


def choose(
    heat: Mapping[int, Sequence[int]] | None, slots: Mapping[int, int], experts: int
) -> Split:
    """The experts that were asked for most, layer by layer; of equals the lowest id.

    Args:
        heat: layer -> counts [experts]; None: nothing is known, all count the same.
        slots: layer -> how many of its experts the card holds, R.
        experts: of a layer, E.

    Raises:
        UsageError: more slots than experts, fewer than none, or counts of another shape.
    """
    return {layer: _hottest(heat, layer, wanted, experts) for layer, wanted in slots.items()}


def _hottest(
    heat: Mapping[int, Sequence[int]] | None, layer: int, wanted: int, experts: int
) -> tuple[int, ...]:
    if not 0 <= wanted <= experts:
        what = f"{wanted} slots for the {experts} experts of layer {layer}"
        raise UsageError(what, hint=f"a layer can have 0 to {experts} experts on the card")
    if heat is None:
        return tuple(range(wanted))
    counts = heat.get(layer, ())
    if len(counts) != experts:
        what = f"the heat of layer {layer} has {len(counts)} counts for {experts} experts"
        raise UsageError(what, hint="record the heat again with this model")
    order = sorted(range(experts), key=lambda expert: (-counts[expert], expert))
    return tuple(order[:wanted])
