"""What a watched training pass costs, and the norms of local gradients where a model is unusual."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from action_cases import DETECTION
from actor_cases import Operations, train
from actors import DEVICE, ENGINE, Case
from notation import cases
from test_actor import THREE, Launch, near, on_engine, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch_stand_ins import as_in_torch_2_15
from verl.utils.gradloc.adapters.actor_config import TokenClipConfig
from verl.utils.gradloc.fsdp.state import flat_handles
from verl.utils.gradloc.fsdp.torch_compat import param_groups
from verl.utils.gradloc.measure import passes
from verl.utils.gradloc.measure.local_norms import LocalNorms

NEVER = 1e9


def recorded_operations(case: Case) -> tuple[int, list[Counter[str]]]:
    """How many groups FSDP reduces the gradients in, and the operations while each micro-batch is recorded."""
    groups: list[Any] = []
    begun: list[Operations] = []
    ended: list[Operations] = []

    def prepare(actor: Any) -> None:
        module = actor.actor_module
        groups.extend(param_groups(module) or flat_handles(module))
        norms = actor.gradloc._model.meter
        start, stop = norms.start, norms.stop

        def counted_start() -> None:
            start()
            begun.append(Operations())
            begun[-1].__enter__()

        def counted_stop() -> Tensor:
            squares = stop()
            ended.append(begun[-1])
            begun[-1].__exit__(None, None, None)
            return squares

        norms.start, norms.stop = counted_start, counted_stop

    train(case, prepare=prepare, spike_detection=True, grad_norm_threshold=NEVER)
    return len(groups), [Counter(operations.names) for operations in ended]


def operations_around_the_backward(case: Case, clip_tokens: bool) -> list[tuple[Counter[str], Counter[str]]]:
    """For each micro-batch, the operations between its loss and its backward, and those in `end_pass`."""
    operations = Operations()

    def marked(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            operations.names.append(before)
            found = function(*arguments, **options)
            operations.names.append(after)
            return found

        return call

    def prepare(actor: Any) -> None:
        holder = actor.engine if ENGINE else actor
        observed, watch = holder._observed, holder.watch
        holder._observed = lambda loss, *rest, **options: observed(marked(loss, after="<loss>"), *rest, **options)
        if not ENGINE:  # verl adds the terms of KL and entropy after what is observed
            watch.observe = marked(watch.observe, after="<observed>")
        watch.end_pass = marked(watch.end_pass, "<end>", "<ended>")

    clip = {"token_clip": TokenClipConfig(enable=True)} if clip_tokens else {}
    with mock.patch.object(Tensor, "backward", marked(Tensor.backward, "<backward>")), operations:
        train(case, prepare=prepare, spike_detection=True, grad_norm_threshold=NEVER, **clip)
    of_passes = re.findall("<loss>(.*?)<(?:observed|backward)>.*?<end>(.*?)<ended>", " ".join(operations.names))
    return [(Counter(in_gap.split()), Counter(after.split())) for in_gap, after in of_passes]


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


class FrozenBase(nn.Module):
    """A layer whose first parameter is frozen, under FSDP2 also in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False, dtype=dtype).requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden.to(self.base.weight.dtype)).to(hidden.dtype) + self.adapter(hidden)


class Layer(nn.Sequential):
    """A layer that a checkpoint around its call may have computed again in the backward."""

    reentrant: bool | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        call = super().__call__
        return call(hidden) if self.reentrant is None else checkpoint(call, hidden, use_reentrant=self.reentrant)


class Unusual(nn.Module):
    """A model that may use a layer twice, another one not always, and an embedding that is tied to the LM head."""

    def __init__(self, twice: bool, of_base: torch.dtype, reentrant: bool | None) -> None:
        super().__init__()
        self.order = (0, 1, 1, 3) if twice else (0, 1, 3)
        self.embed_tokens = nn.Embedding(11, 8)
        layers = [Layer(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        self.layers = nn.ModuleList([*layers, Layer(FrozenBase(of_base))])
        for layer in self.layers:
            layer.reentrant = reentrant
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, whole: bool) -> Tensor:
        hidden = self.embed_tokens(ids)
        for i in self.order + (2,) * whole:
            hidden = hidden + self.layers[i](hidden)
        return self.lm_head(hidden)


def norms_of_an_unusual_model(
    wrap: str, dtype: str, deferred: bool = False, later_torch: bool = False, reentrant: bool | None = None
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each of some micro-batches, the layers' norms as measured, and those of the model without sharding.

    Beside the first one there is another meter.
    """
    torch.manual_seed(3)
    # FSDP1 in half precision and reentrant checkpointing compute two gradients of a layer that is used twice.
    twice = not reentrant and (wrap != "fsdp1-orig" or dtype == "float32")
    of_base = torch.bfloat16 if wrap == "fsdp2" else torch.float32
    model = Unusual(twice, of_base, reentrant).to(DEVICE)
    whole = copy.deepcopy(model)
    if dtype != "float32":
        whole.to(getattr(torch, dtype))
    sharded = _shard(model, wrap, None if dtype == "float32" else getattr(torch, dtype))
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


def _shard(model: Unusual, wrap: str, dtype: torch.dtype | None) -> Any:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    if wrap == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    if wrap != "fsdp1-orig":
        return model
    options = {
        "device_id": DEVICE,
        "device_mesh": mesh,
        "mixed_precision": MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        "use_orig_params": True,
    }
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


NORMS = ("_foreach_norm", "linalg_vector_norm", "norm")


@on_ranks(
    (2, Case("fsdp1", precision="bfloat16", mini_batch=4)),
    (2, Case("fsdp1-orig", mini_batch=4)),
    (2, Case("fsdp2", grouped=True, checkpointing=True)),
    # Its micro-batches leave some experts idle; only whole ones can be trained on.
    (2, Case("fsdp2", model="moe", micro_batch=8)),
    on_engine(2, Case("fsdp2", precision="bfloat16", mini_batch=4, deferred=True)),
)
def test_a_micro_batch_takes_one_norm_for_each_group_of_fsdp(launch: Launch, world: int, case: Case) -> None:
    for groups, of_passes in launch(world, recorded_operations, case):
        assert len(of_passes) == case.rows // case.micro_batch
        for counts in of_passes:
            assert 0 < sum(counts[name] for name in NORMS) <= groups


@on_ranks(
    (2, Case("fsdp1", dynamic=True)),
    on_engine(2, Case("fsdp2", nested=True, mini_batch=4, kl=True, entropy=True, rollout=True)),
)
@pytest.mark.parametrize("clip", [False, True], ids=["", "token_clip"])
def test_few_operations_come_between_loss_and_backward(launch: Launch, world: int, case: Case, clip: bool) -> None:
    """And those after the backward do not wait for the device."""
    for of_rank in launch(world, operations_around_the_backward, case, clip):
        assert len(of_rank) >= case.rows // case.mini_batch
        for in_gap, after in of_rank:
            launched = {name: count for name, count in in_gap.items() if name != "detach"}  # a view
            assert sum(launched.values()) < 8, in_gap
            assert sum(after.values()) > 20  # the weights are computed there
            assert not after.keys() & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}, after


@cases(
    "wrap options",
    ("fsdp1-orig", {"dtype": "float32", "deferred": True}),
    ("fsdp1-orig", {"dtype": "bfloat16"}),
    *[("fsdp2", {"dtype": "float32", "reentrant": reentrant}) for reentrant in (None, False, True)],
    ("fsdp2", {"dtype": "float32", "deferred": True}),
    ("fsdp2", {"dtype": "bfloat16", "deferred": True}),
    # torch 2.15 itself keeps deferred gradients in float32, for which this one has no room beside bfloat16.
    ("fsdp2", {"dtype": "bfloat16", "deferred": True, "later_torch": True}),
    *[("none", {"dtype": "float32", "reentrant": reentrant}) for reentrant in (False, True)],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{name}={of}" for name, of in value.items()),
)
def test_norms_of_an_unusual_model(launch: Launch, wrap: str, options: dict[str, Any]) -> None:
    """Layers that are used twice, not at all, frozen or recomputed, and gradients that are added to earlier ones."""
    for of_rank in launch(2, partial(norms_of_an_unusual_model, **options), wrap):
        for measured, expected in of_rank:
            # The sums of a layer that is used twice are rounded in another order.
            tolerance = 1e-5 if options["dtype"] == "float32" else 2e-2
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
