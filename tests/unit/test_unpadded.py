"""What the reduced meter sends to other ranks."""

import io
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gradloc.fsdp import collectives
from gradloc.measure import meter
from gradloc.measure.micro_batch import MicroBatch
from gradloc.measure.unpadded import Unpadded

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
    }
    return MicroBatch({"input_ids": torch.ones(ROWS, LENGTH)}, [3, 1, 2, 0], (torch.ones(16), None), tokens)


def test_what_is_sent_is_all_that_is_not_padding() -> None:
    whole = micro_batch([1000, 10, 0, 500])
    whole.tokens["coefficient"][1, 700] = torch.nan  # of padding, as some aggregations leave it
    whole.tokens["log_prob"][2, 3] = -torch.inf
    portable = whole.portable(scale=2.0, inputs=False)
    sent = pickle.loads(pickle.dumps(Unpadded.of(portable))).padded()
    kept = whole.tokens["response_mask"].bool()
    kept[1, 700] = kept[2, 3] = True
    assert sent.rows == portable.rows and sent.tokens.keys() == portable.tokens.keys()
    for name, column in portable.tokens.items():
        assert sent.tokens[name].dtype == column.dtype
        expected = torch.where(kept, column, torch.zeros_like(column))
        assert torch.equal(sent.tokens[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name


def sent_bytes(monkeypatch: pytest.MonkeyPatch, world_size: int, sequence_parallel_size: int) -> dict[int, int]:
    """The bytes that each rank sends when micro-batches are obtained, by rank."""
    found: dict[int, int] = {}

    def broadcast(make: Any, sender: int) -> Any:
        file = io.BytesIO()
        pickle.dump(make(), file)
        found[sender] = file.tell()
        return pickle.loads(file.getvalue())

    monkeypatch.setattr(collectives, "world_size", lambda: world_size)
    monkeypatch.setattr(collectives, "rank", lambda: 5)
    monkeypatch.setattr(collectives, "broadcast", broadcast)
    own = [micro_batch([100, 100, 50, 50])]
    reduced = meter.ReducedMeter(Mock(layers=["a"]), torch.device("cpu"), sequence_parallel_size)
    obtained = reduced.obtain([], own, 1.0)
    assert {name for name, each in obtained.items() if each.inputs} == {(5 // sequence_parallel_size, 0)}
    assert sorted(obtained) == [(rank, 0) for rank in range(world_size // sequence_parallel_size)]
    return found


def test_one_of_the_ranks_that_share_data_sends_it_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ranks = sent_bytes(monkeypatch, world_size=8, sequence_parallel_size=4)
    assert list(of_ranks) == [0, 4]
    # 300 tokens of 4000 positions: for each an index, token_id (8 bytes), broken (1), and seven columns of 4 bytes.
    assert all(300 * 41 <= sent <= 300 * 41 + 6000 for sent in of_ranks.values())
    whole = len(pickle.dumps(micro_batch([100, 100, 50, 50]).portable(1.0, inputs=False)))
    assert 8 * whole > 60 * sum(of_ranks.values()) / 2
