"""moet: Mixture-of-Experts models that do not fit on your card, served bit for bit.

The rooms, top to bottom (imports only ever go down): ``cli``, ``engine`` / ``bench`` / ``verify``,
``hybrid``, ``tiers`` / ``kernels``, ``pack``, ``machine``, ``checkpoint``, ``formats``, ``base``.
See ``docs/house.md``.
"""

from importlib.metadata import version as _version

__version__ = _version("moet")
