"""What the commands that need a GPU share: opening one, and which ways to wait are tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moet.base import env
from moet.base.errors import UsageError
from moet.cli import console, lists

if TYPE_CHECKING:
    from moet.hybrid.mailbox import Variant
    from moet.kernels.cpu import Pool
    from moet.kernels.cuda.opened import OpenedCard
    from moet.kernels.spec import LayerSpec


@contextmanager
def opened(device: int) -> Iterator[tuple[OpenedCard, Pool]]:
    """The GPU and the CPU's workers: as many as the settings say, or all cores but the one that
    launches, since workers poll while a step is in flight."""
    from moet.kernels.cpu import Pool
    from moet.kernels.cuda import opened as cuda
    from moet.machine.cpu import usable_threads

    settings = env.read()
    with cuda.opened_card(settings.cache_dir, device) as card:
        yield card, Pool(settings.threads or max(1, usable_threads() - 1))


def variants(text: str, card: OpenedCard, pool: Pool) -> tuple[Variant, ...]:
    """Ways to wait: ``auto`` is MOET_MAILBOX or the first that works, ``all`` that one and the
    others that work, else a list; one of a list that does not work is an error.

    Raises:
        UsageError: there is no such way.
        MachineError: it does not work here.
    """
    from moet.hybrid import probe
    from moet.hybrid.mailbox import Variant

    if text in {probe.AUTO, "all"}:
        chosen = probe.choose(card.gpu, card.link, pool, env.read().mailbox)
        if text == probe.AUTO:
            return (chosen,)
        others = [probe.probe(card.gpu, card.link, pool, v) for v in Variant if v is not chosen]
        for result in others:
            if result.fault:
                console.say(f"{result.variant} does not work here: {result.fault}")
        return (chosen, *(result.variant for result in others if not result.fault))
    names = lists.words("--variants", text, "--variants poll,memop")
    if unknown := [name for name in names if name not in set(Variant)]:
        hint = f"auto, all, or some of {', '.join(Variant)}"
        raise UsageError(f"--variants {unknown[0]!r} is no way to wait", hint=hint)
    return tuple(probe.choose(card.gpu, card.link, pool, name) for name in names)


def presets() -> dict[str, LayerSpec]:
    """Layers of real models by name."""
    from moet.bench import moe_gpu

    return {"v4.1-flash": moe_gpu.V41_FLASH, "v4-flash": moe_gpu.V4_FLASH}


def preset(name: str) -> LayerSpec:
    """A layer by name.

    Raises:
        UsageError: there is no such one.
    """
    known = presets()
    if name not in known:
        raise UsageError(f"there is no layer {name!r}", hint=f"one of {', '.join(known)}")
    return known[name]
