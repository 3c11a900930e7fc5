"""safetensors files and number formats with nothing but the standard library.

A tensor is (dtype, shape, values): values are Python numbers for F64, F32, I32 and I64, raw integers
for the others (U8, U16, BF16, F8_E4M3, ...). Written from the formats' definitions, so that it shares
no code with what it tests.
"""
import json
import math
import struct

CODES = {"F64": "d", "F32": "f", "I32": "i", "I64": "q", "U8": "B", "U16": "H", "BF16": "H",
         "F16": "H", "F8_E4M3": "B", "F8_E5M2": "B", "BOOL": "B"}


def size(shape):
    return math.prod(shape)


def write(path, tensors, metadata=None):
    header = {}
    data = b""
    # Largest elements first, so that everything is aligned.
    order = sorted(tensors, key=lambda name: -struct.calcsize(CODES[tensors[name][0]]))
    for name in order:
        dtype, shape, values = tensors[name]
        assert len(values) == size(shape), (name, len(values), shape)
        raw = struct.pack("<%d%s" % (len(values), CODES[dtype]), *values)
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    if metadata:
        header["__metadata__"] = {key: str(value) for key, value in metadata.items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    with open(path, "rb") as file:
        blob = file.read()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        code = CODES[entry["dtype"]]
        count = size(entry["shape"])
        raw = blob[8 + length + first:8 + length + last]
        tensors[name] = (entry["dtype"], entry["shape"],
                         list(struct.unpack("<%d%s" % (count, code), raw)))
    return tensors, metadata


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def e4m3_value(bits):
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 0:
        return sign * mantissa * 2.0 ** -9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_bits(x):
    """The nearest value, ties to the even code; saturates."""
    magnitude = min(abs(x), 448.0)
    best = min(range(0x7f), key=lambda b: (abs(e4m3_value(b) - magnitude), b & 1))
    return best | (0x80 if math.copysign(1.0, x) < 0 else 0)
