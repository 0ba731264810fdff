"""Makes the tiny LoRA adapters of tests/fixtures/adapters with PEFT, and the logits of the models that PEFT merges.

    python3 -m venv oracle && oracle/bin/pip install torch transformers peft safetensors
    oracle/bin/python scripts/make_adapter_fixtures.py [NAME ...]

It needs torch, transformers and PEFT, which nothing else here does: the tests read the files that are checked in. Each
directory is one that `save_pretrained` has written, and `oracle.npz` beside its files:

    prompt    int32 [S]         token ids
    logits    float32 [S, V]    of `merge_and_unload`, at every position
    base      float32 [S, V]    of the model without the adapter
    versions  str               of torch, transformers and PEFT
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path("tests/fixtures")  # relative, since PEFT writes the path of the model into the config
NUM_TOKENS = 24
SIZE = 0.2  # of B, which PEFT begins with zeros

# The checkpoint among the fixtures, and the fields of LoraConfig.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_linear": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora": (
        "llama",
        {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    ),
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "expression": ("llama", {"r": 1, "lora_alpha": 2, "target_modules": r".*\.(k_proj|up_proj)"}),
    "one_layer": ("llama", {"r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"], "layers_to_transform": [1]}),
    "conv1d": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
}


def make(name: str) -> None:
    """Writes one directory anew."""
    base_name, fields = ADAPTERS[name]
    model = AutoModelForCausalLM.from_pretrained(str(FIXTURES / base_name), dtype=torch.float32).eval()
    torch.manual_seed(sum(name.encode()))
    prompt = torch.randint(3, model.config.vocab_size, (1, NUM_TOKENS))
    directory = FIXTURES / "adapters" / name
    shutil.rmtree(directory, ignore_errors=True)
    with torch.no_grad():
        base = model(prompt).logits[0]
        tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.1, **fields)).eval()
        for key, parameter in tuned.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=SIZE)
        tuned.save_pretrained(directory)
        logits = tuned.merge_and_unload()(prompt).logits[0]
    (directory / "README.md").unlink(missing_ok=True)
    np.savez_compressed(
        directory / "oracle.npz",
        prompt=prompt[0].numpy().astype(np.int32),
        logits=logits.numpy(),
        base=base.numpy(),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
    )
    print(directory, f"changes logits by {(logits - base).abs().max():.3f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ADAPTERS)}; none: all of them")
    names = parser.parse_args().names or [*ADAPTERS]
    os.chdir(ROOT)
    for name in names:
        make(name)


if __name__ == "__main__":
    main()
