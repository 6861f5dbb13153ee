# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the model of a bundle, and refuses another. It needs transformers."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..bundles import limits
from ..bundles.layout import Row
from ..layers.reduced_norms import layers_by_parameter
from ..tools.command_line import say
from ..tools.figures import visible
from ..tools.opening import Bundle
from .folders import is_whole, safe_adapter, safe_model, unread
from .memory import is_out_of_memory

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
FLASH = "flash_attention_2"
ATTENTIONS = ("eager", "sdpa", FLASH)
HALF = ("bfloat16", "float16")

_HUB_SECONDS = 10.0
# Settings that must be equal in the two configurations.
_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class CannotReplayError(ValueError):
    """Why a bundle cannot be replayed or searched here, in one sentence."""


@dataclass(frozen=True)
class Variant:
    """One way of computing."""

    dtype: str  # a key of `DTYPES`
    attention: str  # transformers' name for an implementation of attention

    def __str__(self) -> str:
        return f"{self.dtype}, {self.attention}"


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    path: str  # where it is from
    variant: Variant  # what it computes in
    module: nn.Module  # in evaluation mode: a replay cannot repeat dropout
    layer_of: dict[nn.Parameter, str]  # that of each parameter that is trained
    device: torch.device
    # A backward's gradients are multiplied by training's scale: half precision would lose small ones without it.
    loss_scale: float
    notes: list[str]  # what a replay with it cannot repeat

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.variant.dtype]


def device_kind(asked: str | None) -> str:
    """The kind of device to compute on: the one asked for, or cuda where there is one.

    Raises:
        CannotReplayError: It is not here.
    """
    kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotReplayError("There is no CUDA device here: take --device cpu.")
    return kind


def model_path(bundle: Bundle, given: str | None, trust_remote_code: bool) -> str:
    """The path of the model: the one that was given, or the bundle's own if that is a folder here.

    A bundle may come from a stranger. So a name in it is never looked up on a hub, a folder that may have come with it
    is not taken, and no code of a folder that it alone names is run.

    Args:
        given (str, optional): A folder, or a name on the hub.
        trust_remote_code (bool): Whether the model's own code may run.

    Raises:
        CannotReplayError: There is no such model; or none was given, and the bundle's cannot be taken.
    """
    if given is not None:
        return find_model(given)
    path = bundle.manifest["model"].get("path")
    named = f"The bundle's model is {path!r}, which is"
    if not isinstance(path, str) or not os.path.isfile(os.path.join(path, "config.json")):
        raise CannotReplayError(f"{named} no folder of this machine: give it with --model.")
    if not Path(path).is_absolute():
        raise CannotReplayError(f"{named} a relative path: give it with --model.")
    folder = bundle.path.parent
    if Path(path).resolve().is_relative_to(folder.parent if folder.name == limits.FOLDER else folder):
        raise CannotReplayError(f"{named} in or beside the bundle and may have come with it: give it with --model.")
    if trust_remote_code:
        raise CannotReplayError(f"{named} named by the bundle alone: to run its code, give it with --model.")
    return path


def find_model(given: str) -> str:
    """The folder of a model that was given, which may be the hub's copy on this machine; else its name on the hub.

    The hub is asked once and briefly: libraries that load a model ask for each file, and again and again.

    Raises:
        CannotReplayError: There is neither.
    """
    if os.path.isdir(given):
        return given
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import utils as hub

    no_folder, folder = f"There is no such folder: --model {given}", None
    try:
        if os.path.exists(given):
            raise CannotReplayError(no_folder)
        folder = snapshot_download(given, local_files_only=True)
        if is_whole(folder):
            return folder
    except hub.HFValidationError as error:  # it is no name
        raise CannotReplayError(no_folder) from error
    except hub.LocalEntryNotFoundError:
        pass
    try:
        HfApi().model_info(given, timeout=_HUB_SECONDS)
    except hub.RepositoryNotFoundError as error:
        raise CannotReplayError(f"{no_folder}. Nor has the hub a model of this name.") from error
    except hub.HfHubHTTPError:
        pass  # of a mirror, say, which may have the files all the same
    except Exception as error:  # of the library that sends requests
        if folder is not None:  # what it lacks may not be needed
            return folder
        why = type(error).__name__
        raise CannotReplayError(f"{no_folder}. Nor can the hub be asked for it ({why}).") from error
    return given


def load(
    bundle: Bundle, path: str, variant: Variant, device: str, adapter: str | None, trust_remote_code: bool
) -> Model:
    """Loads a model, and checks that it is the bundle's.

    Args:
        path (str): A folder, or a name on the hub.
        trust_remote_code (bool): Whether the model's own code may run.

    Raises:
        CannotReplayError: It cannot be loaded, or it is another.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with nullcontext(path) if trust_remote_code else safe_model(path) as source:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
            _check_config(bundle, config, path)
            say(f"loading the model {visible(path)} with {variant}")
            loaded, info = cast(Any, AutoModelForCausalLM).from_pretrained(
                source,
                config=config,
                attn_implementation=variant.attention,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **loaded_in(DTYPES[variant.dtype]),
            )
        if missing := sorted(set(info["missing_keys"]) & dict(loaded.named_parameters()).keys()):
            raise ValueError(f"it lacks {_listed(missing, 1, 'other weights')}")
    except CannotReplayError:
        raise
    except Exception as error:  # a configuration may have any value anywhere
        if is_out_of_memory(error):
            raise
        raise CannotReplayError(f"The model {path} cannot be loaded with {variant}: {first_line(error)}") from error
    module = _with_adapter(bundle, loaded, adapter).to(device=device).eval()
    for parameter in module.parameters():
        # Not the buffers: FSDP leaves the frequencies of rotary embeddings in float32.
        parameter.data = parameter.data.to(DTYPES[variant.dtype])
    _check_tokens(bundle, module)
    layers = layers_by_parameter([name for name, _ in module.named_parameters()])
    frozen = _frozen_layers(bundle)
    notes = []
    if not trust_remote_code and (names := unread(path)):
        notes.append(f"Not read in the model's folder: {_listed(names)}.")
    for name, parameter in module.named_parameters():
        if layers[name] in frozen:
            parameter.requires_grad_(False)
    layer_of = {p: layers[name] for name, p in module.named_parameters() if p.requires_grad}
    known = set(bundle.manifest["layers"])
    if known and (unknown := sorted(set(layers.values()) ^ known)):
        raise CannotReplayError(f"The model {path} is not the bundle's: its layers differ in {_listed(unknown)}.")
    if frozen:
        notes.append(f"Layers without a gradient in training are frozen here too: {', '.join(sorted(frozen))}.")
    if has_dropout(module):
        notes.append("The model has dropout, and a replay leaves it out: norms and log-probs differ by that.")
    scale = float(bundle.event["loss_scale"]) if variant.dtype == "float16" else 1.0
    return Model(path, variant, module, layer_of, torch.device(device), scale, notes)


def _listed(names: list[str], most: int = 4, others: str = "others") -> str:
    return ", ".join(names[:most]) + (f" and {others}" if len(names) > most else "")


def default_variant(bundle: Bundle, dtype: str | None, attention: str | None, device: str) -> Variant:
    """What training computed with, as far as it can be had here; what is given comes first.

    Raises:
        CannotReplayError: What is given cannot be had together.
    """
    recorded, recorded_dtype = bundle.manifest["model"].get("attention"), bundle.manifest["dtype"]
    if dtype is None:
        dtype = recorded_dtype if recorded_dtype in DTYPES else "float32"
    if attention is None:
        attention = recorded if recorded in ATTENTIONS else "sdpa"
        if attention == FLASH and (device == "cpu" or dtype not in HALF or find_spec("flash_attn") is None):
            attention = "sdpa"
    elif attention == FLASH and (device == "cpu" or dtype not in HALF):
        raise CannotReplayError("Flash attention needs --device cuda and --dtype bfloat16 or float16.")
    return Variant(dtype, attention)


def other_variants(main: Variant) -> list[Variant]:
    """The ways of computing in which a spike that rounding or a kernel has made would vanish."""
    precise = Variant("float32", "sdpa" if main.attention == FLASH else main.attention)
    others = [precise] if main.dtype in HALF else []
    return [*others, Variant(main.dtype, "sdpa" if main.attention == "eager" else "eager")]


def cut_row(row: Row, response_length: int) -> Row:
    """A row with a response of at most this length; with at least one token, which a model needs."""
    response_length = min(row.response_length, response_length)
    length = row.prompt_length + response_length
    if not length:
        return Row(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, row.temperature)
    return Row(row.input_ids[:length], row.position_ids[:length], response_length, row.temperature)


def forward(model: Model, row: Row, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """The log-probs of a row's response, shape (response length,), and its entropies if they are asked for.

    A response that has no token before it has no log-prob for its first token: it is 0.
    """
    (found,) = logits_of(model, [row])
    return response_log_probs(*found, row, entropy)


def logits_of(model: Model, rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
    """The logits of each row, shape (length, vocabulary), and its ids on their device.

    All rows are computed at once, padded on the right.
    """
    ids, positions = (
        nn.utils.rnn.pad_sequence(list(values), batch_first=True).to(model.device)
        for values in zip(*((row.input_ids, row.position_ids) for row in rows), strict=True)
    )
    lengths = [len(row.input_ids) for row in rows]
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths).unsqueeze(1)).to(ids)
    half = model.variant.dtype in HALF
    with torch.autocast(model.device.type, dtype=model.dtype if half else torch.bfloat16, enabled=half):
        logits = model.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return [(logits[i, :length], ids[i, :length]) for i, length in enumerate(lengths)]


def response_log_probs(logits: Tensor, input_ids: Tensor, row: Row, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """What `forward` returns, from the logits of the row, shape (length, vocabulary), and its ids on their device."""
    start = max(row.prompt_length, 1)
    logits = logits[start - 1 : -1] / row.temperature
    logits = logits if logits.dtype == torch.float64 else logits.float()
    every = logits.log_softmax(-1)
    log_prob = every.gather(-1, input_ids[start:].unsqueeze(-1)).squeeze(-1)
    entropies = -(every.exp() * every).sum(-1) if entropy else None
    if row.prompt_length == 0:
        log_prob = torch.cat([log_prob.new_zeros(1), log_prob])
        entropies = None if entropies is None else torch.cat([entropies.new_zeros(1), entropies])
    return log_prob, entropies


def loaded_in(dtype: torch.dtype) -> dict[str, Any]:
    """The argument of from_pretrained for a dtype, which was renamed in transformers 4.56."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if version >= (4, 56) else "torch_dtype": dtype}


def _check_config(bundle: Bundle, config: Any, path: str) -> None:
    recorded: Mapping[str, Any] = bundle.manifest["model"]
    for name in _SHAPE:
        want, have = recorded.get(name), getattr(config, name, None)
        if want is not None and have is not None and want != have:
            raise CannotReplayError(
                f"The model {path} is not the bundle's: its {name} is {have}, and {want} was trained."
            )


def _check_tokens(bundle: Bundle, module: nn.Module) -> None:
    embeddings = cast(Any, module).get_input_embeddings()
    rows = [row.input_ids for saved in bundle.micro_batches.values() for row in saved.rows]
    largest, last = max((int(ids.max()) for ids in rows if len(ids)), default=0), embeddings.weight.shape[0] - 1
    if largest > last:
        raise CannotReplayError(f"The bundle has the token {largest}, and the model's vocabulary ends at {last}.")


def _with_adapter(bundle: Bundle, module: nn.Module, adapter: str | None) -> nn.Module:
    """The model with its LoRA adapter, the only part that is trained then."""
    trained = bundle.manifest["model"].get("adapter")
    if trained is None:
        if adapter is not None:
            raise CannotReplayError("The bundle was recorded without a LoRA adapter: leave --adapter out.")
        return module
    if adapter is None:
        raise CannotReplayError("The bundle was recorded with a LoRA adapter: give its folder with --adapter.")
    try:
        from peft import PeftModel

        with safe_adapter(adapter) as source:
            found: nn.Module = PeftModel.from_pretrained(module, source, is_trainable=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CannotReplayError(f"The adapter {adapter} cannot be loaded: {first_line(error)}") from error
    return found


def _frozen_layers(bundle: Bundle) -> set[str]:
    """The layers that were measured to have no gradient at all in every micro-batch, though others had one."""
    measured = [entry["layer_norms"] for entry in bundle.manifest["micro_batches"] if entry["layer_norms"]]
    zero = {layer for layer in bundle.manifest["layers"] if measured and all(n.get(layer) == 0 for n in measured)}
    return zero if len(zero) < len(bundle.manifest["layers"]) else set()


def has_dropout(module: nn.Module) -> bool:
    """Whether a model in training mode would drop something out."""
    return any(
        (isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0)
        or any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(child).items())
        for child in module.modules()
    )


def why_not(error: BaseException, what: str = "it") -> str:
    """Why something could not be computed, as a sentence; `what` is what may take too much memory."""
    if not is_out_of_memory(error):
        return first_line(error)
    figures = f": {error}" if isinstance(error, MemoryError) and error.args else ""
    return f"{what} takes more memory than there is{figures}."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, as a sentence."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text if text.endswith(".") else f"{text}."
