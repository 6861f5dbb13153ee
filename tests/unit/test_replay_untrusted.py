"""Bundles and model folders of unknown origin: nothing in them runs, no hub is asked. The attacks are real ones."""

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from notation import Capsys, Patch, cases
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_bundles import Pickled, bundle, kept, resign, small_model
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import hub

from gradloc.adapters.replay_bundles import _model_facts
from gradloc.replay.command import main
from gradloc.replay.folders import safe_model

__all__ = ["bundle", "kept"]

# transformers 4 and 5 load models in different ways.
ON_BOTH = pytest.mark.target(version="0.9.1")


@pytest.fixture
def asked(monkeypatch: Patch) -> list[Any]:
    """What the process has tried to reach; nothing is reached. The libraries believe that they are online."""
    found: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        found.append(arguments)
        raise RuntimeError("the test allows no network")  # not an OSError, which the libraries try again

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_is_offline_mode", False, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return found


@dataclass
class Download:
    """A bundle and a folder of weights of unknown origin, not beside each other."""

    bundle: Path
    model: Path
    marker: Path  # the file that the code of an attack makes when it runs
    asked: list[Any]  # what the process has tried to reach
    capsys: Capsys

    def replay(self, *options: str, model: bool = True) -> tuple[int, str, str]:
        """The exit code, and what is printed."""
        self.capsys.readouterr()
        code = main([str(self.bundle), "--json", "--only", *(["--model", str(self.model)] if model else []), *options])
        return code, *self.capsys.readouterr()

    def is_harmless(self) -> bool:
        return not self.marker.exists() and self.asked == []


@pytest.fixture
def download(
    bundle: Path, kept: Path, tmp_path: Path, tmp_path_factory: Any, asked: list[Any], capsys: Capsys
) -> Download:
    model = shutil.copytree(kept / "model", tmp_path_factory.mktemp("downloads") / "model")
    return Download(bundle, model, tmp_path / "marker", asked, capsys)


def change_json(path: Path, **changes: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **changes}))


def write_code(path: Path, marker: Path) -> None:
    """Code that a loader may import for a model, its configuration, its tokenizer or its generation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""
open({str(marker)!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
def generate(model, *arguments, **options):
    return None
""")


def write_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Pickled(marker)))
    pickle.loads(path.read_bytes())
    marker.rmdir()  # so it works


def custom_generate(model: Path, marker: Path) -> None:
    write_code(model / "custom_generate" / "generate.py", marker)


def auto_map(model: Path, marker: Path, **changes: Any) -> None:
    write_code(model / "modeling_evil.py", marker)
    code = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    change_json(model / "config.json", auto_map=code, **changes)


def pickled_weights(model: Path, marker: Path) -> None:
    (model / "model.safetensors").unlink()
    write_pickle(model / "pytorch_model.bin", marker)


def index_of(name: str) -> Callable[[Path, Path], None]:
    """Makes the weights those of another file, by an index."""

    def write(model: Path, marker: Path) -> None:
        pickled_weights(model, marker)
        change_json(model / "model.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": name})

    return write


def adapter(model: Path, marker: Path) -> None:
    change_json(model / "adapter_config.json", peft_type="LORA", base_model_name_or_path="attacker/model")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


ON_THE_HUB = {"AutoConfig": "attacker/code--a.EvilConfig", "AutoModelForCausalLM": "attacker/code--a.EvilModel"}
KERNELS = [f"{of}_implementation{end}" for of in ("attn", "_attn", "experts", "_experts") for end in ("", "_internal")]
FP8 = {"quant_method": "fp8"}
NOT_LOADED = "cannot be loaded"
# The attack, and what is said: None where the folder is used without what is bad in it.
ATTACKS: dict[str, tuple[Callable[[Path, Path], Any], str | None]] = {
    "custom generation": (custom_generate, None),
    "code for a known type": (auto_map, None),
    "code for an unknown type": (lambda m, x: auto_map(m, x, model_type="evil"), NOT_LOADED),
    "code on the hub": (lambda m, x: change_json(m / "config.json", auto_map=ON_THE_HUB, _name_or_path="a/b"), None),
    "pickled weights": (pickled_weights, "it has no model.safetensors"),
    "a pickle by another name": (lambda m, x: write_pickle(m / "model.safetensors", x), NOT_LOADED),
    "an index of pickles": (index_of("pytorch_model.bin"), "'pytorch_model.bin' is not the name of a safetensors file"),
    "an index that leads out": (index_of("../a.safetensors"), "'../a.safetensors' is not the name of"),
    "kernels": (lambda m, _: [change_json(m / "config.json", **{name: "attacker/kernel"}) for name in KERNELS], None),
    "quantized": (lambda m, _: change_json(m / "config.json", quantization_config=FP8), "its weights are quantized"),
    "an adapter of a model on the hub": (adapter, None),
    "a pipe as configuration": (lambda model, _: pipe(model / "config.json"), "config.json"),
    "a pipe as weights": (lambda model, _: pipe(model / "model.safetensors"), "it has no model.safetensors"),
}


@cases(
    "attack by_manifest",
    *(pytest.param(attack, False, marks=ON_BOTH) for attack in ATTACKS),
    *((attack, True) for attack in ("custom generation", "a pipe as configuration")),
)
def test_a_folder_runs_and_asks_nothing(download: Download, monkeypatch: Patch, attack: str, by_manifest: bool) -> None:
    write, message = ATTACKS[attack]
    write(download.model, download.marker)
    resign(download.bundle, lambda manifest: manifest["model"].update(path=str(download.model)))
    monkeypatch.chdir(download.bundle)
    exit_code, out, error = download.replay(model=not by_manifest)
    assert download.is_harmless()
    if message is None:
        assert exit_code == 0 and "The spike comes back" in out, error
    else:
        assert exit_code == 2 and out == "" and error.count("\n") == 1 + error.count("min  loading the model "), error
        # A manifest's folder needs a config.json that is a file.
        assert message in error or (by_manifest and "is no folder of this machine" in error), error


@ON_BOTH
def test_the_attacks_succeed_where_a_folder_is_trusted(download: Download) -> None:
    """Without this, the tests above could pass because an attack does nothing."""
    model, marker = download.model, download.marker
    custom_generate(model, marker)
    # That of a folder that the bundle names needs its name.
    resign(download.bundle, lambda manifest: manifest["model"].update(path=str(model)))
    code, _, error = download.replay("--trust-remote-code", model=False)
    assert code == 2 and "to run its code, give it with --model." in error and not marker.exists()
    assert download.replay("--trust-remote-code")[0] == 0 and marker.exists() and download.asked == []
    adapter(model, marker)
    # transformers 5 takes the weights beside such a file.
    with pytest.raises((RuntimeError, OSError)):
        name = model if transformers.__version__.startswith("4.") else "attacker/model"
        AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
    assert download.asked


def copied(model: Path, to: Path) -> str:
    return str(shutil.copytree(model, to))


def by_a_link(bundle: Path, model: Path) -> str:
    (model.parent / "link").symlink_to(copied(model, bundle / "model"))
    return str(model.parent / "link")


BESIDE, NO_FOLDER = "in or beside the bundle", "no folder of this machine"
# The target of the manifest's path, and the message.
PATHS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "beside the bundle": (lambda b, m: copied(m, b.parent / "model"), BESIDE),
    "beside the evidence": (lambda b, m: copied(m, b.parent.parent / "checkpoint"), BESIDE),
    "by a link": (by_a_link, BESIDE),
    "relative": (lambda b, m: os.path.relpath(m), "a relative path"),
    "on the hub": (lambda b, m: "attacker/model", NO_FOLDER),
    "a null byte": (lambda b, m: f"{m}\0", NO_FOLDER),
}


@pytest.mark.parametrize("place", PATHS)
def test_a_path_from_the_bundle_is_not_taken(
    download: Download, tmp_path: Path, monkeypatch: Patch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    download.bundle = shutil.copytree(download.bundle, tmp_path / "evidence" / "replay" / download.bundle.name)
    lead, message = PATHS[place]
    path = lead(download.bundle, download.model)
    resign(download.bundle, lambda manifest: manifest["model"].update(path=path))
    code, out, error = download.replay(model=False)
    assert code == 2 and out == "" and error.count("\n") == 1
    assert message in error and "give it with --model." in error and download.asked == []
    if isinstance(path, str) and message != NO_FOLDER:
        assert download.replay("--model", path, model=False)[0] == 0


def test_a_relative_path_is_recorded_as_an_absolute_one(download: Download, monkeypatch: Patch) -> None:
    monkeypatch.chdir(download.model.parent)
    trained = small_model()
    for name, path in (("model", str(download.model)), ("attacker/model", "attacker/model"), ("", None)):
        trained.config.name_or_path = name
        assert _model_facts(trained)["path"] == path


@ON_BOTH
def test_a_safe_folder_gives_the_same_model(tmp_path: Path) -> None:
    """In several files, tied, and with experts, which transformers 5 fuses while it loads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    trained = MixtralForCausalLM(MixtralConfig(**sizes, **heads, tie_word_embeddings=True))
    trained.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with safe_model(str(tmp_path / "model")) as folder:
        safe = AutoModelForCausalLM.from_pretrained(folder)
    assert not Path(folder).exists()
    assert type(safe) is type(plain) and safe.config.to_diff_dict() == plain.config.to_diff_dict()
    expected = dict(plain.named_parameters())
    for parameter, value in safe.named_parameters():
        torch.testing.assert_close(value, expected.pop(parameter), rtol=0, atol=0)
    assert not expected


@pytest.fixture
def lora(download: Download) -> Path:
    """An adapter's folder, for a bundle that was recorded with one."""
    resign(download.bundle, lambda manifest: manifest["model"].update(adapter={"r": 2}))
    trained = get_peft_model(small_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trained.save_pretrained(download.model.parent / "lora")
    return download.model.parent / "lora"


@ON_BOTH
def test_an_adapter_asks_no_hub(download: Download, lora: Path) -> None:
    code, expected, _ = download.replay("--adapter", str(lora))
    mapping = {"base_model_class": "Evil", "parent_library": "evil"}
    change_json(lora / "adapter_config.json", base_model_name_or_path="attacker/model", auto_mapping=mapping)
    again, found, _ = download.replay("--adapter", str(lora))
    assert (code, again) == (0, 0) and download.asked == []
    assert json.loads(found)["units"] == json.loads(expected)["units"]


def test_another_adapter_is_refused(download: Download, lora: Path) -> None:
    (lora / "adapter_model.safetensors").unlink()
    write_pickle(lora / "adapter_model.bin", download.marker)
    code, _, said = download.replay("--adapter", str(lora))
    assert code == 2 and "it has no adapter_model.safetensors." in said and download.is_harmless()
    change_json(lora / "adapter_config.json", peft_type="XLORA", adapters={"0": "attacker/a"})
    code, _, said = download.replay("--adapter", str(lora))
    assert code == 2 and "its peft_type is 'XLORA', and a replay loads LORA." in said and download.is_harmless()


@ON_BOTH
def test_weights_that_are_missing_are_not_made_up(download: Download) -> None:
    weights = load_file(download.model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, download.model / "model.safetensors", metadata={"format": "pt"})
    code, _, error = download.replay()
    assert code == 2 and "it lacks model.layers.1.mlp.up_proj.weight." in error
