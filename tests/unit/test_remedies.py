"""The table of remedies: TokenClip against the chain rule, the order of rows, what is missing, and hostile values."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from evidence import replay_result, write_replay
from notation import Capsys, Patch, cases
from pages import texts_of
from small_bundles import BAD, PROMPT, RESPONSE, ROWS, THRESHOLD, bundle, replay, resave, resign, small_model
from small_bundles import kept as kept_without_bounds
from torch import Tensor

import trees
from gradloc.replay import remedies
from gradloc.replay.advice import REPAIR, advice_by_source, best, recommended
from gradloc.replay.command import main
from gradloc.replay.measuring import gradient_norms
from gradloc.replay.model import Variant, load
from gradloc.replay.token_clip import clip_tokens
from gradloc.tools.opening import open_bundle
from gradloc.tools.reading import read
from gradloc.tools.results import read_results

__all__ = ["bundle", "kept_without_bounds", "replay"]

# On the way back from the log-probs.
HIDDEN = ("layers.1", "layers.0", "embed_tokens")
ADVICE = advice_by_source([])
FIELDS = {"name", "norm", "left", "under", "ordinary_moved", "masked", "override", "meaning", "note"}


def ordinary_tokens() -> Tensor:
    ordinary = torch.ones(ROWS, RESPONSE, dtype=torch.bool)
    ordinary[BAD] = False
    return ordinary


def bounds_of(bundle: Path, factor: float = 4.0, action: str = "log", limit: int = 10) -> dict[str, Any]:
    """TokenClip's bounds, had it seen this micro-batch's ordinary tokens in each step before."""
    (saved,) = open_bundle(bundle).micro_batches.values()
    weight, alone = saved.tokens["weight"], torch.where(ordinary_tokens(), saved.tokens["coefficient"], 0.0)
    usual = {"log_probs": float((alone / weight).abs().max()), **dict.fromkeys(HIDDEN, 0.0)}
    for row in range(ROWS):
        for name, signal in zip(HIDDEN, backward(saved.rows[row].input_ids, alone[row])[1], strict=True):
            if row == BAD[0]:
                signal[PROMPT - 1 + BAD[1]] = 0.0
            usual[name] = max(usual[name], float(signal.max() / weight[row, 0]))
    return {"action": action, "factor": factor, "usual": usual, "limit": limit}


def know(bundle: Path, **clips: Any) -> None:
    """Gives a bundle what clips knew of their bounds."""
    resign(bundle, lambda manifest: manifest.update(clips={"layer_clip": None, "token_clip": None, **clips}))


@pytest.fixture(scope="module")
def kept(kept_without_bounds: Path) -> Path:
    """The same, of a run with TokenClip's action log."""
    bundle = kept_without_bounds / "replay/step1-epoch0-mini_batch0"
    know(bundle, token_clip=bounds_of(bundle))
    return kept_without_bounds


def of_verl(bundle: Path, **settings: Any) -> None:
    """Makes a bundle as verl's vanilla loss would have left it, with the rollout far from training at the culprit."""
    pytest.importorskip("verl")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["tokens.old_log_prob"] = tensors["tokens.log_prob"].clone()
        rollout = tensors["tokens.log_prob"].clone()
        rollout[BAD] += 3.0
        tensors["tokens.rollout_log_prob"] = rollout

    resave(bundle, change)
    resign(bundle, lambda manifest: manifest.update(actor=settings))


def rows_by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["remedies"]}


@pytest.mark.target(version="0.9.1")
@cases(
    "factor action first",
    (4.0, "drop", "log_probs"),
    (0.9, "drop", "log_probs"),
    (0.9, "smooth", "log_probs"),
    # Without bounds before, the culprit's signal is cut where it has left the last layer, for other positions too.
    (0.9, "drop", "layers.0"),
)
def test_token_clip_is_the_chain_rule_with_cut_signals(
    bundle: Path, kept: Path, factor: float, action: str, first: str
) -> None:
    """With small factors, signals of ordinary tokens are cut as well, below the log-probs too, and of prompts.

    The rows' tokens have different weights, by which signals are divided.
    """
    factors = torch.linspace(0.05, 1.0, ROWS * RESPONSE).flip(0).reshape(ROWS, RESPONSE)
    factors[BAD] = 1.0
    weights = torch.tensor([[0.1], [1.0]])
    resave(bundle, lambda tensors: [tensors["tokens.coefficient"].mul_(factors * weights)])
    resave(bundle, lambda tensors: tensors["tokens.weight"].mul_(weights))
    bounds = bounds_of(bundle, factor, action, limit=ROWS * (PROMPT + RESPONSE))
    if first == "layers.0":
        bounds["usual"] |= dict.fromkeys(("log_probs", "layers.1"))
    opened = open_bundle(bundle)
    (saved,) = opened.micro_batches.values()
    model = load(opened, str(kept / "model"), Variant("float32", "sdpa"), "cpu", None, False)
    found = clip_tokens(model, saved, ordinary_tokens(), bounds, False)
    coefficient, weight = saved.tokens["coefficient"], saved.tokens["weight"]
    alone = torch.where(ordinary_tokens(), coefficient, 0.0)

    def left_of(name: str, signal: Tensor) -> Tensor:
        bound = factor * (bounds["usual"][name] or math.inf)
        left = torch.zeros_like(signal) if action == "drop" else (2 - signal / bound).clamp(0, 1)
        return torch.where(signal > bound, left, 1.0)

    at_log_probs = left_of("log_probs", coefficient.abs() / weight)
    kept_factors, moved, total = [], [], []
    for row in range(ROWS):
        ids = saved.rows[row].input_ids

        def cut(place: int, signal: Tensor, row: int = row) -> Tensor:
            return left_of(HIDDEN[place], signal / weight[row, 0])

        whole, _, left = backward(ids, coefficient[row] * at_log_probs[row], cut)
        total.append(whole)
        without, *_ = backward(ids, alone[row])
        with_cuts, *_ = backward(ids, alone[row] * at_log_probs[row], lambda place, _, left=left: left[place])
        moved.append({key: with_cuts[key] - without[key] for key in without})
        kept_factors += left
    assert found.gradient.norm == pytest.approx(norm_of(total), rel=1e-4)
    assert found.moved.norm == pytest.approx(norm_of(moved), rel=1e-4, abs=1e-6)
    assert found.positions[BAD] and found.boundary == first and found.refused == []
    below = torch.stack(kept_factors).unflatten(0, (ROWS, -1)) < 1
    assert (found.positions == (at_log_probs < 1) | below[..., PROMPT - 1 : -1].any(1)).all()
    assert found.prompt_positions == below[..., : PROMPT - 1].sum()
    assert bool(below.any()) == (factor < 1) == (found.moved.norm > 0)


def test_without_bounds_of_this_model_a_clip_has_no_row(bundle: Path, replay: Any) -> None:
    """Also where it was on, but in its warm-up."""
    resign(bundle, lambda manifest: manifest.update(actor={"token_clip": {"warmup_steps": 7}}))
    warming, of_another_model = bounds_of(bundle), bounds_of(bundle)
    warming["usual"] = dict.fromkeys(warming["usual"])
    of_another_model["usual"]["layers.9"] = 1.0
    for bounds, said in (
        (warming, "TokenClip: unknown until it has run 7 steps"),
        (of_another_model, "its bounds are of other layers"),
    ):
        know(bundle, token_clip=bounds)
        result = replay("--remedies")
        assert not [name for name in rows_by_name(result) if "Clip" in name]
        notes = " ".join(result["remedy_notes"])
        assert said in notes and "LayerClip: unknown until it has run 20 steps" in notes


def chain(ids: Tensor, coefficient: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor | None, Tensor]]:
    """The model's parts from the last to the first: each one's parameters and input, and what it gives.

    Each part's input is a leaf, so that a gradient ends there.
    """
    model = small_model().eval()
    positions = torch.arange(len(ids)).unsqueeze(0)
    hidden = [model.model.embed_tokens(ids.unsqueeze(0))]
    rotary = model.model.rotary_emb(hidden[0], positions)
    mask = torch.full((len(ids), len(ids)), -math.inf).triu(1)[None, None]
    inputs = []
    for layer in model.model.layers:
        inputs.append(hidden[-1].detach().requires_grad_())
        output = layer(inputs[-1], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        hidden.append(output[0] if isinstance(output, tuple) else output)
    last = hidden[-1].detach().requires_grad_()
    logits = model.lm_head(model.model.norm(last))[0, PROMPT - 1 : -1]
    log_prob = logits.log_softmax(-1).gather(-1, ids[PROMPT:].unsqueeze(-1)).squeeze(-1)
    yield named(model.model.norm, "norm", model.lm_head, "lm_head"), last, (log_prob * coefficient).sum()
    for index in reversed(range(len(model.model.layers))):
        yield named(model.model.layers[index], f"layers.{index}"), inputs[index], hidden[index + 1]
    yield named(model.model.embed_tokens, "embed_tokens"), None, hidden[0]


def named(*modules: Any) -> dict[str, Tensor]:
    pairs = zip(modules[::2], modules[1::2], strict=True)
    return {f"{prefix}.{name}": p for module, prefix in pairs for name, p in module.named_parameters()}


def backward(
    ids: Tensor, coefficient: Tensor, cut: Callable[[int, Tensor], Tensor] = lambda _, signal: torch.ones_like(signal)
) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """The gradient by the chain rule, each boundary's signals, and what `cut(place, signal)` leaves of them."""
    found, signals, left, arriving = {}, [], [], None
    for place, (parameters, entry, output) in enumerate(chain(ids, coefficient)):
        leaves = [*parameters.values(), *([] if entry is None else [entry])]
        gradients = torch.autograd.grad(output, leaves, arriving)
        found.update(zip(parameters, gradients, strict=False))
        if entry is not None:
            signals.append(gradients[-1][0].norm(dim=-1))
            left.append(cut(place, signals[-1]))
            arriving = gradients[-1] * left[-1][None, :, None]
    return found, signals, left


def norm_of(gradients: list[dict[str, Tensor]]) -> float:
    return math.sqrt(sum(float(sum(g[key] for g in gradients).square().sum()) for key in gradients[0]))


@pytest.mark.target(version="0.9.1")
def test_a_table_without_verl_says_what_is_missing(bundle: Path, kept: Path) -> None:
    script = f"""
import sys
for name in ("verl", "ray", "tensordict"):
    sys.modules[name] = None
from gradloc.replay.command import main
sys.exit(main([{str(bundle)!r}, "--model", {str(kept / "model")!r}, "--only", "--remedies", "--json"]))
"""
    result = json.loads(trees.ran(trees.run(sys.executable, "-c", script)))
    rows = rows_by_name(result)
    assert set(rows) == {"TokenClip", "spike_action=drop", "grad_clip 1, as it was set", "grad_clip 0.1"}
    (unit,) = result["units"]
    drop, rest = rows["spike_action=drop"], unit["rest"]
    assert drop["norm"] == pytest.approx(rest) and drop["left"] == pytest.approx(rest / unit["replayed"])
    assert drop["ordinary_moved"] == 0 and drop["under"] and drop["masked"] == {"tokens": 1, "culprits": 1}
    clip = rows["grad_clip 0.1"]
    assert clip["ordinary_moved"] == pytest.approx(1 - clip["left"])
    assert clip["note"].endswith("so for them it is a skipped step.") and drop["note"] is None
    said = " ".join(result["remedy_notes"])
    assert "algorithm.norm_adv_by_std_in_grpo=False) cannot be computed" in said
    assert "verl is not installed here, so its policy losses and rollout corrections are left out." in said
    assert result["sentences"][-1].startswith("TokenClip fits best: it leaves under 1% of the norm")


@pytest.mark.target(version="0.9.1")
def test_verls_functions_give_the_rows_of_losses(bundle: Path, replay: Any) -> None:
    of_verl(bundle)
    found = rows_by_name(replay("--remedies"))
    assert found["as recorded"]["left"] == pytest.approx(1, rel=1e-5)
    mask = found["token mask"]
    assert mask["under"] and mask["masked"] == {"tokens": 1, "culprits": 1}
    # The mean is over one token less.
    assert mask["ordinary_moved"] == pytest.approx(1 / (ROWS * RESPONSE - 1), rel=1e-4)
    assert found["token TIS"]["left"] == pytest.approx(math.exp(-3), rel=1e-3)
    assert found["token TIS"]["ordinary_moved"] == 0
    assert REPAIR not in found
    # The rollout gave the token no log-prob.
    resave(bundle, lambda tensors: tensors["tokens.rollout_log_prob"].__setitem__(BAD, math.nan))
    found = rows_by_name(replay("--remedies"))
    assert {"token mask", "token TIS", "sequence TIS", "geometric mask"} <= set(found)
    assert found[REPAIR]["masked"] == mask["masked"] and found[REPAIR]["norm"] == pytest.approx(mask["norm"])
    assert found[REPAIR]["override"] is None


def bypass(**correction: Any) -> dict[str, Any]:
    return {"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": correction}}


# Settings of the actor that a stranger's bundle may have.
HOSTILE: tuple[dict[str, Any], ...] = (
    {"clip_ratio": "0.2", "policy_loss": []},
    {"policy_loss": {"loss_mode": "__import__('os').system('true')", "_target_": "os.system"}},
    bypass(rollout_rs="a,b"),
    {"use_kl_loss": True},  # without a reference
)


@cases(
    "without actor sentence present absent",
    ("rollout_log_prob", {}, "The bundle has no log-probs of the rollout", "GSPO", "token TIS"),
    ("old_log_prob", {}, "The bundle has no old_log_prob, which verl's losses need.", "TokenClip", "GSPO"),
    ("", {"entropy_coeff": 0.1}, "10 of 10 tokens differ", "TokenClip", "as recorded"),
    (
        "",
        bypass(rollout_is={"_target_": "os.system"}),
        "In bypass_mode, verl takes a loss of its own",
        "token mask",
        "GSPO",
    ),
    *(("", settings, "rollout corrections are left out.", "TokenClip", "as recorded") for settings in HOSTILE),
)
def test_what_cannot_be_computed_is_said(
    bundle: Path, replay: Any, without: str, actor: dict[str, Any], sentence: str, present: str, absent: str
) -> None:
    of_verl(bundle, **actor)
    resave(bundle, lambda tensors: tensors.pop(f"tokens.{without}", None))
    result = replay("--remedies")
    assert sum(sentence in note for note in result["remedy_notes"]) == 1, result["remedy_notes"]
    rows = rows_by_name(result)
    assert present in rows and absent not in rows


def test_a_nonfinite_gradient_has_no_ratio(bundle: Path, replay: Any) -> None:
    resave(bundle, lambda tensors: tensors["tokens.coefficient"].__setitem__(BAD, math.nan))
    found = rows_by_name(replay("--remedies"))
    assert all(row["left"] is None for row in found.values())
    assert found["TokenClip"]["under"] and found["spike_action=drop"]["under"]
    assert found["TokenClip"]["norm"] == pytest.approx(found["spike_action=drop"]["norm"])
    assert not found["grad_clip 1, as it was set"]["under"]


def a_row(name: str, under: bool, moved: float | None, norm: float) -> dict[str, Any]:
    changes = {"name": name, "norm": norm, "left": norm / 100, "under": under, "ordinary_moved": moved}
    return {**replay_result(1)["remedies"][0], **changes}


def test_the_best_row_is_under_the_threshold_and_costs_least() -> None:
    ordered = [
        a_row("free", True, 0.004, 5),
        a_row(remedies.DROP, True, 0.0, 1),
        a_row("mild", True, 0.3, 8),
        a_row("over", False, 0.0, 90),
        a_row("strong", True, 0.9, 0.1),
        a_row("unknown", True, None, 1),
        a_row("broken", False, None, math.nan),
    ]
    assert sorted(ordered[::-1], key=remedies.rank) == ordered
    assert best(ordered)["name"] == "free"
    assert best([{**ordered[0], "override": None}, *ordered[1:]])["name"] == remedies.DROP


def test_a_result_with_other_remedies_is_left_out(tmp_path: Path) -> None:
    result = replay_result(1)
    write_replay(tmp_path, result)
    assert len(read_results(str(tmp_path))) == 1
    for change in ({"override": "a.b=$(id)"}, {"override": "a.b=1\nc.d=2"}, {"left": "much"}):
        write_replay(tmp_path, {**result, "remedies": [{**result["remedies"][0], **change}]})
        assert read_results(str(tmp_path)) == [], change


def test_a_replay_is_shown_and_its_best_remedy_is_advice(kept: Path, tmp_path: Path, capsys: Capsys) -> None:
    folder = shutil.copytree(kept, tmp_path / "evidence")
    page = tmp_path / "page.html"
    bundle = str(folder / "replay/step1-epoch0-mini_batch0")
    assert main([bundle, "--model", str(folder / "model"), "--remedies", "--switches", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "What each switch changes" in out and "Which remedy fits" in out
    evidence = read(str(folder))
    (result,) = evidence.replays
    (source,) = {token["source"] for token in result["tokens"] if token["culprit"]}
    advice, override = advice_by_source(evidence.replays)[source], result["remedies"][0]["override"]
    assert advice.startswith("In the replay of step 1, TokenClip fits best: ") and override in advice
    for text in (override, "Which remedy fits", "rotary embedding in float32", "The spike comes back: rank 0"):
        assert text in texts_of(page)
    # A spike that does not come back has no remedy.
    result["units"][0]["replayed"] = THRESHOLD * 1e-9
    assert advice_by_source([result]) == ADVICE


def a_result(rest: float | None, *left: float, **changes: Any) -> dict[str, Any]:
    """A spike of norm 100 over a threshold of 99, with remedies that leave these norms."""
    unit = {"replayed": 100.0, "rest": rest, "threshold": 99.0}
    culprit = {"culprit": True, "source": "token", "replayed": 100.0}
    rows = [a_row(f"leaves {norm:g}", True, 0.0, norm) for norm in left]
    return {"units": [unit], "tokens": [culprit], "remedies": rows, "remedy_notes": [], "global_step": 1, **changes}


@cases(
    "rest left best_one",
    (20.0, (96.0, 61.0), None),
    (20.0, (96.0, 59.0), "leaves 59"),
    (None, (96.0, 51.0), None),
    (120.0, (96.0, 60.0, 40.0), "leaves 40"),
)
def test_a_remedy_takes_half_of_the_culprits(rest: float | None, left: tuple[float, ...], best_one: str | None) -> None:
    first, sentence = recommended(a_result(rest, *left))
    assert (first and first["name"]) == best_one
    assert sentence.startswith("No remedy helps: " if best_one is None else f"{best_one} fits best")
    assert (advice_by_source([a_result(rest, *left)])["token"] == ADVICE["token"]) == (best_one is None)


@pytest.mark.parametrize("source", ["unsampled", "misaligned", "retokenized", "nonfinite"])
def test_for_a_bug_no_remedy_is_recommended(source: str) -> None:
    result = a_result(1.0, 1.0)
    assert recommended(result)[0] is not None
    for changes in ({"cause": "loss_scale"}, {"scale": {"loss": {"factor": 2.0}}}):
        assert "the cause is loss_scale" in recommended({**result, **changes})[1]
    result["tokens"][0]["source"] = source
    first, sentence = recommended(result)
    assert first is None and sentence.startswith(f"No remedy is recommended: the cause is {source}")
    assert sentence.endswith(" which a remedy only covers up.") and advice_by_source([result]) == ADVICE
    result["remedies"].append({**result["remedies"][0], "name": REPAIR, "norm": 2.25, "override": None})
    said = recommended(result)[1].removeprefix(sentence)
    # How the tokens are left out, the advice on their source says.
    assert said == (" Without these tokens, the norm is 2.25." if source == "unsampled" else "")
    # A verdict of a natural spike is not contradicted; one of ratios names what remedies are made for.
    assert all(recommended({**result, "cause": cause})[0] is not None for cause in (None, "token", "unlikely"))


def test_measuring_remedies_leaves_the_rest_of_a_result(bundle: Path, replay: Any) -> None:
    factors = dict(zip(open_bundle(bundle).manifest["layers"], (0.25, 0.5, 1.0, 1.0, 0.75), strict=True))
    step = {layer: {"norm": 1.0, "bound": 1.0, "factor": factor} for layer, factor in factors.items()}
    know(bundle, layer_clip=step, token_clip=bounds_of(bundle))
    with_remedies, plain = replay("--remedies"), replay()
    for name in set(plain) - {"time", "remedies", "sentences"}:
        assert plain[name] == with_remedies[name], name
    assert plain["sentences"] == with_remedies["sentences"][:-1]
    of_passes = {"TokenClip", "as recorded"}
    expected = math.hypot(*(factors[layer["layer"]] * layer["replayed"] for layer in plain["layers"]))
    assert rows_by_name(plain)["LayerClip"]["norm"] == pytest.approx(expected, rel=1e-6)
    assert plain["remedies"] == [row for row in with_remedies["remedies"] if row["name"] not in of_passes]
    # With other weights, none is recommended.
    resave(bundle, lambda tensors: tensors["tokens.log_prob"].sub_(1.0))
    result = replay("--remedies")
    assert not result["same_weights"] and advice_by_source([result]) == ADVICE
    assert "probably not the weights of training" in result["sentences"][-1]


def test_each_row_is_written_at_once(bundle: Path, kept: Path, monkeypatch: Patch) -> None:
    """So that of a replay that ends early, everything that was measured is left."""
    of_verl(bundle)
    interrupted = Mock(wraps=gradient_norms, side_effect=[DEFAULT] * 4 + [KeyboardInterrupt])
    monkeypatch.setattr(remedies, "gradient_norms", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([str(bundle), "--model", str(kept / "model"), "--only", "--remedies"])
    result = json.loads(bundle.with_name("step1.result.json").read_text())
    assert result["remedies"] and all(set(row) == FIELDS for row in result["remedies"])
    assert "Not all remedies were measured: the replay ended before." in result["notes"]
