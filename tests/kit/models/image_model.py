"""A tiny llama that takes images, as a folder's `model_file`. Its text depends on every pixel.

It also replaces Pillow, which mlx_lm does not require: an image is four bytes, of which three are
its colour. With "!" as the fourth it is a large one.
"""

import sys
import types

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache, llama

ModelArgs = llama.ModelArgs


class Picture:
    def __init__(self, pixels):
        self.pixels = pixels

    @property
    def size(self):
        return self.pixels.shape[1], self.pixels.shape[0]

    def __array__(self, dtype=None, copy=None):
        return np.array(self.pixels, dtype=dtype)

    def convert(self, mode):
        return self

    def resize(self, size, resample=None):
        return Picture(np.broadcast_to(self.pixels[:1, :1], (size[1], size[0], 3)))


def read(file):
    data = file.read()
    if len(data) != 4:
        raise OSError("cannot identify image file")
    pixels = np.frombuffer(data[:3], np.uint8).reshape(1, 1, 3)
    return Picture(np.broadcast_to(pixels, (8000, 8001, 3)) if data[3:] == b"!" else pixels)


class Model(llama.Model):
    def make_cache(self):
        # Not earlier: transformers looks for Pillow, and would need all of it.
        sys.modules["PIL"] = types.SimpleNamespace(
            Image=types.SimpleNamespace(
                open=read,
                fromarray=Picture,
                Resampling=types.SimpleNamespace(LANCZOS=1),
                __name__="PIL.Image",
            )
        )
        return [cache.KVCache() for _ in self.layers]

    def embed_inputs(self, inputs, *, pixel_values=None):
        rows = self.model.embed_tokens(inputs)
        for number, pixels in enumerate(pixel_values or [], 1):
            weight = (pixels.reshape(-1) * mx.arange(1, pixels.size + 1)).sum() * number
            rows = rows + mx.sin(mx.arange(rows.shape[-1]) * weight)
        return rows
