"""A tiny random llama with a byte-level tokenizer, to try a server without a download.

It takes about a second to make. Its answers are noise, but it is a real model: the server loads,
batches, caches and streams it like any other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 2, 64, 4, 2, 128, 257
EOS = "<|endoftext|>"
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def find_or_make() -> Path:
    """The folder of the tiny model in the user's cache, made if it is not there. Raises OSError."""
    folder = _cache_folder() / "tiny-llama-1"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            make(Path(scratch) / "model")
            try:
                # Whole or not at all. Another process may have been faster: its model will do.
                os.rename(Path(scratch) / "model", folder)
            except OSError:
                if not (folder / "config.json").exists():
                    raise
    return folder


def make(folder: Path, **config: Any) -> Path:
    """Write the model into `folder`. `config` adds or replaces entries of config.json.

    A `vocab_size` above that of the tokenizer pads the vocabulary, as many models do.
    """
    folder.mkdir(parents=True)
    _write_weights(folder / "model.safetensors", config.get("vocab_size", VOCABULARY))
    _write_tokenizer(folder)
    shape = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "eos_token_id": VOCABULARY - 1,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(shape | config, indent=1))
    return folder


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-lm-shim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-lm-shim"


def _write_weights(path: Path, vocabulary: int) -> None:
    import mlx.core as mx

    mx.random.seed(0)
    key_value = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (key_value, HIDDEN),
                "self_attn.v_proj": (key_value, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
                "mlp.up_proj": (FEED_FORWARD, HIDDEN),
                "mlp.down_proj": (HIDDEN, FEED_FORWARD),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    weights = {
        name: mx.ones(shape) if len(shape) == 1 else mx.random.normal(shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each byte, and one for the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
