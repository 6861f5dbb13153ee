"""`gradloc check`: faults planted in files at their places, healthy files, and files that cannot be read."""

import json
import math
import pickle
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from notation import Capsys, cases
from pages import unpacked
from small_bundles import Pickled
from tensordict import NonTensorStack, TensorDict

import trees
from gradloc.check import command
from gradloc.convert import batches
from gradloc.convert import records as record_files
from gradloc.convert.command import main as convert
from gradloc.convert.told import told_by_bundle
from gradloc.evidence.writer import record_step
from gradloc.judge import Run
from gradloc.judge.identities import IDENTITIES
from gradloc.tools.opening import open_bundle

Records = list[dict[str, Any]]
END = 2
LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")


def healthy(seed: int = 0) -> Records:
    """Four responses to each of eight prompts, as GRPO trains on them: engines are 0.003 nats apart."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for prompt in range(8):
        rewards = [float(each) for each in torch.randint(2, (4,), generator=generator)]
        ids = torch.randint(5, 900, (6,), generator=generator).tolist()
        for reward in rewards:
            length = int(torch.randint(50, 70, (), generator=generator))
            log_probs = -torch.empty(length).exponential_(1.2, generator=generator)

            def near(by: float, log_probs: Any = log_probs) -> list[float]:
                noise = by * torch.randn(len(log_probs), generator=generator)
                return (log_probs + noise).clamp(max=-1e-5).tolist()  # type: ignore[no-any-return]

            found.append(
                {
                    "prompt_ids": ids,
                    "response_ids": [*torch.randint(5, 900, (length - 1,), generator=generator).tolist(), END],
                    "response_mask": [1] * length,
                    "advantages": reward - sum(rewards) / 4,
                    **dict(zip(LOG_PROBS, map(near, (0, 5e-4, 3e-3, 0.15)), strict=True)),
                    "uid": f"prompt {prompt}",
                    "reward": reward,
                    "rank": prompt % 2,
                }
            )
    return found


def write(path: Path, lines: Records) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def check(capsys: Capsys) -> Callable[..., dict[str, Any]]:
    """Gives what `--json` prints, after the exit code that is expected."""

    def call(code: int, *arguments: str | Path) -> dict[str, Any]:
        assert command.main([*map(str, arguments), "--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert bool(found["warnings"]) == bool(code)
        assert list(found["identities"]) == [identity.name for identity in IDENTITIES]
        return found

    return call


@pytest.fixture
def refused(capsys: Capsys) -> Callable[..., str]:
    """Gives the sentence with which files are refused."""

    def call(*paths: Path) -> str:
        assert command.main([*map(str, paths)]) == 2
        written, error = capsys.readouterr()
        assert written == "" and error.count("\n") == 1, error
        return error

    return call


def states(found: dict[str, Any], state: str) -> set[str]:
    return {name for name, each in found["identities"].items() if each["state"] == state}


def late(line: dict[str, Any], _: int) -> None:
    line["rollout_log_probs"] = line["rollout_log_probs"][:1] + line["rollout_log_probs"][:-1]


def without_end(line: dict[str, Any], _: int) -> None:
    line["response_mask"] = [int(token != END) for token in line["response_ids"]]


def in_log2(line: dict[str, Any], _: int) -> None:
    line["rollout_log_probs"] = [each / math.log(2) for each in line["rollout_log_probs"]]


def alone(line: dict[str, Any], i: int) -> None:
    line["uid"] = f"row {i}"


def one_nan(line: dict[str, Any], i: int) -> None:
    if i == 5:
        line["rollout_log_probs"][7] = math.nan


def three_zeros(line: dict[str, Any], _: int) -> None:
    line["rollout_log_probs"][-3:] = [0.0] * 3


def moved_advantages(lines: Records) -> None:
    values = [line["advantages"] for line in lines]
    for line, value in zip(lines, values[3:] + values[:3], strict=True):
        line["advantages"] = value


def one_seed(lines: Records) -> None:
    """The last response of each prompt is the one before it, with all that is known of its tokens."""
    for i in range(3, len(lines), 4):
        lines[i] |= {name: lines[i - 1][name] for name in ("response_ids", "response_mask", *LOG_PROBS)}


def interleaved(lines: Records) -> None:
    """Prompts repeated as a whole list, uids one by one."""
    for i, line in enumerate(lines):
        line["uid"] = f"prompt {i % 8}"


def own_reference(line: dict[str, Any], _: int) -> None:
    line["ref_log_probs"] = line["old_log_probs"]


def reference_of_the_rollout(line: dict[str, Any], _: int) -> None:
    line["rollout_log_probs"] = line["ref_log_probs"]


@cases(
    "plant identity name",
    (late, "rollout_log_probs", "misaligned"),
    (in_log2, "rollout_log_probs", "other_log_probs"),
    (without_end, "sampled", "mask"),
    (three_zeros, "sampled", "unsampled"),
    (alone, "groups", "groups_of_one"),
    (one_nan, "finite", "nonfinite"),
    (own_reference, "reference", "reference"),
    (reference_of_the_rollout, "rollout_log_probs", "stale_weights"),
    (moved_advantages, "advantages", "advantage_order"),
    (one_seed, "responses", "repeated_responses"),
    (interleaved, "groups", "mixed_groups"),
)
def test_a_planted_fault_is_named(check: Any, tmp_path: Path, plant: Any, identity: str, name: str) -> None:
    lines = healthy()
    if "lines" in plant.__annotations__:
        plant(lines)
    else:
        for i, line in enumerate(lines):
            plant(line, i)
    found = check(1, write(tmp_path / "a.jsonl", lines))
    assert [(each["identity"], each["name"]) for each in found["warnings"]] == [(identity, name)]
    assert states(found, "broken") == {identity} and 1 <= len(found["rows"]) <= 4
    rows = [(row["row"], row.get("tokens")) for row in found["rows"]]
    if identity in ("responses", "groups", "advantages"):
        assert all(tokens is None for _, tokens in rows)
        return
    if plant == one_nan:
        (where, tokens), *_ = rows
        assert where == "rank 1, row 1" and tokens[3]["position"] == 7 and tokens[3]["rollout_log_prob"] == "NaN"
    if plant == without_end:
        assert [token["response_mask"] for token in rows[0][1]] == [1, 1, 1, 1, 1, 0]
    if plant == three_zeros:
        assert 0.0 in [token["rollout_log_prob"] for token in rows[0][1]]


def test_old_log_probs_of_another_temperature_come_first(check: Any, tmp_path: Path) -> None:
    """The rollout's are compared with them, and differ as well."""
    lines = healthy()
    for line in lines:
        line["old_log_probs"] = [each * 1.25 for each in line["old_log_probs"]]
    first, *others = check(1, write(tmp_path / "a.jsonl", lines))["warnings"]
    assert first["name"] == "old_log_probs" and {each["identity"] for each in others} <= {"rollout_log_probs"}


def test_the_rows_of_a_group_show_what_is_wrong(check: Any, tmp_path: Path) -> None:
    """They are in the order of what the identity compares."""
    lines = healthy()
    moved_advantages(lines)
    low, *_, high = rows = check(1, write(tmp_path / "a.jsonl", lines))["rows"]
    assert len({row["uid"] for row in rows}) == 1
    assert low["reward"] < high["reward"] and low["advantage"] > high["advantage"]
    lines = healthy()
    one_seed(lines)
    rows = check(1, write(tmp_path / "a.jsonl", lines))["rows"]
    assert len({row["uid"] for row in rows}) == 1 and len({row["response"] for row in rows}) == 3 < len(rows)
    lines = healthy()
    interleaved(lines)
    rows = check(1, write(tmp_path / "a.jsonl", lines))["rows"]
    assert len({row["uid"] for row in rows}) == 1 < len({row["prompt"] for row in rows})


@cases("plant column", (moved_advantages, "advantage"), (one_seed, "response"), (interleaved, "prompt"))
def test_the_rows_of_a_large_group_show_what_is_wrong(check: Any, tmp_path: Path, plant: Any, column: str) -> None:
    """At most sixteen are shown."""
    lines = [line for i in range(8) for line in healthy(seed=i)]
    plant(lines)
    for i, line in enumerate(lines):
        line["uid"] = f"group {i % 2}" if column == "prompt" else "group"
    rows = check(1, write(tmp_path / "a.jsonl", lines))["rows"]
    of = [row[column] for row in rows]
    assert len(rows) == 16 and len({row["uid"] for row in rows}) == 1
    assert len(set(of)) < 16 if column == "response" else len(set(of)) > 1


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_step_holds(check: Any, tmp_path: Path, seed: int) -> None:
    found = check(0, write(tmp_path / "a.jsonl", healthy(seed)))
    assert states(found, "unchecked") == {"loss", "gradient", "weights"} and found["rows"] == []
    # The first step of a run: the reference is the policy.
    lines = [{**line, "ref_log_probs": line["log_probs"]} for line in healthy(seed)]
    assert states(check(0, write(tmp_path / "a.jsonl", lines), "--first-step"), "broken") == set()
    lines[0]["ref_log_probs"] = [each * 2 for each in lines[0]["ref_log_probs"]]
    named = check(1, write(tmp_path / "a.jsonl", healthy(seed)), "--first-step")["warnings"]
    assert [each["identity"] for each in named] == ["reference"]


def test_a_reference_that_the_policy_leaves_shows_which_step_is_the_first(check: Any, tmp_path: Path) -> None:
    """Then engines have the same weights there: 0.2 nats that are in every step are not those of a late rollout."""
    lines = []
    for step in range(4):
        for line in healthy(step):
            far = [each - 0.2 for each in line["rollout_log_probs"]]
            same = {"ref_log_probs": line["old_log_probs"]} if step == 0 else {}
            lines.append({**line, **same, "rollout_log_probs": far, "step": step})
    file = write(tmp_path / "a.jsonl", lines)
    (told,) = check(1, file)["warnings"]
    assert told["identity"] == "rollout_log_probs" and told["since"] == 0
    assert told["times"] == check(1, file, "--first-step")["warnings"][0]["times"] > 4


@cases(
    "left_out identity why",
    (["log_probs"], "old_log_probs", "no log_probs"),
    (["rollout_log_probs"], "rollout_log_probs", "no rollout_log_probs"),
    (["rollout_log_probs"], "sampled", "no rollout_log_probs"),
    (["log_probs", "old_log_probs"], "rollout_log_probs", "no log-probs of training"),
    ([*LOG_PROBS], "finite", "no log-probs"),
    (["uid"], "groups", "no uid"),
    (["reward"], "advantages", "no reward"),
    (["ref_log_probs"], "reference", "no ref_log_probs"),
    ([], "loss", "no coefficients and no weights"),
    ([], "weights", "only training sees it"),
)
def test_what_is_missing_is_named(check: Any, tmp_path: Path, left_out: list[str], identity: str, why: str) -> None:
    lines = [{name: value for name, value in line.items() if name not in left_out} for line in healthy()]
    state = check(0, write(tmp_path / "a.jsonl", lines))["identities"][identity]
    assert (state["state"], state["missing"]) == ("unchecked", why)


def test_log_probs_that_stand_for_others_are_not_compared_with_themselves(check: Any, tmp_path: Path) -> None:
    """The loss's ratio is to the rollout's log-probs, and the update's own forward is not recorded."""
    lines = [{**line, "old_log_probs": line["rollout_log_probs"]} for line in healthy()]
    assert "rollout_log_probs" in states(check(0, write(tmp_path / "a.jsonl", lines)), "held")
    for line in lines:
        del line["log_probs"]
    found = check(0, write(tmp_path / "a.jsonl", lines))
    assert {"rollout_log_probs", "sampled", "old_log_probs"} <= states(found, "unchecked")


def test_coefficients_are_checked_where_they_are_given(check: Any, tmp_path: Path) -> None:
    lines = healthy()
    tokens = sum(len(line["response_ids"]) for line in lines)
    for line in lines:
        del line["ref_log_probs"]
        line["weights"] = [1 / tokens] * len(line["response_ids"])
        line["coefficients"] = [-line["advantages"] / tokens] * len(line["response_ids"])
    assert "loss" in states(check(0, write(tmp_path / "a.jsonl", lines)), "held")
    for line in lines:
        line["coefficients"] = [2 * each for each in line["coefficients"]]
    (warning,) = check(1, write(tmp_path / "a.jsonl", lines))["warnings"]
    assert warning["name"] == "loss_scale" and warning["factor"] == pytest.approx(2, rel=0.01)


def test_steps_are_checked_in_their_order(check: Any, tmp_path: Path) -> None:
    """The fault is in steps 9 to 11 of 6 to 14; names sort otherwise, and a step has a file for each rank."""
    for step in range(6, 15):
        lines = healthy(step)
        for i, line in enumerate(lines):
            if 9 <= step <= 11:
                late(line, i)
        for rank in (0, 1):
            of_rank = [line for line in lines if line["rank"] == rank]
            write(tmp_path / f"step{step}-rank{rank}.jsonl", of_rank)
    found = check(1, tmp_path)
    assert found["where"] == "288 responses of 9 steps"
    assert [(each["identity"], each["name"], each["since"]) for each in found["warnings"]] == [
        ("rollout_log_probs", "misaligned", 9)
    ]
    assert found["identities"]["rollout_log_probs"]["missing"] == "holds again"
    assert "checkpoint" not in found["warnings"][0]["sentence"]
    tokens = found["rows"][0]["tokens"]  # of step 9: in step 13, nothing is wrong
    assert all(after["rollout_log_prob"] == pytest.approx(one["log_prob"], abs=0.02) for one, after in pairwise(tokens))
    assert states(check(0, *(tmp_path / f"step{step}-rank0.jsonl" for step in (14, 6, 13))), "broken") == set()
    # Steps of one file are told apart by the field.
    one = [{**line, "step": step} for step in (3, 1, 2) for line in healthy(step)]
    assert check(0, write(tmp_path / "all.jsonl", one))["where"] == "96 responses of 3 steps"


def test_an_identity_that_was_off_in_one_step_is_told(tmp_path: Path, capsys: Capsys) -> None:
    for step in range(1, 5):
        lines = healthy(step)
        for line in lines:
            del line["rollout_log_probs"]
            line["old_log_probs"] = [(1.06 if step == 3 else 1) * each for each in line["old_log_probs"]]
        write(tmp_path / f"step{step}.jsonl", lines)
    assert command.main([str(tmp_path)]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("old_log_probs")]
    assert (row[1], " ".join(row[3:])) == ("holds", "4.95 times the usual in step 3")


def test_parquet(check: Any, refused: Any, tmp_path: Path) -> None:
    lines = healthy()
    for i, line in enumerate(lines):
        late(line, i)
    pandas.DataFrame(lines).to_parquet(tmp_path / "a.parquet")
    assert check(1, tmp_path / "a.parquet")["warnings"][0]["name"] == "misaligned"
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    assert "b.parquet is damaged, or no Parquet" in refused(tmp_path / "b.parquet")


def columns_of(lines: Records, nested: bool = False) -> dict[str, Any]:
    """The columns of verl's batch."""
    names = {name: name for name in ("response_mask", "advantages", "old_log_probs", "rollout_log_probs")}
    names |= {"ref_log_probs": "ref_log_prob", "response_ids": "responses", "reward": "token_level_rewards"}
    lines = [{**line, "advantages": [line["advantages"]] * len(line["response_ids"])} for line in lines]
    for line in lines:
        line["reward"] = [0.0] * (len(line["response_ids"]) - 1) + [line["reward"]]
    rows = {own: [torch.tensor(line[name]) for line in lines] for name, own in names.items()}
    ids = [torch.tensor(line["prompt_ids"] + line["response_ids"]) for line in lines]
    if nested:
        rows = {**rows, "input_ids": ids}
        return {name: torch.nested.nested_tensor(of, layout=torch.jagged) for name, of in rows.items()}
    padded = {name: torch.nn.utils.rnn.pad_sequence(of, batch_first=True) for name, of in rows.items()}
    padded["input_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    padded["attention_mask"] = (padded["input_ids"] != 0).long()
    return padded


def saved_as_data_proto(path: Path, columns: dict[str, Any], uids: list[str]) -> None:
    from verl import DataProto

    batch = TensorDict(columns, batch_size=len(uids))
    uid = numpy.array(uids, dtype=object)
    DataProto(batch=batch, non_tensor_batch={"uid": uid}, meta_info={"global_steps": 7}).save_to_disk(path)


def saved_data_proto_by_torch(path: Path, columns: dict[str, Any], uids: list[str]) -> None:
    saved_as_data_proto(path, columns, uids)
    torch.save(pickle.loads(path.read_bytes()), path)


def saved_as_dict(path: Path, columns: dict[str, Any], uids: list[str]) -> None:
    torch.save({**columns, "uid": uids, "global_steps": 7}, path)


def saved_as_tensor_dict(path: Path, columns: dict[str, Any], uids: list[str]) -> None:
    found = TensorDict(columns, batch_size=len(uids))
    found["uid"] = NonTensorStack(*uids)
    torch.save(found, path)


@pytest.mark.parametrize("nested", [False, True])
@cases("save", saved_as_data_proto, saved_data_proto_by_torch, saved_as_dict, saved_as_tensor_dict)
def test_batches_of_verl(check: Any, tmp_path: Path, save: Any, nested: bool) -> None:
    lines, path = healthy(), tmp_path / "batch.pt"
    save(path, columns_of(lines, nested), [line["uid"] for line in lines])
    found = check(0, path)
    checked = {"finite", "rollout_log_probs", "sampled", "responses", "groups", "advantages", "reference"}
    assert states(found, "held") == checked and "32 responses" in found["where"]
    assert ("step 7" in found["where"]) == (save != saved_as_tensor_dict)
    assert found["identities"]["old_log_probs"]["missing"] == "no log_probs"
    for plant, name in ((late, "misaligned"), (alone, "groups_of_one"), (without_end, "mask")):
        lines = healthy()
        for i, line in enumerate(lines):
            plant(line, i)
        save(path, columns_of(lines, nested), [line["uid"] for line in lines])
        assert [each["name"] for each in check(1, path)["warnings"]] == [name]


def test_a_response_without_tokens_is_no_obstacle(check: Any, tmp_path: Path) -> None:
    masks, old = [torch.ones(4), torch.ones(0), torch.ones(3)], [-torch.ones(4), torch.ones(0), -torch.ones(3)]
    rollout = [-torch.ones(4), torch.ones(0), torch.tensor([-1.0, -1.0, 0.0])]
    columns = {"response_mask": masks, "old_log_probs": old, "rollout_log_probs": rollout}
    nested = {name: torch.nested.nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    torch.save(nested, tmp_path / "a.pt")
    found = check(1, tmp_path / "a.pt")
    assert "3 responses" in found["where"] and [row["row"] for row in found["rows"]] == ["row 2"]


def test_no_code_of_a_file_is_run(refused: Any, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, value in (("a.pkl", Pickled(marker)), ("b.pkl", {"response_mask": Pickled(marker)})):
        (tmp_path / name).write_bytes(pickle.dumps(value))
        refused(tmp_path / name)
    torch.save({"response_mask": Pickled(marker)}, tmp_path / "c.pt")
    error = refused(tmp_path / "c.pt")
    assert not marker.exists() and "no code of a file is run" in error and "DataProto.load_from_disk(path)" in error
    pickle.loads((tmp_path / "a.pkl").read_bytes())
    assert marker.exists()  # so it works


def test_the_lines_that_write_a_batch_safely_work(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl import DataProto

    lines, path = healthy(), tmp_path / "batch.pkl"
    saved_as_data_proto(path, columns_of(lines), [line["uid"] for line in lines])
    monkeypatch.chdir(tmp_path)
    code = batches.SAFELY.split("write its columns: ")[1]
    exec(code, {"DataProto": DataProto, "torch": torch, "path": path})
    assert "groups" in states(check(0, "batch.pt"), "held")


def test_a_file_that_takes_too_long_is_left(refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers with one hash make a dict that takes hours."""
    monkeypatch.setattr(batches, "SECONDS", 1)
    numbers = [i * (2**61 - 1) for i in range(1, 60_000)]
    stream = b"\x80\x02}(" + b"".join(pickle.dumps(each, 2)[2:-1] + b"K\x00" for each in numbers) + b"u."
    (tmp_path / "a.pkl").write_bytes(stream)
    assert "takes over 1 seconds to read" in refused(tmp_path / "a.pkl")


def test_files_that_are_not_read(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, content, message in (
        ("a.jsonl", b"[1]\n", "line 1 is not an object with fields."),
        ("b.jsonl", b"", "There is no record."),
        ("c.jsonl", b'{"input": "a", "output": "b"}\n', "texts only, no token ids; in verl, set"),
        ("rank_0.jsonl", b'{"token_ids": [1], "loss_mask": [true]}\n', "prime-rl's, and has no list 'advantages'."),
        ("rank_1.jsonl", b'{"token_ids": [1], "loss_mask": true}\n', "prime-rl's, and has no list 'loss_mask'."),
        ("d.pt", b"x", "no code of a file is run"),
        ("e.pkl", pickle.dumps([1]), "no code of a file is run"),
        ("f.pkl", pickle.dumps({"prompts": 1}), "it has no response_mask"),
        ("g.pkl", pickle.dumps({"rollout_data": {}}), "examples/slime_records.py makes records of it"),
    ):
        (tmp_path / name).write_bytes(content)
        assert message in refused(tmp_path / name)
    torch.save({"response_mask": torch.ones(2, 3), "old_log_probs": torch.ones(2, 4)}, tmp_path / "h.pt")
    assert "h.pt has columns that do not fit together" in refused(tmp_path / "h.pt")
    for shape in ((0, 3), (2, 0)):
        torch.save({"response_mask": torch.ones(shape)}, tmp_path / "h.pt")
        assert "there is no token" in refused(tmp_path / "h.pt")
    torch.save({"response_mask": torch.ones(1).expand(2**33)}, tmp_path / "i.pt")
    assert "is not read (ValueError)" in refused(tmp_path / "i.pt")
    assert "has no evidence, no bundle, and no file" in refused(tmp_path / "empty")
    assert "No such file or directory" in refused(tmp_path / "none.jsonl")
    with (tmp_path / "huge.pkl").open("wb") as file:
        file.truncate(record_files.FILE_BYTES + 1)
    assert "are the limit." in refused(tmp_path / "huge.pkl")
    record_step(str(tmp_path / "unchecked"), 1, {})
    assert "has no identities: an older release wrote it" in refused(tmp_path / "unchecked")
    with pytest.raises(SystemExit, match="2"):
        command.main([])


def test_a_bundle_of_a_real_spike(check: Any, capsys: Capsys) -> None:
    """Empty responses: their end tokens were added after the rollout, which has no log-probs of them.

    Training has seen it for one step, and waits; of a bundle alone, it is said at once.
    """
    bundle = trees.ROOT / "examples/spike/replay/step4-epoch0-mini_batch0"
    found = check(1, bundle)
    assert [(each["identity"], each["name"]) for each in found["warnings"]] == [("sampled", "unsampled")]
    assert [row["row"] for row in found["rows"]] == ["rank 0, row 5", "rank 1, row 3"]
    assert command.main([str(bundle)]) == 1
    printed = capsys.readouterr().out
    assert "6 of 7 identities hold in 8 responses of step 4. Broken: sampled." in printed
    assert "unsampled" in printed and "rank 1, row 3" in printed


def test_warnings_of_a_release_without_identities_are_not_of_the_tokens() -> None:
    bundle = open_bundle(trees.ROOT / "examples/spike/replay/step4-epoch0-mini_batch0")
    alone = told_by_bundle(bundle).answer()["warnings"]
    del bundle.event["identities"]
    bundle.event["warnings"] = [{"name": "loss_scale", "sentence": "It is off.", "check": "Look."}]
    assert told_by_bundle(bundle).answer()["warnings"] == alone != []


@cases("plant", late, three_zeros, alone)
def test_convert_says_the_same(check: Any, tmp_path: Path, capsys: Capsys, plant: Any) -> None:
    lines = healthy()
    for i, line in enumerate(lines):
        plant(line, i)
    file = write(tmp_path / "a.jsonl", lines)
    found = check(1, file)
    assert convert([str(file), "--out", str(tmp_path / "out")]) == 0
    event = json.loads((tmp_path / "out/spikes.jsonl").read_text())
    assert event["identities"] == found["identities"] and event["warnings"] == found["warnings"]
    assert event["verdict"]["cause"] == found["warnings"][0]["name"]
    assert f"({found['warnings'][0]['name']})" in capsys.readouterr().out
    of_bundle = check(1, tmp_path / "out" / event["replay"])
    assert of_bundle["identities"] == found["identities"]


def test_a_step_of_prime_rls_exports(check: Any, tmp_path: Path) -> None:
    for name in ("step_12", "plain"):
        (tmp_path / name).mkdir()
    for rank in (0, 1):
        exported = []
        for i, line in enumerate(healthy()):
            if line["rank"] == rank:
                late(line, i)
                length = len(line["prompt_ids"])
                one = {
                    "token_ids": line["prompt_ids"] + line["response_ids"],
                    "rank": rank,
                    "step": 12 if rank else None,
                }
                one["loss_mask"] = [False] * length + [True] * len(line["response_ids"])
                one["advantages"] = [0.0] * length + [line["advantages"]] * len(line["response_ids"])
                for name, own in (("trainer_logprobs", "log_probs"), ("inference_logprobs", "rollout_log_probs")):
                    one[name] = [0.0] * length + line[own]
                exported.append(one)
        write(tmp_path / "step_12" / f"rank_{rank}.jsonl", exported)
    with (tmp_path / "step_12" / "rank_1.jsonl").open("a") as file:  # a response without tokens of the loss
        file.write(json.dumps({**exported[0], "loss_mask": [False] * len(exported[0]["loss_mask"])}) + "\n")
    for path in (tmp_path, tmp_path / "step_12"):
        found = check(1, path)
        assert found["where"] == "32 responses of step 12"
        assert [each["name"] for each in found["warnings"]] == ["misaligned"]
    write(tmp_path / "plain" / "rank_0.jsonl", healthy())  # records may have the name of an export
    check(0, tmp_path / "plain")


def test_a_page(tmp_path: Path, capsys: Capsys) -> None:
    """It is drawn as the report is, and says what the terminal does."""
    lines = healthy()
    for i, line in enumerate(lines):
        late(line, i)
        line["uid"] = f"<script>{line['uid']}</script>"
    page = tmp_path / "check.html"
    assert command.main([str(write(tmp_path / "a.jsonl", lines)), "--html", str(page)]) == 1
    view, printed = unpacked(page.read_text()), " ".join(capsys.readouterr().out.split())
    assert "<script>prompt" not in page.read_text() and view["opening"] == []
    claim = "7 of 8 identities hold in 32 responses of one step. Broken: rollout_log_probs."
    ((said, (check,), _),) = view["warnings"]
    assert view["title"] == claim and said.startswith("rollout_log_probs (misaligned) is broken: Rollout log-probs")
    for text in (claim, said, check, *(table["title"] for table in view["tables"].values())):
        assert " ".join(text.split()) in printed
    state, (worst, *_) = view["tables"]["identities"]["rows"][3], view["tables"]["worst"]["rows"]
    assert state[:2] == ["rollout_log_probs", "broken"] and state[3] == "misaligned" and "<script>prompt" in worst[3]
    assert " ".join(state) in printed and " ".join(view["tables"]["beside"]["rows"][0]) in printed


def test_a_narrow_terminal_keeps_what_is_compared(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = healthy()
    for i, line in enumerate(lines):
        late(line, i)
    file = write(tmp_path / "a.jsonl", lines)
    for columns, left_out in (("80", {"token", "advantage"}), ("100", set())):
        monkeypatch.setenv("COLUMNS", columns)
        assert command.main([str(file)]) == 1
        (head,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("row  ")][1:]
        names = "row position token mask training old rollout reference advantage".split()
        assert head == [name for name in names if name not in left_out]


@cases("limit most message", ("RECORDS", 31, "31 records are the limit"), ("TOKENS", 100, "100 tokens are the limit"))
def test_a_step_has_at_most_so_many_records_and_tokens(
    check: Any, refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, message: str
) -> None:
    for step in (1, 2):
        write(tmp_path / f"step{step}.jsonl", healthy(step))
    monkeypatch.setattr(record_files, limit, most)
    assert message in refused(tmp_path)
    # Files of different steps are not read together.
    monkeypatch.setattr(record_files, limit, {"RECORDS": 32, "TOKENS": 2500}[limit])
    assert check(0, tmp_path)["where"] == "64 responses of 2 steps"
    assert "are the limit" in refused(write(tmp_path / "all.jsonl", healthy(1) + healthy(2)))


def test_evidence_is_checked_without_torch(tmp_path: Path) -> None:
    """What training said of its last step, in a Python in which nothing is installed."""
    run = Run()
    for step in (1, 2):
        run.start_update(step)
        record_step(str(tmp_path), step, {}, run.answer())
    done = trees.run(sys.executable, "-S", "-m", "gradloc", "check", tmp_path, "--json", cwd=trees.ROOT, PYTHONPATH="")
    assert states(json.loads(trees.ran(done)), "broken") == set()
    answer = run.answer()
    answer["identities"]["sampled"] = {"state": "broken", "times": 8.0, "since": 3, "missing": None}
    said = {"claim": "a", "evidence": "b", "sentence": "a (b).", "check": "c."}
    answer["warnings"] = [{"name": "mask", "identity": "sampled", "since": 3, "times": 8.0, **said}]  # type: ignore[typeddict-item]
    record_step(str(tmp_path), 3, {}, answer)
    done = trees.run(sys.executable, "-S", "-m", "gradloc", "check", tmp_path, "--json", cwd=trees.ROOT, PYTHONPATH="")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["identities"]["sampled"]["since"] == 3
    assert found["warnings"][0]["name"] == "mask" and "step 3 of" in found["where"]
    record_step(str(tmp_path), 4, {}, run.answer())
    done = trees.run(sys.executable, "-S", "-m", "gradloc", "check", tmp_path, "--json", cwd=trees.ROOT, PYTHONPATH="")
    state = json.loads(trees.ran(done))["identities"]["sampled"]
    assert state["state"] != "broken" and state["missing"]
