"""Settings of one served model: ``--additional-config '{"moet": {...}}'``, unknown keys refused.

What belongs to the machine (threads, instruction set) is in ``base.env``; what is here becomes part
of vLLM's config hash, and so of its compile cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from moet.base.errors import UsageError

SECTION = "moet"


class Arithmetic(StrEnum):
    """Who computes: the compiled kernels, or the reference in numpy (slow; the same bits)."""

    KERNELS = "kernels"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The section ``moet`` of vLLM's additional config.

    Attributes:
        arithmetic: ``kernels`` or ``reference``.
    """

    arithmetic: Arithmetic = Arithmetic.KERNELS


def read(additional_config: Any) -> EngineSettings:
    """The settings in a vLLM ``additional_config``; defaults where the section is absent.

    Raises:
        UsageError: an unknown key or value, or a section that is not an object.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        hint = """write --additional-config '{"moet": {"arithmetic": "kernels"}}'"""
        raise UsageError(f"additional_config.moet is {section!r}, not an object", hint=hint)
    known = {field.name for field in fields(EngineSettings)}
    if unknown := sorted(set(section) - known):
        hint = f"the settings are {', '.join(sorted(known))}"
        raise UsageError(f"unknown setting additional_config.moet.{unknown[0]}", hint=hint)
    try:
        return EngineSettings(arithmetic=Arithmetic(section.get("arithmetic", "kernels")))
    except ValueError as error:
        hint = f"it is one of {', '.join(Arithmetic)}"
        raise UsageError(f"additional_config.moet.arithmetic: {error}", hint=hint) from error
