"""What the kernels are launched with: `device/layout.cuh` field by field, as ctypes structures."""

from __future__ import annotations

import ctypes
from typing import Final

_P: Final = ctypes.c_uint64  # a device address
_U: Final = ctypes.c_uint32
_F: Final = ctypes.c_float


class QuantiseParams(ctypes.Structure):
    """x -> quantised rows."""

    _fields_ = [
        ("x", _P),
        ("rows", _P),
        ("x_type", _U),
        ("tokens", _U),
        ("hidden", _U),
        ("groups", _U),
        ("act", _U),
    ]


class StageParams(ctypes.Structure):
    """Gate and up, or down, over all experts of a step."""

    _fields_ = [
        ("table", _P),
        ("ids", _P),
        ("in_rows", _P),
        ("out", _P),
        ("routings", _U),
        ("experts", _U),
        ("in_divisor", _U),
        ("blocks", _U),
        ("section", _U),
        ("pairs", _U),
        ("out_size", _U),
        ("bias", _U),
        ("second_bias", _U),
        ("gate", _U),
        ("limit", _F),
        ("depth", _U),
        ("sum_columns", _U),
    ]


class CombineParams(ctypes.Structure):
    """Rows -> the layer's output."""

    _fields_ = [
        ("table", _P),
        ("ids", _P),
        ("weights", _P),
        ("rows", _P),
        ("out", _P),
        ("status", _P),
        ("tokens", _U),
        ("top_k", _U),
        ("experts", _U),
        ("hidden", _U),
        ("out_type", _U),
        ("has_scale", _U),
        ("scale", _F),
        ("elsewhere", _U),
        ("host_rows", _P),
        ("failed", _P),
        ("host_bf16", _U),
    ]


class PostParams(ctypes.Structure):
    """x and ids of the tokens that need the CPU -> host memory."""

    _fields_ = [
        ("table", _P),
        ("ids", _P),
        ("x", _P),
        ("page", _P),
        ("mail_x", _P),
        ("mail_ids", _P),
        ("state", _P),
        ("tokens", _U),
        ("top_k", _U),
        ("experts", _U),
        ("row_bytes", _U),
        ("layer", _U),
        ("x_type", _U),
    ]


class WaitParams(ctypes.Structure):
    """Until the rows are there."""

    _fields_ = [
        ("page", _P),
        ("state", _P),
        ("patience_ns", ctypes.c_uint64),
        ("early", _U),
    ]


class MailState(ctypes.Structure):
    """The card's own count of posts, in device memory."""

    _fields_ = [
        ("sequence", ctypes.c_uint64),
        ("arrived", _U),
        ("working", _U),
        ("waits", _U),
        ("failed", _U),
    ]


Params = QuantiseParams | StageParams | CombineParams | PostParams | WaitParams
