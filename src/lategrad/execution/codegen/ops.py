"""The C expression of each supported torch operation, and the C functions that all loops share."""

import math
from pathlib import Path
from typing import Any

import torch

_aten = torch.ops.aten

_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "i64", torch.bool: "bool"}
MEMORY_TYPES = _TYPES | {torch.bfloat16: "bf16", torch.float16: "f16"}
VALUE_TYPES = _TYPES | {torch.bfloat16: "float", torch.float16: "float"}
"""C types of operands in memory, and of values in registers: half precision is computed in float."""

_SHAPES = ("alias", "clone", "detach", "expand", "lift_fresh_copy", "reshape", "unsqueeze", "view")
IDENTITY = {_aten._to_copy.default, _aten.squeeze.dim, *(getattr(_aten, name).default for name in _SHAPES)}
"""Operations that change nothing but the shape or the dtype."""

CONSTANT = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.ones_like.default: 1.0,
            _aten.scalar_tensor.default: 0, _aten.zeros_like.default: 0.0}  # fmt: skip
"""Operations with the same value everywhere: that value, or (an integer) its position among the arguments."""

_LERP = "{2} < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2})"
ARITHMETIC: dict[Any, str] = {
    _aten.add.Tensor: "{0} + {1}", _aten.sub.Tensor: "{0} - {1}", _aten.neg.default: "-{0}",
    _aten.rsub.Scalar: "{1} - {0}", _aten.rsub.Tensor: "{1} - {0}",
    _aten.mul.Tensor: "{0} * {1}", _aten.div.Tensor: "{0} / {1}", _aten.reciprocal.default: "1 / {0}",
    _aten.remainder.Scalar: "{0} - {1} * floor({0} / {1})", _aten.floor.default: "floor({0})",
    _aten.abs.default: "fabs({0})", _aten.sign.default: "({0} > 0) - ({0} < 0)",
    _aten.clamp_max.default: "{0} > {1} ? {1} : {0}", _aten.clamp_min.default: "{0} < {1} ? {1} : {0}",
    _aten.maximum.default: "{0} > {1} || {0} != {0} ? {0} : {1}",
    _aten.minimum.default: "{0} < {1} || {0} != {0} ? {0} : {1}",
    _aten.exp.default: "exp({0})", _aten.log.default: "log({0})",
    _aten.sqrt.default: "sqrt({0})", _aten.rsqrt.default: "1 / sqrt({0})",
    _aten.pow.Scalar: "pow({0}, {1})", _aten.pow.Tensor_Tensor: "pow({0}, {1})",
    _aten.lerp.Scalar: _LERP, _aten.lerp.Tensor: _LERP,
}  # fmt: skip
"""Expressions of arguments that are cast to the dtype of the result."""

LOGIC: dict[Any, str] = {_aten.bitwise_and.Tensor: "{0} && {1}", _aten.bitwise_not.default: "!{0}",
                         _aten.bitwise_or.Tensor: "{0} || {1}", _aten.logical_and.default: "{0} && {1}",
                         _aten.logical_not.default: "!{0}", _aten.logical_or.default: "{0} || {1}"}  # fmt: skip
for _name, _sign in {"eq": "==", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "ne": "!="}.items():
    LOGIC |= dict.fromkeys((getattr(_aten, _name).Scalar, getattr(_aten, _name).Tensor), f"{{0}} {_sign} {{1}}")
"""Expressions of arguments that are cast to their common dtype; the result is a bool."""


def literal(value: float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}LL"
    if math.isnan(value):
        return "0.0 / 0.0"
    return repr(value) if math.isfinite(value) else f"{math.copysign(1, value)} / 0.0"


def _header(name: str) -> str:
    """A C++ header beside this file, with the one that both include in its place: it is compiled as one text."""
    header, common = (Path(__file__).with_name(file).read_text(encoding="utf-8") for file in (name, "common.h"))
    return header.replace('#include "common.h"\n', common)


CPU_HEADER, CUDA_HEADER = _header("cpu.h"), _header("cuda.h")
