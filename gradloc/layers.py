# Copyright 2026 The GradLoc Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Which layer a parameter belongs to."""

import re

# What FSDP1, activation checkpointing, torch.compile and LoRA insert into parameter names.
_WRAPPERS = re.compile(r"\b(?:_(?:fsdp|checkpoint)_wrapped_module|_orig_mod|base_model\.model|base_layer)\.")
_LORA = re.compile(r"\.(?:lora_|modules_to_save\b|original_module\b).*")
_MODEL = re.compile(r"^(?:(?:model|transformer|language_model|decoder|module)\.)+")


def layer_name(parameter_name: str) -> str:
    """The layer group of a parameter: "embed_tokens", "layers.3", "norm", "lm_head", "visual.blocks.0", ….

    Everything in a numbered block is one group. Any other parameter belongs to the module that owns it, so that none is
    left out in a model with unusual names.

    Args:
        parameter_name (str): The name as `named_parameters()` gives it; wrappers in it are ignored.
    """
    parts = _MODEL.sub("", _WRAPPERS.sub("", parameter_name)).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    name = _LORA.sub("", ".".join(parts))
    return name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
