"""A tiny llama whose vocabulary is padded beyond that of its sentencepiece tokenizer.

It fails on command. mlx_lm loads it as the folder's `model_file`. config.json holds {"fault":
{"trigger": PATH}}. While the file PATH exists, it says in JSON what fails: {"where": "extract",
"nbytes" or "convert", "kind": the exception's name, "from": tokens}, for sequences of that many
tokens or more.
"""

import builtins
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import cache, llama
from transformers import PreTrainedTokenizerFast

# Tokens that are a character each. 256 is the end of text, and the tokens above it are padding.
ASCII = 128
trigger = Path("/nonexistent")


@dataclass
class ModelArgs(llama.ModelArgs):
    fault: dict = field(default_factory=dict)


def misbehave(where, tokens):
    if trigger.exists():
        fault = json.loads(trigger.read_text())
        if fault["where"] == where and tokens >= fault["from"]:
            raise getattr(builtins, fault["kind"])(f"{where} failed")


def convert_ids_to_tokens(
    self, ids, *args, stock=PreTrainedTokenizerFast.convert_ids_to_tokens, **kwargs
):
    # A list comes from top_logprobs. A tokenizer in Python may raise for an unknown id.
    if not isinstance(ids, int):
        misbehave("convert", float("inf"))
    return stock(self, ids, *args, **kwargs)


PreTrainedTokenizerFast.convert_ids_to_tokens = convert_ids_to_tokens


class Kept(cache.KVCache):
    @classmethod
    def merge(cls, caches):
        merged = cache.BatchKVCache.merge(caches)
        merged.__class__ = Batched
        return merged

    @property
    def nbytes(self):
        misbehave("nbytes", self.offset)
        return super().nbytes


class Batched(cache.BatchKVCache):
    def extract(self, idx):
        taken, kept = super().extract(idx), Kept()
        misbehave("extract", taken.offset)
        kept.__dict__.update(taken.__dict__)
        return kept


class Model(llama.Model):
    def __init__(self, args):
        global trigger
        super().__init__(args)
        trigger = Path(args.fault["trigger"])

    def make_cache(self):
        return [Kept() for _ in self.layers]

    def __call__(self, inputs, *args, **kwargs):
        # Long enough for requests to meet.
        time.sleep(0.005)
        logits = super().__call__(inputs, *args, **kwargs)
        # A logit_bias can lift a token above that.
        return mx.where(mx.arange(logits.shape[-1]) >= ASCII, -20, logits)
