"""What is kept of micro-batches for a search, what is sent to other ranks, and what once culprits are known."""

import pickle
import types
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from notation import Patch
from torch import Tensor

from gradloc.evidence.event import token_facts_of
from gradloc.evidence.token_facts import response_kl, token_evidence
from gradloc.fsdp import collectives
from gradloc.measure.micro_batch import MicroBatch
from gradloc.measure.passes import ReducedMeter, pack, unpack

ROWS, LENGTH = 4, 1000


def micro_batch(lengths: list[int], seed: int = 0) -> MicroBatch:
    """One with random values, also in its padding, where only weights and coefficients are zero."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).float()

    def values() -> Tensor:
        return torch.rand(ROWS, LENGTH, generator=generator) + 0.1

    tokens = {
        "response_mask": mask,
        "token_id": torch.randint(1, 9, (ROWS, LENGTH), generator=generator),
        "log_prob": -values(),
        "weight": values() * mask,
        "coefficient": values() * mask,
        "advantage": values(),
        "old_log_prob": -values(),
        "ref_log_prob": -values(),
        "rollout_log_prob": -values(),
        "rollout_is_weight": values(),
        "kl_coefficient": values(),
        "after_eos": mask == 2,
    }
    return MicroBatch({"input_ids": torch.ones(ROWS, LENGTH)}, [3, 1, 2, 0], (torch.ones(16), None), tokens)


# What a search and a drill read of other ranks' tokens.
READ = {"response_mask", "weight", "log_prob", "coefficient", "entropy_coefficient", "broken", "suspicion"}


def test_what_is_sent_is_what_a_search_reads_without_padding() -> None:
    whole = micro_batch([1000, 10, 0, 500])
    whole.tokens["coefficient"][1, 700] = torch.nan  # of padding, as some aggregations leave it
    whole.tokens["log_prob"][2, 3] = -torch.inf
    portable = whole.portable(scale=2.0, inputs=False)
    sent = unpack(pickle.loads(pickle.dumps(pack(portable))))
    kept = whole.tokens["response_mask"].bool()
    kept[1, 700] = kept[2, 3] = True
    assert sent.rows == portable.rows and sent.tokens.keys() == READ
    for name in READ:
        column = portable.tokens[name]
        assert sent.tokens[name].dtype == column.dtype
        expected = torch.where(kept, column, torch.zeros_like(column))
        assert torch.equal(sent.tokens[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name


class Sent:
    """Stands in for the collective calls of rank 5, and counts the bytes that each rank sends."""

    def __init__(self, monkeypatch: Patch, world_size: int) -> None:
        self.bytes: dict[int, int] = {}
        monkeypatch.setattr(collectives, "world_size", lambda: world_size)
        monkeypatch.setattr(collectives, "rank", lambda: 5)
        monkeypatch.setattr(collectives, "broadcast", self.broadcast)

    def broadcast(self, make: Any, sender: int) -> Any:
        sent = pickle.dumps(make())
        self.bytes[sender] = len(sent)
        return pickle.loads(sent)


# 300 tokens in 4000 positions.
LENGTHS = [100, 100, 50, 50]


def test_one_of_the_ranks_that_share_data_sends_it(monkeypatch: Patch) -> None:
    sent = Sent(monkeypatch, world_size=8)
    own = [micro_batch(LENGTHS)]
    obtained = ReducedMeter(Mock(layers=["a"]), torch.device("cpu"), sequence_parallel_size=4).obtain([], own, 1.0)
    assert {name for name, each in obtained.items() if each.inputs} == {(1, 0)}
    assert sorted(obtained) == [(0, 0), (1, 0)] and list(sent.bytes) == [0, 4]
    # A byte for each position, and for each token six columns of 4 bytes, and `broken`; with all columns, it would be
    # 65 bytes.
    assert all(4000 + 300 * 25 <= count <= 4000 + 300 * 25 + 5000 for count in sent.bytes.values())
    whole = own[0].portable(1.0, inputs=False)
    assert sum(column.element_size() for column in whole.tokens.values()) + 4 == 65
    # If every rank sent all columns with their padding:
    assert 8 * len(pickle.dumps(whole)) > 60 * sum(sent.bytes.values())


def two_each(sequence_parallel_size: int) -> Any:
    """Two micro-batches of each rank: here the same ones."""
    mini_batch = Mock(scale=2.0, micro_batches=[micro_batch(LENGTHS), micro_batch(LENGTHS, seed=1)])
    mini_batch.model.sequence_parallel_size = sequence_parallel_size
    return mini_batch


CULPRITS = [((1, 1), 0, 99), ((0, 0), 3, 7), ((1, 0), 2, 0)]


def test_the_ranks_that_have_culprits_tell_of_them_alone(monkeypatch: Patch) -> None:
    sent = Sent(monkeypatch, world_size=12)
    mini_batch = two_each(sequence_parallel_size=4)
    assert token_facts_of(mini_batch, []) == {} and sent.bytes == {}
    facts = token_facts_of(mini_batch, CULPRITS)
    assert set(facts) == set(CULPRITS) and sorted(sent.bytes) == [0, 4]
    # Most of it are the KL estimates around each: far less than the columns of its micro-batch.
    assert max(sent.bytes.values()) < 2 * 6000
    for (_, index), row, position in CULPRITS:
        tokens = mini_batch.micro_batches[index].portable(2.0, inputs=False).tokens
        found_facts = facts[(_, index), row, position]
        assert found_facts.items() >= token_evidence(tokens, row, position).items()
        assert found_facts["response_kl"] == response_kl(tokens, row, position) is not None
        assert found_facts["advantage"] == float(tokens["advantage"][row, position])
    # A rank that cannot tell of its own fails on all.
    monkeypatch.undo()
    mini_batch = two_each(sequence_parallel_size=1)
    del mini_batch.micro_batches[0].tokens["token_id"]
    with pytest.raises(collectives.RankFailedError, match="rank 0: KeyError: 'token_id'"):
        token_facts_of(mini_batch, CULPRITS[1:2])


def test_what_is_kept_for_a_search_comes_from_the_host() -> None:
    from verl import DataProto
    from verl.utils.gradloc.adapters import dp_actor

    ids = torch.arange(16 * 12).view(16, 12)
    columns = {"responses": ids[:, 4:], "input_ids": ids, "attention_mask": ids > 0, "position_ids": ids + 1}
    images = [{"row": row} for row in range(16)]
    data = DataProto.from_dict(columns, non_tensors={"multi_modal_inputs": images}, meta_info={"temperature": 0.5})
    kept: dict[str, Any] = {}

    class Trained:
        def _forward_micro_batch(self, micro_batch: dict[str, torch.Tensor]) -> int:
            return len(micro_batch["responses"])

    class Actor(dp_actor.WatchedActor, Trained):
        _verls = types.SimpleNamespace(prepare_dynamic_batch=print)

        def __init__(self) -> None:
            self.config = types.SimpleNamespace(ppo_mini_batch_size=8)
            self.watch = types.SimpleNamespace(
                watches_passes=True,
                start_update=lambda step: None,
                begin_pass=lambda inputs, indices, _: kept.update(inputs, rows=indices),
            )

    rows = torch.tensor([5, 2])
    owner = types.SimpleNamespace(loss=None)
    actor = Actor()
    with actor._update(data, owner, "loss", lambda loss: loss):
        actor._steps, actor._rows = 1, [rows.tolist()]  # the second mini-batch
        # On a device from which nothing can be read.
        on_device = {name: column[8 + rows].to("meta") for name, column in columns.items()}
        assert actor._forward_micro_batch(on_device) == 2
    assert kept.pop("rows") == [5, 2] and kept.pop("temperature") == 0.5
    assert list(kept.pop("multi_modal_inputs")) == [{"row": 13}, {"row": 10}]
    assert kept.keys() == columns.keys()
    assert all(torch.equal(tensor, columns[name][8 + rows]) for name, tensor in kept.items())


def test_a_row_is_sent_without_the_others() -> None:
    """Rows of a nested tensor are views, and a pickled view takes its whole storage along."""
    rows = torch.nested.as_nested_tensor([torch.arange(500)] * 16, layout=torch.jagged).unbind()
    tokens = {name: torch.ones(16, 1) for name in ("log_prob", "weight", "response_mask", "coefficient")}
    rng_state = (torch.get_rng_state(), None)
    micro_batch = MicroBatch({"input_ids": list(rows), "settings": {"count": 3}}, list(range(16)), rng_state, tokens)
    sent = micro_batch.portable(1.0)
    assert sent.inputs["settings"] == {"count": 3}
    assert all(map(torch.equal, sent.inputs["input_ids"], rows))
    assert len(pickle.dumps(sent.inputs)) < 2 * 16 * 500 * 8
    assert micro_batch.portable(1.0, inputs=False).inputs == {}
