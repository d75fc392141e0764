"""A tiny hybrid model on disk, for servers. It has linear attention and attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kit.harness import python_of
from shim.cli import tiny_model

# The line's own interpreter runs this: its mlx_lm knows the family.
_SAVE = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_flatten
sys.path.insert(0, sys.argv[1])
from kit import families
config = dict(families.FAMILIES[sys.argv[2]], **json.loads(sys.argv[4]))
families.FAMILIES[sys.argv[2]] = config
model = families.build(sys.argv[2])
weights = dict(tree_flatten(model.parameters()))
mx.save_safetensors(sys.argv[3] + "/model.safetensors", weights, {"format": "mlx"})
json.dump(config, open(sys.argv[3] + "/config.json", "w"))
"""


def make(line: str, folder: Path, family: str, **config: object) -> Path:
    """Write the family's tiny model into `folder`."""
    # For the tokenizer.
    tiny_model.make(folder)
    wanted = {
        "model_type": family,
        "vocab_size": tiny_model.VOCABULARY,
        "eos_token_id": tiny_model.VOCABULARY - 1,
    } | config
    here = str(Path(__file__).parents[2])
    arguments = [here, family, str(folder), json.dumps(wanted)]
    subprocess.run([python_of(line), "-c", _SAVE, *arguments], check=True, stdout=sys.stderr)
    return folder
