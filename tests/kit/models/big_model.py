"""Tiny llamas that hold much memory where a test wants it: in their caches, or in their weights."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from shim.cli import tiny_model

HIDDEN, KV_HEADS, FLOAT32 = tiny_model.HIDDEN, 1, 4
# A cache outside a batch grows by so many tokens at a time, used or not.
STEP = 256
# The first tokens of the vocabulary: "!" to "~".
PRINTABLE = 94


def bytes_per_token(head_dim: int, layers: int = 1) -> int:
    """The bytes of one token in a cache of the model: its keys and its values in every layer."""
    return 2 * layers * KV_HEADS * head_dim * FLOAT32


def weight_bytes(feed_forward: int, layers: int = 1) -> int:
    """The bytes of the greater part of the weights."""
    return 3 * layers * feed_forward * HIDDEN * FLOAT32


def vocabulary_bytes(vocabulary: int) -> int:
    """The bytes of the embeddings, which the output uses too."""
    return vocabulary * HIDDEN * FLOAT32


def big_kv_model(
    path: Path,
    *,
    head_dim: int = 4096,
    layers: int = 1,
    feed_forward: int = 64,
    vocabulary: int = tiny_model.VOCABULARY,
) -> Path:
    """Write a llama in float32 whose cache takes `bytes_per_token(head_dim, layers)` a token.

    By default that is 32 KiB. Its tokens are bytes, those of tiny_model, and it says only printable
    ones, so a text tells its tokens. The cache of a request served alone grows in steps of 256
    tokens, 8 MiB by default. One that comes out of a batch has exactly its tokens. `feed_forward`
    makes the weights large, by `weight_bytes(feed_forward, layers)`. So does `vocabulary`, by
    `vocabulary_bytes(vocabulary)`, which costs almost no time.
    """
    shape = {"num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": KV_HEADS}
    tiny_model.make(
        path, **shape, head_dim=head_dim, intermediate_size=feed_forward, vocab_size=vocabulary
    )
    mx.random.seed(0)
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.{name}.weight": (HIDDEN,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"{at}.self_attn.{name}_proj.weight": (KV_HEADS * head_dim, HIDDEN) for name in "qkv"
        }
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, head_dim)
        shapes |= {
            f"{at}.mlp.{name}_proj.weight": (feed_forward, HIDDEN) for name in ("gate", "up")
        }
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, feed_forward)
    weights = {
        name: mx.ones(shape) if len(shape) == 1 else mx.random.normal(shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    # It attends to few tokens, and strongly. Otherwise it would repeat one text for every prompt.
    for layer in range(layers):
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"] *= 4
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 8
    # A row of zeros has the logit 0. The best of 94 others is above that.
    said = mx.arange(vocabulary)[:, None] < PRINTABLE
    weights["model.embed_tokens.weight"] = mx.where(said, weights["model.embed_tokens.weight"], 0)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path
