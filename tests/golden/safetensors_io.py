"""Reads F32 and I32 tensors of a safetensors file with the standard library alone."""
import array
import json
import struct


def read(path):
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        code = {"F32": "f", "I32": "i"}[entry["dtype"]]
        values = array.array(code)
        first, end = entry["data_offsets"]
        values.frombytes(data[first:end])
        tensors[name] = (entry["shape"], values)
    return tensors
