"""Makes narrowgate/conformance/golden.json: stored bytes of each format beside their values, by outside decoders alone.

Bytes are written by hand or come from a public text; values come from ml_dtypes, numpy and the gguf package. What quantizers must
store comes from the gguf package and from the tests' own oracle (tests/quantize/scheme_oracle.py: exact fractions and ml_dtypes).
It imports nothing of the package narrowgate, so what it says about a format is no echo of ours. Run: python lab/golden.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as G
from gguf.quants import dequantize, quantize

ROOT = Path(__file__).parents[1]
OUT = ROOT / "narrowgate" / "conformance" / "golden.json"


def number(x: float) -> float | str:
    if np.isnan(x):
        return "nan"
    if np.isinf(x) or (x == 0 and np.signbit(x)):
        return str(float(x))
    return float(x)


def entry(name, element, layout, shape, data, values, *, scales=(), source, rivals=None, ggml=None):
    values = np.asarray(values, np.float32).reshape(shape)
    record = {
        "name": name, "element": element, "layout": layout, "shape": list(shape), "data": data,
        "scales": [dict(zip(("element", "block", "layout", "data"), s, strict=True)) for s in scales],
        "values": [number(v) for v in values.ravel()], "source": source,
    }  # fmt: skip
    if ggml:
        record["ggml"] = ggml
    record["rivals"] = {k: [number(v) for v in np.asarray(r, np.float32).ravel()] for k, r in (rivals or {}).items()}
    return record


def small(codes, dtype):
    return np.array(codes, np.uint8).view(dtype).astype(np.float32)


def fp6(codes):
    """Four codes in three bytes: a 24-bit number, lowest code first."""
    lanes = [codes[i] | codes[i + 1] << 6 | codes[i + 2] << 12 | codes[i + 3] << 18 for i in range(0, len(codes), 4)]
    return b"".join(lane.to_bytes(3, "little") for lane in lanes).hex()


def words() -> list[dict]:
    e2m1 = small(range(16), ml_dtypes.float4_e2m1fn)
    four = [*range(8), *range(-8, 0)]
    hand = "by hand"
    return [
        entry("int4 words", "int4", "words@1", (2, 8), "1032547698badcfe", four, source=hand,
              rivals={"high field first": np.array(four).reshape(-1, 2)[:, ::-1], "zero-extended": range(16)}),
        entry("int8 words", "int8", "words@1", (1, 8), "808182837f7e0100", [-128, -127, -126, -125, 127, 126, 1, 0], source=hand,
              rivals={"bytes swapped": [-125, -126, -127, -128, 0, 1, 126, 127]}),
        entry("int2 words", "int2", "words@1", (1, 16), "4e4e4e4e", [-2, -1, 0, 1] * 4, source=hand,
              rivals={"high field first": [1, 0, -1, -2] * 4}),
        entry("E2M1 words", "float4_e2m1fn", "words@1", (1, 16), "1032547698badcfe", e2m1, source="ml_dtypes",
              rivals={"signed nibble": four}),
    ]  # fmt: skip


E3M2 = [
    60,
    60,
    59,
    58,
    58,
    58,
    57,
    56,
    56,
    55,
    54,
    53,
    52,
    50,
    48,
    44,
    0,
    12,
    16,
    18,
    20,
    21,
    22,
    23,
    24,
    24,
    25,
    26,
    26,
    26,
    27,
    28,
]
E2M3 = [*range(56, 48, -1), 48, 46, 44, 42, 40, 38, 36, 34, 0, 2, 4, 6, 8, 10, 12, 14, *range(16, 24)]


def microscaling() -> list[dict]:
    e3m2, e2m3 = small(E3M2, ml_dtypes.float6_e3m2fn) / 4, small(E2M3, ml_dtypes.float6_e2m3fn)
    nibbles = [(5 * i + 3) % 16 for i in range(64)]
    fp4 = "".join(f"{nibbles[i] | nibbles[i + 1] << 4:02x}" for i in range(0, 64, 2))
    mx = small(nibbles, ml_dtypes.float4_e2m1fn).reshape(2, 32) * np.array([[2.0**-127], [2.0**2]])
    every = np.arange(256, dtype=np.uint8)
    half = np.float32(0.5)
    s4 = np.array([0x01, 0x38, 0x7E, 0x08], np.uint8)
    nv = small(nibbles, ml_dtypes.float4_e2m1fn).reshape(4, 16)
    nv = nv * s4.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None] * np.float32(0.3)
    reference = "bytes of the specification, values by ml_dtypes"
    return [
        entry("MXFP6 E3M2 block", "float6_e3m2fn", "fp6_bytes@1", (1, 32), fp6(E3M2), e3m2, source=reference,
              scales=[("float8_e8m0fnu", [1, 32], "rows@1", "7d")], rivals={"bias 1": e3m2 * 4}),
        entry("MXFP6 E2M3 block", "float6_e2m3fn", "fp6_bytes@1", (1, 32), fp6(E2M3), e2m3, source=reference,
              scales=[("float8_e8m0fnu", [1, 32], "rows@1", "7f")], rivals={"bias 3": e2m3 / 4}),
        entry("MXFP4 blocks", "float4_e2m1fn", "words@1", (2, 32), fp4, mx, source="ml_dtypes",
              scales=[("float8_e8m0fnu", [1, 32], "rows@1", "0081")], rivals={"code 0 as zero": mx * [[0], [1]]}),
        entry("NVFP4 blocks", "float4_e2m1fn", "words@1", (4, 16), fp4, nv, source="ml_dtypes",
              scales=[("float8_e4m3fn", [1, 16], "rows@1", s4.tobytes().hex()),
                      ("float32", [4, 16], "rows@1", np.float32(0.3).tobytes().hex())],
              rivals={"E4M3 subnormal as a normal": nv * [[0.0087890625 * 512], [1], [1], [1]], "global omitted": nv / 0.3}),
        entry("E4M3, every code", "float8_e4m3fn", "bytes@1", (1, 256), every.tobytes().hex(),
              every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * half, source="ml_dtypes",
              scales=[("float8_e8m0fnu", [1, 256], "rows@1", "7e")],
              rivals={"E5M2": every.view(ml_dtypes.float8_e5m2).astype(np.float32) * half}),
        entry("E5M2, every code", "float8_e5m2", "bytes@1", (1, 256), every.tobytes().hex(),
              every.view(ml_dtypes.float8_e5m2).astype(np.float32), source="ml_dtypes",
              rivals={"E4M3": every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)}),
        entry("E8M0, every byte", "float8_e8m0fnu", "bytes@1", (1, 256), every.tobytes().hex(),
              np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan), source="numpy ldexp",
              rivals={"byte 0 as zero": np.append(np.ldexp(1.0, np.arange(255) - 127) * (np.arange(255) > 0), np.nan)}),
    ]  # fmt: skip


def ggml() -> list[dict]:
    rng = np.random.default_rng(5)
    found = []
    for name, kind, element, head, size in (
        ("q8_0", G.Q8_0, "int8", 2, 34), ("q4_0", G.Q4_0, "uint4", 2, 18), ("iq4_nl", G.IQ4_NL, "index4", 2, 18),
        ("mxfp4", G.MXFP4, "float4_e2m1fn", 1, 17),
    ):  # fmt: skip
        blocks = rng.integers(0, 256, (2, size), dtype=np.uint8)
        scale = [[0x3C, 0x01], [0xCD, 0xB5]] if head == 2 else [[0x79], [0x83]]  # small ends first: 2^-14ish and -.36
        if name == "mxfp4":  # gguf decodes code 8 to +0, which is -0 in E2M1: it stays out of these bytes
            low, high = blocks & 15, blocks >> 4
            blocks = np.where(low == 8, 9, low) | np.where(high == 8, 9, high) << 4
        blocks[:, :head] = scale
        values = dequantize(blocks, kind)
        pairs = values.reshape(2, 2, 16).transpose(0, 2, 1).reshape(2, 32)
        rivals = {} if name == "q8_0" else {"neighbours for halves": pairs}
        rivals["the other block's scale"] = (
            values * values[::-1, :1] / values[:, :1] if (values[:, 0] != 0).all() else values * 2
        )
        found.append(entry(f"ggml {name} blocks", element, "words@1", (2, 32), blocks.tobytes().hex(), values,
                           source="the gguf package", ggml=name, rivals=rivals))  # fmt: skip
    return found


def hard_rows() -> np.ndarray:
    """Normal rows, one heavy-tailed, one tiny, one huge, one with a zero block, one of exact ties, one of one value, signed zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((9, 96)).astype(np.float32)
    x[1] = rng.standard_t(2, 96)
    x[2] *= np.float32(1e-38)
    x[3] *= np.float32(1e4)
    x[4, :32] = 0
    x[5] = np.resize([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0], 96)
    x[6] = 3.0
    x[7] = np.resize([7.5, -7.5, 0.0, -0.0], 96)
    return x


def tensor(name: str, values: np.ndarray) -> dict:
    """Stored numbers of one tensor: signed, as torch holds them."""
    values = np.ascontiguousarray(values)
    return {"name": name, "dtype": str(values.dtype), "shape": list(values.shape), "data": values.tobytes().hex()}


def stored_by(x: np.ndarray, scheme: str, rule: str | None = None) -> dict:
    """What quantizing x must store, codes one a byte."""
    sys.path.insert(0, str(ROOT / "tests" / "quantize"))
    import scheme_oracle as oracle

    codes, scales = oracle.reference(x, scheme, rule)
    kinds = {
        "int4": np.int16,
        "int8_g32": np.int16,
        "int2": np.int16,
        "iq4": np.int16,
        "nf4": np.int32,
        "int8_channel": np.int32,
    }
    kind = next((k for start, k in kinds.items() if scheme.startswith(start)), np.uint8)
    tensors = [tensor("codes", codes.astype(np.uint8)), tensor("scales", scales.astype(np.int64).astype(kind))]
    if scheme == "nvfp4":
        tensors.append(tensor("outer", (np.abs(x).max() / np.float32(2688)).reshape(1, 1).view(np.int32)))
    table = {"nf4_g64": oracle.NF4, "iq4_nl": oracle.IQ4}.get(scheme)
    if table is not None:
        tensors.append(tensor("codebook", table.view(np.int32)))
    return {"scheme": scheme, "rule": rule, "source": "tests/quantize/scheme_oracle.py", "tensors": tensors}


def stored_by_gguf(x: np.ndarray, scheme: str, kind: G) -> dict:
    blocks = quantize(x, kind).reshape(9, 3, -1)
    scales, codes = blocks[..., :2].copy().view(np.int16)[..., 0], blocks[..., 2:]
    if scheme == "q4_0":
        codes = np.concatenate([codes & 15, codes >> 4], -1)
    tensors = [tensor("codes", codes.reshape(9, 96)), tensor("scales", scales)]
    if scheme == "q4_0":
        tensors.append(tensor("zero_points", np.full((1, 1), 8, np.uint8)))
    return {"scheme": scheme, "rule": None, "source": "the gguf package", "tensors": tensors}


def encoded(x: np.ndarray) -> list[dict]:
    mx = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")
    plain = (*mx, "nvfp4", "int4_g32", "int4_g64", "int4_g128", "int8_g32", "int2_g32", "int8_channel", "nf4_g64", "iq4_nl")
    found = [stored_by(x, scheme) for scheme in plain]
    found += [stored_by(x, scheme, rule) for scheme in mx for rule in ("floor", "even", "mse")]
    return [*found, stored_by_gguf(x, "q8_0", G.Q8_0), stored_by_gguf(x, "q4_0", G.Q4_0)]


def main() -> None:
    x = hard_rows()
    parts = {"decode": [*words(), *microscaling(), *ggml()], "encode": encoded(x)}
    lines = [f' "{part}": [\n' + ",\n".join("  " + json.dumps(e) for e in entries) + "\n ]" for part, entries in parts.items()]
    lines.insert(1, f' "x": {json.dumps(tensor("x", x))}')
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
