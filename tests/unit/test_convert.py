"""Bundles from other trainers' files: what they hold, what is refused, and that the search takes them."""

import json
import math
import os
import re
import runpy
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from notation import Capsys, Patch, cases
from plain_passes import log_probs_of
from printed_commands import commands_in, run_as_printed
from small_bundles import VOCABULARY, Pickled, small_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import trees
from gradloc.bundles import limits
from gradloc.check.command import main as check
from gradloc.convert import batch
from gradloc.convert import records as record_files
from gradloc.convert.batch import AGG_MODES
from gradloc.convert.command import main
from gradloc.convert.records import RecordError
from gradloc.evidence.writer import LINE_BYTES, jsonable
from gradloc.report.command import main as report
from gradloc.tools.opening import Bundle, open_bundle
from gradloc.tools.reading import read
from gradloc.tools.schema import EVENT, conforms

# Prompt and response of each response.
LENGTHS = ((3, 5), (2, 7), (4, 4), (3, 6))
# A response and a position in it.
BAD = (1, 3)
Records = list[dict[str, Any]]


def checked(path: Path, capsys: Capsys) -> str:
    """What `gradloc check` has checked in a file."""
    capsys.readouterr()
    assert check([str(path), "--json"]) in (0, 1)
    return str(json.loads(capsys.readouterr().out)["where"])


def records() -> Records:
    """Responses of one prompt with a planted advantage; a tool's output in the third."""
    torch.manual_seed(0)
    found = []
    for index, (prompt, response) in enumerate(LENGTHS):
        old = -3 * torch.rand(response)
        advantages = [1.0 - 0.4 * index] * response
        if index == BAD[0]:
            advantages[BAD[1]] = -2e4
        record = {
            "prompt_ids": torch.randint(VOCABULARY, (prompt,)).tolist(),
            "response_ids": torch.randint(VOCABULARY, (response,)).tolist(),
            "response_mask": [1] * response if index != 2 else [1, 0, 0, 1],
            "advantages": advantages,
            "log_probs": (old + 0.3 * torch.randn(response)).clamp(max=0).tolist(),
            "old_log_probs": old.tolist(),
            "ref_log_probs": (old + 0.2 * torch.randn(response)).clamp(max=0).tolist(),
            "rollout_log_probs": old.tolist(),
            "uid": f"prompt {index // 2}",
        }
        found.append(record)
    return found


def write_lines(path: Path, lines: Records) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Bundle]:
    """Gives the bundle of a file or of records; its event is the one in the evidence."""

    def call(source: Path | Records, *options: str) -> Bundle:
        file = source if isinstance(source, Path) else write_lines(tmp_path / "a.jsonl", source)
        out = tmp_path / "it's a folder"
        assert main([str(file), "--out", str(out), *options]) == 0
        event = json.loads((out / "spikes.jsonl").read_text().splitlines()[-1])
        assert conforms(event, EVENT)
        bundle = open_bundle(out / event["replay"])
        assert jsonable({**bundle.event, "replay": event["replay"]}) == event
        return bundle

    return call


@pytest.fixture
def refused(tmp_path: Path, capsys: Capsys) -> Callable[..., str]:
    """Gives the sentence with which a file or records are refused; nothing is written."""

    def call(source: Path | Records, *options: str) -> str:
        file = source if isinstance(source, Path) else write_lines(tmp_path / "a.jsonl", source)
        assert main([str(file), "--out", str(tmp_path / "refused"), *options]) == 2
        written, error = capsys.readouterr()
        assert written == "" and error.count("\n") == 1 and not (tmp_path / "refused").exists(), error
        return error

    return call


def flat(bundle: Bundle, name: str) -> list[Tensor]:
    """The values of each response, in the records' order."""
    found = {}
    for micro_batch, saved in bundle.micro_batches.items():
        for index, (row, place) in enumerate(zip(saved.rows, bundle.rows[micro_batch], strict=True)):
            found[micro_batch[0], place] = saved.tokens[name][index, : row.response_length]
    return [found[place] for place in sorted(found)]


def padded(lines: Records, name: str) -> Tensor:
    return pad_sequence([torch.tensor(line[name], dtype=torch.float64) for line in lines], batch_first=True)


def count_of(lines: Records) -> int:
    """How many tokens of the policy there are."""
    return sum(sum(line["response_mask"]) for line in lines)


KINDS = [("k1", 3.0), ("k2", None), ("k3", 3.0), ("low_var_kl", None)]


def written_loss(log_prob: Tensor, lines: Records, mode: str, kind: str, clip_c: float | None) -> Tensor:
    """PPO's clipped loss with a KL loss, as a trainer computes it over padded tensors."""
    mask, advantage = padded(lines, "response_mask"), padded(lines, "advantages")
    ratio = (log_prob - padded(lines, "old_log_probs")).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    if clip_c is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * clip_c), loss)
    r = padded(lines, "ref_log_probs") - log_prob
    k3 = r.exp() - r - 1
    loss = loss + 0.1 * {"k1": -r, "k2": r**2 / 2, "k3": k3, "low_var_kl": k3.clamp(-10, 10)}[kind]
    by_response = (loss * mask).sum(1)
    return {
        "token-mean": (loss * mask).sum() / mask.sum(),
        "token-sum": (loss * mask).sum(),
        "seq-mean-token-sum": by_response.mean(),
        "seq-mean-token-mean": (by_response / mask.sum(1)).mean(),
        "seq-mean-token-sum-norm": by_response.mean() / 16,
    }[mode]


@cases("mode kind clip_c", *((mode, *kind) for mode, kind in zip(AGG_MODES, [*KINDS, KINDS[0]], strict=True)))
def test_coefficients_are_those_of_the_loss(convert: Any, mode: str, kind: str, clip_c: float | None) -> None:
    lines = records()
    lines[3]["log_probs"][0], lines[3]["ref_log_probs"][0] = -8.0, -4.0  # where low_var_kl is cut
    options = ["--loss-agg-mode", mode, "--clip-high", "0.28", "--kl-coef", "0.1", "--kl-type", kind]
    options += ["--loss-scale-factor", "16"] + ([] if clip_c is None else ["--clip-c", str(clip_c)])
    bundle = convert(lines, *options)
    log_prob = padded(lines, "log_probs").requires_grad_()
    (expected,) = torch.autograd.grad(written_loss(log_prob, lines, mode, kind, clip_c), log_prob)
    assert int((expected == 0).sum()) > 0  # clipped, masked, padded
    coefficients = flat(bundle, "coefficient")
    for index, coefficient in enumerate(coefficients):
        torch.testing.assert_close(coefficient.double(), expected[index, : len(coefficient)], rtol=1e-6, atol=1e-12)
    no_policy = [{**line, "advantages": [0.0] * len(line["advantages"])} for line in lines]
    (expected,) = torch.autograd.grad(written_loss(log_prob, no_policy, mode, kind, None), log_prob)
    for index, coefficient in enumerate(flat(bundle, "kl_coefficient")):
        torch.testing.assert_close(coefficient.double(), expected[index, : len(coefficient)], rtol=1e-5, atol=1e-9)


def test_ranks_have_their_share_of_the_mean(convert: Any, monkeypatch: Patch) -> None:
    lines = records()
    alone = convert(lines)
    for index, line in enumerate(lines):
        line["rank"], line["micro_batch"] = index % 2, 0
    ranks = convert(lines)
    assert ranks.event["world_size"] == 2 and ranks.rows == {(0, 0): [0, 1], (1, 0): [0, 1]}
    for name in ("weight", "coefficient"):
        for index, values in zip((0, 2, 1, 3), flat(ranks, name), strict=True):
            torch.testing.assert_close(values, 2 * flat(alone, name)[index])
    assert ranks.event["global_threshold"] == pytest.approx(alone.event["global_threshold"])
    # Micro-batches have the size that is asked for.
    assert list(convert(records(), "--micro-batch-size", "3").rows.values()) == [[0, 1, 2], [3]]
    monkeypatch.setattr(limits, "CONVERTED_MICRO_BATCHES", 2)
    assert list(convert(records()).rows.values()) == [[0, 1], [2, 3]]


def test_a_bundle_has_the_records(convert: Any, tmp_path: Path, capsys: Capsys) -> None:
    lines = records()
    lines[0] |= {"temperature": 0.7, "text": "x"}
    pandas.DataFrame(lines).to_parquet(tmp_path / "a.parquet")
    assert flat(convert(tmp_path / "a.parquet"), "token_id")[1].tolist() == lines[1]["response_ids"]
    bundle = convert(lines, *"--step 12 --grad-norm 500 --usual-norm 0.5 --model weights --temperature 0.9".split())
    (saved, *_) = bundle.micro_batches.values()
    assert saved.rows[0].input_ids.tolist() == lines[0]["prompt_ids"] + lines[0]["response_ids"]
    assert saved.rows[0].response_length == LENGTHS[0][1]
    rows = [row for each in bundle.micro_batches.values() for row in each.rows]
    assert [row.temperature for row in rows] == [0.7, 0.9, 0.9, 0.9]
    assert len(bundle.micro_batches) == len(lines)  # a micro-batch for each, as none is named
    for name in ("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantage", "response_mask"):
        key = f"{name}s" if name != "response_mask" else name
        for line, values in zip(lines, flat(bundle, name), strict=True):
            torch.testing.assert_close(values, torch.tensor(line[key]).float() * torch.tensor(line["response_mask"]))
    event = bundle.event
    assert event["global_step"] == 12 and event["global_norm"] == 500.0
    # Five times what the usual norm is for a token that all are like.
    assert event["global_threshold"] == pytest.approx(2.5)
    first = event["suspected"][0]
    assert (first["row"], first["position"], first["uid"]) == (*BAD, "prompt 0")
    assert bundle.manifest["model"]["path"] == os.path.abspath("weights")
    notes = " ".join(bundle.manifest["converted"]["notes"])
    assert "The coefficients are computed from the loss" in notes and "Fields that were not read: text." in notes
    assert "--search --model weights" in capsys.readouterr().out
    out = str(bundle.path.parents[1])
    assert report([out]) == 0 and not read(out).skipped
    assert "unsearched" in capsys.readouterr().out


def test_log_probs_at_other_positions_are_told_without_a_search(convert: Any, capsys: Capsys) -> None:
    lines = []
    for seed in range(8):
        torch.manual_seed(seed)
        log_probs = -3 * torch.rand(30) ** 2
        rollout = (log_probs.roll(1) + 0.01 * torch.randn(30)).clamp(max=-1e-4).tolist()
        line = {"prompt_ids": [1], "response_ids": [seed] * 30, "advantages": [1.0 - seed % 2 * 2] * 30}
        line |= dict.fromkeys(("log_probs", "old_log_probs"), log_probs.tolist())
        lines.append({**line, "rollout_log_probs": rollout})
    event = convert(lines).event
    assert event["verdict"]["cause"] == "misaligned"
    assert {name for name, each in event["identities"].items() if each["state"] == "broken"} == {"rollout_log_probs"}
    printed = capsys.readouterr().out
    assert event["verdict"]["sentence"] in printed and "Broken identities: rollout_log_probs (misaligned);" in printed


@cases(
    "missing options note ratio",
    ("old_log_probs", [], "all ratios are 1", None),
    ("log_probs", [], "old_log_probs are taken instead", 1.0),
    ("ref_log_probs", ["--old-from-rollout"], "", math.exp(0.1)),
    ("ref_log_probs", ["--grad-norm", "1"], "The gradient norm 1 is under its threshold", 1.0),
)
def test_what_is_odd_is_noted(convert: Any, missing: str, options: list[str], note: str, ratio: float | None) -> None:
    lines = records()
    for line in lines:
        line["old_log_probs"], line["rollout_log_probs"] = line["log_probs"], [x - 0.1 for x in line["log_probs"]]
        del line[missing]
    bundle = convert(lines, *options)
    assert note in " ".join(bundle.manifest["converted"]["notes"])
    assert bundle.event["suspected"][0]["ratio"] == (ratio and pytest.approx(ratio))
    for line, coefficient in zip(lines, flat(bundle, "coefficient"), strict=True):
        moved = torch.tensor(line["advantages"]) * torch.tensor(line["response_mask"])
        torch.testing.assert_close(coefficient, -(ratio or 1.0) * moved / count_of(lines))


NAN = [math.nan, *[1.0] * 6]
IDS = "it must be a list of token ids, whole numbers from 0 to 2^31 - 1."
NUMBERS = "it must be a list of numbers."
LENGTH = "field 'response_length': the response must have at least one token"
LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
ALL = range(4)


@cases(
    "changed fields message",
    ([1], {"advantages": [1.0] * 8}, "field 'advantages': it has 8 values, and the response 7 tokens."),
    ([1], {"advantages": NAN}, "field 'advantages': it is nan at index 0; if training had that"),
    ([1], {"response_mask": [0.5] * 7}, "field 'response_mask': it must be of zeros and ones."),
    *(([1], {"log_probs": value}, NUMBERS) for value in (["1"] * 7, "-1234567", [10**400] * 7)),
    ([1], {"log_probs": [0.5] * 7}, "field 'log_probs': a log-prob is not positive"),
    *(([1], {"response_ids": [1, 2, value, *[4] * 4]}, IDS) for value in (-3, 3.5, 2**40, 10**400, True)),
    ([1], {"temperature": 0}, "field 'temperature': it must be a positive number, and"),
    ([1], {"uid": ["x"]}, "field 'uid': it must be a text or a whole number, and is ['x']."),
    ([2], {"prompt_ids": []}, LENGTH),
    ([0], {"response_ids": None}, "field 'response_ids': a record needs prompt_ids and response_ids"),
    ([0], {"advantages": None}, "field 'advantages': it is missing, and so is 'coefficients'."),
    ([0], {"ref_log_probs": None}, "line 2 has values for 'ref_log_prob', and"),
    ([0], {"micro_batch": 1}, " names a micro-batch, and"),
    (ALL, {"advantages": 0.0}, "No token can move: all advantages or coefficients are zero, or clipped."),
    (ALL, dict.fromkeys(LOG_PROBS), "field 'log_probs': it is missing, and so are"),
    # The threshold is computed from all weights.
    ([0], {"weights": [math.inf] * 5}, "field 'weights': it is inf at index 0."),
)
def test_the_wrong_field_of_a_record_is_named(
    refused: Any, changed: list[int], fields: dict[str, Any], message: str
) -> None:
    lines = records()
    for index in changed:
        lines[index] |= fields
    error = refused(lines, *(["--keep-nonfinite"] if "weights" in fields else []))
    assert message in error and (f"line {changed[0] + 1}" in error or "No token" in error)


def test_nan_is_kept_on_request_and_may_be_behind_the_mask(convert: Any) -> None:
    lines = records()
    lines[0]["response_length"] = 2.5  # not read beside response_ids
    lines[2]["log_probs"][1] = math.nan
    lines[2]["advantages"] = [-0.0, None, math.inf, -0.0]
    bundle = convert(lines, "--kl-coef", "0.1")
    assert all(bool(values.isfinite().all()) for values in flat(bundle, "coefficient"))
    lines[1]["advantages"] = NAN
    first = convert(lines, "--keep-nonfinite").event["suspected"][0]
    assert (first["row"], first["position"], first["source"]) == (1, 0, "nonfinite")


def test_files_that_are_not_read(refused: Any, tmp_path: Path) -> None:
    for name, content, message in (
        ("c.jsonl", b"\n[1]\n", "line 2 is not an object with fields."),
        ("d.jsonl", b"[" * 10**5, "line 1 cannot be parsed: it nests too deep."),
        ("e.jsonl", b" " * (LINE_BYTES + 1), f"line 1 has over {LINE_BYTES:,} bytes."),
        ("31.pt", b"", "has no records: if it is slime's, examples/slime_records.py makes them of it.\n"),
    ):
        (tmp_path / name).write_bytes(content)
        assert message in refused(tmp_path / name)
    lines = [{**line, "weights": [1e200] * len(line["response_ids"])} for line in records()]
    assert "both must be positive and finite" in refused(lines, "--usual-norm=1")
    assert "There is no record." in refused([])
    texts = dict.fromkeys(("prompt", "completion"), "a")
    recording = "texts only, no token ids; in TRL, train with RecordingTrainer of examples/trl"
    assert recording in refused([texts])
    for columns, message in (
        (texts, recording),
        ({"text": "a"}, "has no column 'response_ids' or 'input_ids', and records need token ids."),
        ({**texts, "response_ids": [1]}, "row 1, field 'response_ids': a record needs prompt_ids and response_ids"),
    ):
        pandas.DataFrame([columns]).to_parquet(tmp_path / "g.parquet")
        assert message in refused(tmp_path / "g.parquet")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not an ordinary file." in refused(tmp_path / "pipe.jsonl")
    with (tmp_path / "huge.jsonl").open("wb") as file:
        file.truncate(record_files.FILE_BYTES + 1)
    assert "bytes, and 2,147,483,648 are the limit." in refused(tmp_path / "huge.jsonl")


def test_padding_does_not_fill_the_memory(refused: Any, monkeypatch: Patch) -> None:
    """One long response beside many short ones."""
    monkeypatch.setattr(batch, "pad_sequence", pytest.fail)
    short, long = records()[:2]
    long |= {name: 1000 * value for name, value in long.items() if name != "prompt_ids" and isinstance(value, list)}
    monkeypatch.setattr(limits, "BUNDLE_BYTES", 2**22)
    monkeypatch.setattr(limits, "TOTAL_BYTES", 2**18)
    for options, what in ((["--micro-batch-size", "41"], "a micro-batch"), ([], "all micro-batches")):
        assert f"padded to the longest, {what} would have over" in refused([short] * 40 + [long], *options)


def test_an_error_names_a_file_as_it_was_given(refused: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lower.jsonl").write_text("[1]\n")
    assert refused(Path("lower.jsonl")).startswith("lower.jsonl, line 1 is not an object")
    monkeypatch.setattr(limits, "MANIFEST_BYTES", 0)
    assert refused(records()).startswith("No bundle is written: its manifest would take ")
    with pytest.raises(SystemExit, match="2"):
        main(["lower.jsonl", "--out", "lower.jsonl"])


def test_a_line_that_grows_does_not_fill_the_memory(refused: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"[{'0.5,' * 4 * 10**6}1]\n")
    monkeypatch.setattr(record_files, "MEMORY_BYTES", 2**25)
    assert "Reading the files takes over 33,554,432 bytes of memory." in refused(file)


def example(name: str) -> Callable[..., Any]:
    return runpy.run_path(str(trees.ROOT / "examples" / name))["main"]


def slime_columns() -> dict[str, list[Any]]:
    """What slime has of the responses, by its names."""
    lines, tensors = records(), {"log_probs", "rollout_log_probs", "advantages"}
    columns = {name: [torch.tensor(line[name]) for line in lines] for name in tensors}
    columns["tokens"] = [torch.tensor(line["prompt_ids"] + line["response_ids"]) for line in lines]
    columns["loss_masks"] = [torch.tensor(line["response_mask"], dtype=torch.int32) for line in lines]
    return {**columns, "response_lengths": [response for _, response in LENGTHS]}


# slime's form since 681b3adca: `_build_dump_payload` in slime/observability/train_data_utils.py.
def slime_file(path: Path, first: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Two data-parallel ranks with two steps; the samples of a rollout share the sum of their masks."""
    samples: Records = [{"data_parallel_rank": i % 2, "rollout_position": i, "rollout_ids": i // 2} for i in range(4)]
    for index, sample in enumerate(samples):
        sample["rollout_mask_sums"] = torch.tensor(12.0 if index < 2 else 8.0)
        sample |= {name: column[index] for name, column in slime_columns().items()}
    samples[0] |= first or {}
    layout = {"micro_batch_indices": [[0], [1]], "num_microbatches": [1, 1], "global_batch_sizes": [1, 1]}
    shards = [{"data_parallel_rank": rank, "partition": [rank, rank + 2], **layout} for rank in range(2)]
    data = {"format_version": 2, "rollout_id": 31, "samples": samples, "dp_shards": shards, "raw_reward": [1]}
    torch.save({**data, **changes}, path)
    return path


def slime_records(file: Path, **options: Any) -> Path:
    """The records that the example makes of a file of slime's."""
    records = file.with_suffix(".jsonl")
    example("slime_records.py")([file], records, **options)
    return records


def test_slime_train_data(convert: Any, tmp_path: Path, capsys: Capsys) -> None:
    records_of_it = slime_records(slime_file(tmp_path / "31.pt"))
    assert capsys.readouterr().out == f"2 records. Next: gradloc convert {records_of_it} --out spike --step 31\n"
    assert checked(records_of_it, capsys) == "2 responses of step 31"
    bundle = convert(records_of_it, "--step", "31")
    assert (bundle.event["global_step"], bundle.event["world_size"]) == (31, 2)
    assert bundle.rows == {(0, 0): [0], (1, 0): [0]}  # the first of each rank's two samples: the first step
    for line, weight, coefficient in zip(records(), flat(bundle, "weight"), flat(bundle, "coefficient"), strict=False):
        # The rollout's mean over its 12 tokens, one rollout in the step; a rank's loss is two times its share.
        torch.testing.assert_close(weight, torch.full_like(weight, 2 / 12))
        torch.testing.assert_close(coefficient, -weight * torch.tensor(line["advantages"]))
    first = bundle.event["suspected"][0]
    assert (first["rank"], first["position"]) == (1, BAD[1]) and "not looked at" not in bundle.event["summary"]
    of_second = slime_records(slime_file(tmp_path / "31.pt"), step=1, per_token_loss=True)
    assert "--step 31 --loss-agg-mode token-mean\n" in capsys.readouterr().out
    weights = flat(convert(of_second, "--loss-agg-mode", "token-mean"), "weight")
    torch.testing.assert_close(weights[1], torch.full((6,), 2 / 8))


def test_slime_train_data_of_its_earlier_form(convert: Any, tmp_path: Path, capsys: Capsys) -> None:
    columns, file = slime_columns(), tmp_path / "4_0.pt"
    torch.save({"rollout_id": 4, "rank": 0, "rollout_data": columns}, file)
    records_of_it = slime_records(file)
    options = capsys.readouterr().out.split("--out spike")[1].split()
    assert options == ["--step", "4", "--loss-agg-mode", "seq-mean-token-mean"]
    bundle = convert(records_of_it, *options)
    assert bundle.event["global_step"] == 4 and bundle.event["world_size"] == 1
    for length, mask, weight in zip((5, 7, 2, 6), columns["loss_masks"], flat(bundle, "weight"), strict=True):
        torch.testing.assert_close(weight, mask / (length * 4))
    torch.save({"rollout_data": {**columns, "log_probs": columns["log_probs"][:3]}}, file)
    with pytest.raises(RecordError, match="field 'log_probs': it has 3 samples, and 'response_lengths' has 4."):
        slime_records(file)


def deflate(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as deflated:
        deflated.writestr("archive/data.pkl", b"0" * 10**6)


REPEATED = torch.zeros(1).expand(2**33)
NOT_READ = "it has more than tensors and plain values, or is damaged"
DAMAGED = "is damaged, or older than torch 1.6: load it, and save it again."
NO_LIST = "sample 0, field 'advantages': it must be a list of at most 4,194,304"
SLIME: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda f: slime_file(f, more=Pickled(f.with_name("marker"))), NOT_READ),
    "compressed": (deflate, "a.pt is compressed, and files that torch.save writes are not."),
    "cut off": (lambda f: f.write_bytes(slime_file(f).read_bytes()[:1000]), DAMAGED),
    "no shards": (lambda f: slime_file(f, dp_shards=[]), "a.pt: there is no sample."),
    "numpy": (lambda f: slime_file(f, {"advantages": np.ones(5)}), "field 'advantages': save it as a tensor or"),
    "repeated": (lambda f: slime_file(f, {"advantages": REPEATED}), NO_LIST),
}


@pytest.mark.parametrize("broken", SLIME)
def test_a_file_of_slime_that_is_not_read(tmp_path: Path, broken: str) -> None:
    write, message = SLIME[broken]
    write(tmp_path / "a.pt")
    with pytest.raises(RecordError, match=re.escape(message)) as refusal:
        slime_records(tmp_path / "a.pt")
    assert not (tmp_path / "a.jsonl").exists() and "\n" not in str(refusal.value)
    assert not (tmp_path / "marker").exists()
    if broken == "code":
        torch.load(tmp_path / "a.pt", weights_only=False)
        assert (tmp_path / "marker").exists()  # so it works


def test_the_example_for_nemo_rl_makes_records(tmp_path: Path, capsys: Capsys) -> None:
    """A line as `log_batched_dict_as_jsonl` writes it: lists of one entry over the padded sequence, and `idx`."""
    logged, lines, width = [], records(), 9 + 2
    names = {"response_ids": "token_ids", "response_mask": "token_loss_mask", "advantages": "advantages"}
    names |= {"rollout_log_probs": "generation_logprobs", "old_log_probs": "prev_logprobs"}
    for index, record in enumerate(lines):
        prompt = len(record["prompt_ids"])
        length = prompt + len(record["response_ids"])
        line = {"content": ["text"], "input_lengths": [length], "sample_loss_mask": [1.0], "idx": index}
        for own, name in names.items():
            before = record["prompt_ids"] if own == "response_ids" else [0] * prompt
            line[name] = [before + record[own] + [0] * (width - length)]
        logged.append(line)
    logged.append({**logged[0], "sample_loss_mask": [0.0]})
    file = write_lines(tmp_path / "train_data_step12.jsonl", logged)
    example("nemo_rl_records.py")(file, tmp_path / "step12.jsonl")
    made = [json.loads(line) for line in (tmp_path / "step12.jsonl").read_text().splitlines()]
    assert made == [{name: record[name] for name in ("prompt_ids", *names)} for record in lines]
    told = f"4 records. Next: gradloc convert {tmp_path}/step12.jsonl --out spike --step 12\n"
    assert capsys.readouterr().out == told
    assert checked(tmp_path / "step12.jsonl", capsys) == "4 responses of step 12"


def prime_rl_export(folder: Path, **changes: Any) -> tuple[Path, Records]:
    """A step of prime-rl's token exports, in two files, as `TokenExporter` writes them: null for what is not finite."""
    (folder / "step_12").mkdir()
    lines = []
    for index, record in enumerate(records()):
        prompt, ids = len(record["prompt_ids"]), record["prompt_ids"] + record["response_ids"]
        line = {"schema_version": 1, "step": 12, "rank": index % 2, "micro_step": index // 2, "token_ids": ids}
        line |= {"loss_mask": [False] * prompt + [bool(each) for each in record["response_mask"]]}
        names = {"trainer_logprobs": "log_probs", "inference_logprobs": "old_log_probs", "advantages": "advantages"}
        line |= {name: [0.0] * prompt + record[own] for name, own in names.items()}
        advantage = torch.tensor(line["advantages"])
        trainer, inference = (torch.tensor(line[f"{of}_logprobs"]) for of in ("trainer", "inference"))
        risen, ratio = trainer.exp() - inference.exp(), trainer - inference
        line |= {"log_importance_ratio": ratio.tolist(), "importance_ratio": ratio.exp().tolist()}
        line |= {"is_masked": torch.where(advantage > 0, risen > 0.2, risen < -0.2).tolist()}
        line |= {"rl_weights": [None] * len(ids) if index else [2.0] * (len(ids) - 1) + [0.0]}
        line |= {"ce_weights": [None] * len(ids)}
        lines.append(line | (changes if index == 1 else {}))
    for rank in (0, 1):
        write_lines(folder / "step_12" / f"rank_{rank}.jsonl", lines[rank::2])
    return folder / "step_12", lines


def test_the_example_for_prime_rl_makes_records(convert: Any, tmp_path: Path, capsys: Capsys) -> None:
    """Coefficients are the gradient of its default loss, by autograd."""
    step, lines = prime_rl_export(tmp_path)
    example("prime_rl_records.py")(step, tmp_path / "step12.jsonl", 0.9, 0.05)
    told = f"4 records. Next: gradloc convert {tmp_path}/step12.jsonl --out spike --step 12\n"
    assert capsys.readouterr().out == told
    assert checked(tmp_path / "step12.jsonl", capsys) == checked(step, capsys) == "4 responses of step 12"
    assert main([str(step / "rank_0.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert (
        "rank_0.jsonl, line 1: an export of prime-rl's; examples/prime_rl_records.py makes" in capsys.readouterr().err
    )
    bundle = convert(tmp_path / "step12.jsonl", "--step", "12")
    log_probs = [torch.tensor(line["trainer_logprobs"], requires_grad=True) for line in lines]
    total, tokens, dropped = torch.zeros(()), 0, 0
    for line, log_prob in zip(lines, log_probs, strict=True):
        weight = torch.tensor([1.0 if each is None else each for each in line["rl_weights"]])
        mask = torch.tensor(line["loss_mask"]) & (weight != 0)
        log_ratio = log_prob - torch.tensor(line["inference_logprobs"])
        keep = ~torch.tensor(line["is_masked"])
        loss = 0.05 * log_ratio.square() - keep * 0.9 * torch.tensor(line["advantages"]) * log_ratio.exp()
        total = total + (loss * weight * mask).sum()
        tokens += int(mask.sum())
        dropped += int((mask & ~keep).sum())
    gradients = torch.autograd.grad(total / tokens, log_probs)
    assert dropped > 0 and bundle.event["world_size"] == 2
    for index, coefficient in zip((0, 2, 1, 3), flat(bundle, "coefficient"), strict=True):
        expected = gradients[index][-LENGTHS[index][1] :]
        torch.testing.assert_close(coefficient, 2 * expected)  # a rank's part of the mean over two
    place = (bundle.event["suspected"][0][name] for name in ("rank", "micro_batch", "position"))
    assert tuple(place) == (1, 0, BAD[1])


def test_an_export_of_prime_rl_for_another_loss_is_refused(tmp_path: Path) -> None:
    step, _ = prime_rl_export(tmp_path, ce_weights=[0.5] * 9)
    with pytest.raises(SystemExit, match="it is also trained by another loss"):
        example("prime_rl_records.py")(step, tmp_path / "step12.jsonl")


@cases("name source", ("nemo_rl", "logged.jsonl"), ("prime_rl", "rank_0.jsonl"), ("slime", "a.pt"))
def test_an_example_says_in_a_sentence_what_it_cannot_read(
    tmp_path: Path, monkeypatch: Patch, name: str, source: str
) -> None:
    given = tmp_path if name == "prime_rl" else tmp_path / source
    for content in (None, "[1]\n", '{"token_ids": []}\n', "{\n"):
        if content is not None:
            (tmp_path / source).write_text(content)
        monkeypatch.setattr(sys, "argv", ["example", str(given), str(tmp_path / "out.jsonl")])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(trees.ROOT / f"examples/{name}_records.py"), run_name="__main__")
        assert str(tmp_path) in str(end.value.code) and "\n" not in str(end.value.code)
        assert not (tmp_path / "out.jsonl").exists()


class FakeTrainer:
    """What TRL's trainer has that the example uses."""

    accelerator = SimpleNamespace(process_index=0)
    state = SimpleNamespace(global_step=11)

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs

    def _get_per_token_logps_and_entropies(self) -> tuple[Tensor, None]:
        return self.log_probs, None

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        return self._get_per_token_logps_and_entropies()[0].sum()


def test_the_example_for_trl_makes_records(convert: Any, tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOTrainer=FakeTrainer))
    trainer = runpy.run_path(str(trees.ROOT / "examples/trl_records.py"))["RecordingTrainer"]
    lines = records()
    for line in lines:
        line |= {"prompt_mask": [1] * len(line["prompt_ids"]), "tokens": [1] * len(line["response_ids"])}
    inputs = {
        "prompt_ids": padded(lines, "prompt_ids").long(),
        "prompt_mask": padded(lines, "prompt_mask").long(),
        "completion_ids": padded(lines, "response_ids").long(),
        "completion_mask": padded(lines, "tokens").long(),
        "tool_mask": padded(lines, "response_mask").long(),
        "advantages": torch.tensor([line["advantages"][0] for line in lines]),
        "old_per_token_logps": padded(lines, "old_log_probs"),
        "importance_sampling_ratio": torch.full((len(lines), 1), 0.5),
    }
    monkeypatch.chdir(tmp_path)
    trainer(padded(lines, "log_probs"))._compute_loss(None, inputs)
    assert checked(tmp_path / "step12-rank0.jsonl", capsys) == "4 responses of step 12"
    bundle = convert(tmp_path / "step12-rank0.jsonl", "--clip-low", "9", "--clip-high", "9")
    for line, coefficient in zip(lines, flat(bundle, "coefficient"), strict=True):
        mask = torch.tensor(line["response_mask"])
        ratio = (torch.tensor(line["log_probs"]) - torch.tensor(line["old_log_probs"])).exp()
        torch.testing.assert_close(coefficient, -0.5 * line["advantages"][0] * ratio * mask / count_of(lines))


def test_a_search_of_the_bundle_finds_the_planted_token(convert: Any, tmp_path: Path, capsys: Capsys) -> None:
    model, lines, folder = small_model(), records(), str(tmp_path / "its model")
    model.save_pretrained(folder)
    for index, line in enumerate(lines):
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        _, (log_prob,) = log_probs_of(lambda ids: model(ids).logits / 0.8, ids, len(line["prompt_ids"]))
        line["log_probs"] = line["old_log_probs"] = log_prob.tolist()
        del line["ref_log_probs"], line["rollout_log_probs"]
        if index == BAD[0]:
            loss = lines[BAD[0]]["advantages"][BAD[1]] * log_prob[BAD[1]]
            gradients = torch.autograd.grad(loss, list(model.parameters()))
    token_norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
    options = ["--model", folder, "--temperature", "0.8", "--grad-norm", "500", "--step", "3", "--usual-norm", "2"]
    bundle = convert(lines, *options)
    commands = commands_in(capsys.readouterr().out)
    assert [command.split()[:2] for command in commands] == [["gradloc", "replay"], ["gradloc", "report"]]
    for command in commands:
        trees.ran(run_as_printed(command))
    (event,) = read(str(bundle.path.parents[1])).events
    assert (event["search"], event["diagnosis"], event["suspected"]) == ("replayed", "tokens", [])
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["position"]) == BAD
    assert culprit["grad_norm"] == pytest.approx(token_norm, rel=1e-4)
    assert event["global_step"] == 3 and event["global_norm"] == 500
