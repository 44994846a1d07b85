"""Random tensors at the speed of memcpy, the same for the same seed.

Random numbers cost far more than a disk write. So a pool of values is drawn once per kind, and a
tensor is a row of runs, each copied from a place in the pool that a hash of (tensor, run) picks. A
run of MXFP4 codes and the run of their scale bytes come from the same blocks of the pool.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moet.checkpoint.writer import U8, ArraySource, TensorPlan
from moet.formats import mxfp4

POOL_BLOCKS = 1 << 16
RUN_BLOCKS = 1 << 11
_FLOAT_POOL = 1 << 20  # values
_FLOAT_RUN = 1 << 14
_MASK = 2**64 - 1
_E4M3_MAX = 448.0


def key_of(seed: int, name: str) -> int:
    """64 bits that stand for one tensor of one seed."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix(x: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): 64 bits to 64 well-mixed bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class PoolSource:
    """Runs out of a pool (see the module).

    Attributes:
        pool: the values, then a copy of its first run, so that no run wraps.
        unit: bytes of what must not be cut: an element, or the codes of a block.
        run: units in a run.
        key: which tensor.
    """

    pool: U8
    unit: int
    run: int
    key: int

    def fill(self, out: U8, offset: int) -> None:
        """See ``writer.Source``."""
        run_bytes = self.run * self.unit
        starts = self.pool.size // self.unit - self.run
        done = 0
        while done < out.size:
            j, inside = divmod(offset + done, run_bytes)
            count = min(run_bytes - inside, out.size - done)
            start = mix(self.key + j) % starts * self.unit + inside
            out[done : done + count] = self.pool[start : start + count]
            done += count


def _extended(pool: NDArray[np.generic], run: int) -> U8:
    flat = np.ascontiguousarray(pool)
    extended: U8 = np.concatenate([flat, flat[:run]]).view(np.uint8).reshape(-1)
    return extended


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """fp32 to bf16 bits, round to nearest even; finite values only."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _e4m3_values() -> NDArray[np.float32]:
    """The magnitudes of E4M3 codes 0..126; 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


def to_e4m3(x: NDArray[np.float32]) -> U8:
    """fp32 to the nearest E4M3 byte, clipped to 448."""
    values = _e4m3_values()
    middles = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middles, np.minimum(np.abs(x), _E4M3_MAX)).astype(np.uint8)
    signed: U8 = code | (np.signbit(x).astype(np.uint8) << np.uint8(7))
    return signed


@dataclass(frozen=True)
class Draw:
    """Makes the tensors of one seed."""

    seed: int

    @lru_cache(maxsize=64)  # noqa: B019 - a Draw lives as long as its pools are wanted
    def _normal(self, name: str, count: int) -> NDArray[np.float32]:
        rng = np.random.Generator(np.random.SFC64(key_of(self.seed, f"pool/{name}")))
        return rng.standard_normal(count, dtype=np.float32)

    @lru_cache(maxsize=64)  # noqa: B019
    def _mxfp4_pool(self, std: float) -> tuple[U8, U8]:
        weights = self._normal("mxfp4", POOL_BLOCKS * mxfp4.BLOCK) * np.float32(std)
        codes, scales = mxfp4.quantise(weights.reshape(POOL_BLOCKS, mxfp4.BLOCK))
        return _extended(codes, RUN_BLOCKS), _extended(scales.reshape(-1), RUN_BLOCKS)

    @lru_cache(maxsize=64)  # noqa: B019
    def _float_pool(self, dtype: str, std: float) -> U8:
        values = self._normal("float", _FLOAT_POOL) * np.float32(std)
        cast = {"BF16": to_bf16, "F32": lambda x: x, "F8_E4M3": to_e4m3}[dtype]
        return _extended(cast(values), _FLOAT_RUN)

    def mxfp4(
        self, key: str, names: tuple[str, str], shapes: tuple[tuple[int, ...], ...], std: float
    ) -> list[TensorPlan]:
        """Codes (U8) and scale bytes (U8) of Gaussian weights with standard deviation ``std``.

        Args:
            key: what the pair is called; the same key gives the same blocks.
            names: of codes and scales.
            shapes: of codes (16 bytes a block) and of scales (one byte a block).
            std: standard deviation of the weights.
        """
        codes, scales = self._mxfp4_pool(std)
        number = key_of(self.seed, key)
        sources = (
            PoolSource(codes, mxfp4.BLOCK_BYTES, RUN_BLOCKS, number),
            PoolSource(scales, 1, RUN_BLOCKS, number),
        )
        return [TensorPlan(names[i], "U8", shapes[i], sources[i]) for i in range(2)]

    def gaussian(
        self, name: str, shape: tuple[int, ...], std: float, dtype: str = "BF16"
    ) -> TensorPlan:
        """N(0, std^2)."""
        item = {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        source = PoolSource(self._float_pool(dtype, std), item, _FLOAT_RUN, key_of(self.seed, name))
        return TensorPlan(name, dtype, shape, source)


@dataclass(frozen=True)
class ConstantSource:
    """One element over and over."""

    element: bytes

    def fill(self, out: U8, offset: int) -> None:
        """See ``writer.Source``; ``offset`` and ``out.size`` are multiples of the element."""
        out.reshape(-1, len(self.element))[:] = np.frombuffer(self.element, np.uint8)


def constant(name: str, shape: tuple[int, ...], value: float, dtype: str = "BF16") -> TensorPlan:
    """The same value everywhere."""
    single = np.array([value], np.float32)
    element = to_bf16(single).tobytes() if dtype == "BF16" else single.tobytes()
    return TensorPlan(name, dtype, shape, ConstantSource(element))


def scale_byte(name: str, shape: tuple[int, ...], byte: int) -> TensorPlan:
    """E8M0 scales, all alike."""
    return TensorPlan(name, "F8_E8M0", shape, ConstantSource(bytes([byte])))


def stored(name: str, dtype: str, array: NDArray[np.generic]) -> TensorPlan:
    """A tensor that is in memory; for BF16 give the bits as uint16."""
    return TensorPlan(name, dtype, array.shape, ArraySource(array))
