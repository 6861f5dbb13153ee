"""The memory that a probe takes, and the norms of local gradients where a model is unusual."""

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from action_cases import DETECTION
from actor_cases import train
from actors import DEVICE, Case
from dispatching import Operations
from notation import cases
from test_actor import THREE, Launch, near, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch_stand_ins import as_in_torch_2_15

from gradloc.fsdp.state import flat_handles
from gradloc.fsdp.torch_compat import param_groups
from gradloc.measure import passes
from gradloc.measure.local_norms import LocalNorms


def gradients_of_probes(case: Case) -> tuple[int, list[int]]:
    """The bytes that gradients take at an optimizer step, and at the end of each probe of a search."""
    of_probes, of_steps = [], []
    clear = passes.clear_gradients

    def size(module: nn.Module) -> int:
        holders = [*module.parameters(), *(handle.flat_param for handle in flat_handles(module))]
        local = [getattr(holder.grad, "_local_tensor", holder.grad) for holder in holders if holder.grad is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local}
        return sum(storage.nbytes() for storage in storages.values())

    def noted_clear(module: nn.Module) -> None:
        of_probes.append(size(module))
        clear(module)

    def prepare(actor: Any) -> None:
        actor.actor_optimizer.register_step_pre_hook(lambda *_: of_steps.append(size(actor.actor_module)))

    with mock.patch.object(passes, "clear_gradients", noted_clear):
        train(case, prepare=prepare, **DETECTION)
    return of_steps[0], of_probes


class Unusual(nn.Module):
    """A model that may use a layer twice, another one not always, and an embedding that is tied to the LM head."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.order = (0, 1, 1) if twice else (0, 1)
        self.embed_tokens = nn.Embedding(11, 8)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, whole: bool) -> Tensor:
        hidden = self.embed_tokens(ids)
        for i in self.order + (2,) * whole:
            hidden = hidden + self.layers[i](hidden)
        return self.lm_head(hidden)


def norms_of_an_unusual_model(
    wrap: str, dtype: torch.dtype, deferred: bool, later_torch: bool = False
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each of some micro-batches, the layers' norms as measured, and those of the model without sharding.

    Beside the first one there is another meter.
    """
    torch.manual_seed(3)
    # FSDP1 in half precision computes two gradients of a layer that is used twice.
    model = Unusual(twice=wrap == "fsdp2" or dtype == torch.float32).to(DEVICE)
    whole = copy.deepcopy(model).to(dtype)
    sharded = _shard(model, wrap, dtype)
    if later_torch:
        as_in_torch_2_15(sharded)
    other, norms = LocalNorms(sharded, DEVICE), LocalNorms(sharded, DEVICE)
    found = []
    torch.manual_seed(dist.get_rank())
    for number in range(4):
        last = number == 3
        # The same on all ranks: FSDP2 would leave an unused layer out of its reduction on some of them. FSDP1 cannot
        # leave a layer unused while it defers the reduction.
        uses_all = number in (0, 2) or (wrap != "fsdp2" and deferred)
        ids = torch.randint(11, (2, 5)).to(DEVICE)
        context = sharded.no_sync() if wrap == "fsdp1-orig" and deferred and not last else nullcontext()
        if wrap == "fsdp2":
            sharded.set_requires_gradient_sync(last or not deferred)
        norms.start()
        with context:
            sharded(ids, uses_all).float().square().sum().backward()
        squares = norms.stop().tolist()
        other.close()
        whole.zero_grad(set_to_none=True)
        whole(ids, uses_all).float().square().sum().backward()
        expected = dict.fromkeys(norms.layers, 0.0)
        for name, parameter in whole.named_parameters():
            layer = ".".join(name.split(".")[:2]) if "layers" in name else name.removesuffix(".weight")
            if parameter.grad is not None:
                expected[layer] += float(parameter.grad.double().square().sum())
        found.append((dict(zip(norms.layers, squares, strict=True)), expected))
    norms.close()
    assert not any("post_backward" in vars(group) for group in param_groups(sharded))
    return found


def _shard(model: Unusual, wrap: str, dtype: torch.dtype) -> Any:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    if wrap == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        return model
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"device_id": DEVICE, "device_mesh": mesh, "mixed_precision": precision, "use_orig_params": True}
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


@cases(
    "wrap dtype deferred later_torch",
    ("fsdp1-orig", torch.float32, True, False),
    ("fsdp1-orig", torch.bfloat16, False, False),
    ("fsdp2", torch.float32, False, False),
    ("fsdp2", torch.bfloat16, True, False),
    # torch 2.15 itself keeps deferred gradients in float32, for which this one has no room beside bfloat16.
    ("fsdp2", torch.bfloat16, True, True),
)
def test_norms_of_an_unusual_model(
    launch: Launch, wrap: str, dtype: torch.dtype, deferred: bool, later_torch: bool
) -> None:
    """Layers that are used twice or not at all, and gradients that are added to earlier ones."""
    for of_rank in launch(2, norms_of_an_unusual_model, wrap, dtype, deferred, later_torch):
        for measured, expected in of_rank:
            # The sums of a layer that is used twice are rounded in another order.
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert measured == {name: near(square, tolerance) for name, square in expected.items()}
            assert measured["layers.1"] > 0


@on_ranks(
    (2, Case("fsdp1-orig", precision="bfloat16", planted=THREE)),
    (4, Case("fsdp1", hsdp=True, planted=THREE)),
    (2, Case("fsdp2", planted=THREE)),
)
def test_the_gradient_that_a_probe_does_not_read_takes_no_memory(launch: Launch, world: int, case: Case) -> None:
    for of_step, of_probes in launch(world, gradients_of_probes, case):
        assert of_probes and max(of_probes) < of_step / 100


def operations_of_update(micro_batch: int) -> int:
    """How many operations detection adds to an update of one mini-batch, with every column."""
    columns = {"kl": True, "reference": True, "entropy": True, "rollout": True, "rollout_weights": True}
    counts: list[int] = []

    def count_updates(actor: Any) -> None:
        update = actor.update_policy

        def counted(batch: Any) -> Any:
            with Operations() as operations:
                metrics = update(batch)
            counts.append(operations.count)
            return metrics

        actor.update_policy = counted

    for settings in ({}, {"spike_detection": True, "grad_norm_threshold": 1e9}):
        train(Case(micro_batch=micro_batch, **columns), calls=3, prepare=count_updates, **settings)
    return counts[5] - counts[2]  # those before make what is made once


def test_a_micro_batch_and_a_mini_batch_take_few_operations(launch: Launch) -> None:
    """Each is a launch of a GPU's kernel, for which the GPU may wait."""
    four, two = launch(2, operations_of_update, 2), launch(2, operations_of_update, 4)
    for more, less in zip(four, two, strict=True):
        of_micro_batch = (more - less) / 2
        assert 0 < of_micro_batch <= 120
        assert 0 < less - 2 * of_micro_batch <= 300
