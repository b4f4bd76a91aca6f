"""What the elements must do, from outside: ml_dtypes' decoders, written tables, and nearest-with-ties over sorted values."""

import ml_dtypes
import numpy as np

TYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16",
    )
} | {"int8": np.dtype("int8"), "uint8": np.dtype("uint8"), "float16": np.dtype("float16")}  # fmt: skip

SMALL_FLOATS = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2")
FLOATS = (*SMALL_FLOATS, "float16", "bfloat16")
WIDTH = {
    "int2": 2, "int4": 4, "int8": 8, "uint2": 2, "uint4": 4, "uint8": 8, "float4_e2m1fn": 4, "float6_e2m3fn": 6,
    "float6_e3m2fn": 6, "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float16": 16, "bfloat16": 16,
}  # fmt: skip


def decoded(name):
    """Every code's value as float32, by ml_dtypes or numpy."""
    codes = np.arange(2 ** WIDTH[name])
    stored = codes.astype(np.uint8) if WIDTH[name] <= 8 else codes.astype(np.uint16)
    with np.errstate(invalid="ignore"):
        return stored.view(TYPES[name]).astype(np.float32)


def positive_values(name):
    """(values, codes) of all finite codes without sign, ascending; codes are then 0, 1, 2, ..."""
    values = decoded(name)[: 2 ** (WIDTH[name] - 1)]
    return values[np.isfinite(values)].astype(np.float64)


def nearest_code(name, x):
    """Nearest code to float32 x, ties to even, saturating; by distances in float64. x must hold no NaN."""
    values = positive_values(name)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    lower = upper - 1
    below, above = magnitude - values[lower], values[upper] - magnitude
    tie = np.where(lower % 2 == 0, lower, upper)
    code = np.where(below < above, lower, np.where(above < below, upper, tie))
    return code | (np.signbit(x).astype(np.int64) << (WIDTH[name] - 1))


def probes(name):
    """Every value, every midpoint, the float32 neighbours of both, the range's ends, tiny numbers, infinity; both signs."""
    values = positive_values(name)
    middles = (values[:-1] + values[1:]) / 2
    top = values[-1]
    spread = np.concatenate([values, middles, [top * 1.01, top + (top - values[-2]) / 2, top * 2, np.inf]])
    with np.errstate(over="ignore"):
        spread = spread.astype(np.float32)
    near = [spread, np.nextafter(spread, np.float32(np.inf)), np.nextafter(spread, np.float32(-np.inf))]
    tiny = np.array([2**-149, 2**-126, np.nextafter(np.float32(2**-126), np.float32(0)), 2**-130, 3e38], np.float32)
    every = np.abs(np.concatenate([*near, tiny])).astype(np.float32)
    return np.concatenate([every, -every])
