"""What of micro-batches is sent to other ranks for a search."""

import pickle
from typing import Any
from unittest.mock import Mock

import torch
from notation import Patch
from torch import Tensor

from gradloc.fsdp import collectives
from gradloc.measure.micro_batch import MicroBatch
from gradloc.measure.passes import ReducedMeter, pack, unpack

ROWS, LENGTH = 4, 1000


def micro_batch(lengths: list[int]) -> MicroBatch:
    """One with random values, also in its padding, where only weights and coefficients are zero."""
    generator = torch.Generator().manual_seed(0)
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
        "after_eos": mask == 2,
    }
    return MicroBatch({"input_ids": torch.ones(ROWS, LENGTH)}, [3, 1, 2, 0], (torch.ones(16), None), tokens)


# Columns of other ranks' tokens that a search and a drill read.
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


def test_one_of_the_ranks_that_share_data_sends_it(monkeypatch: Patch) -> None:
    sent: dict[int, int] = {}

    def broadcast(make: Any, sender: int) -> Any:
        pickled = pickle.dumps(make())
        sent[sender] = len(pickled)
        return pickle.loads(pickled)

    monkeypatch.setattr(collectives, "world_size", lambda: 8)
    monkeypatch.setattr(collectives, "rank", lambda: 5)
    monkeypatch.setattr(collectives, "broadcast", broadcast)
    own = [micro_batch([100, 100, 50, 50])]  # 300 tokens in 4000 positions
    obtained = ReducedMeter(Mock(layers=["a"]), torch.device("cpu"), sequence_parallel_size=4).obtain([], own, 1.0)
    assert {name for name, each in obtained.items() if each.inputs} == {(1, 0)}
    assert sorted(obtained) == [(0, 0), (1, 0)] and list(sent) == [0, 4]
    # A byte for each position, and for each token six columns of 4 bytes, and `broken`.
    assert all(4000 + 300 * 25 <= count <= 4000 + 300 * 25 + 5000 for count in sent.values())


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
