"""What a watched training pass costs, and the norms of local gradients where a model is unusual."""

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from action_cases import DETECTION
from actor_cases import train
from actors import DEVICE, ENGINE, Case
from notation import cases
from test_actor import THREE, Launch, near, on_engine, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_stand_ins import as_in_torch_2_15
from verl.utils.gradloc.adapters.actor_config import TokenClipConfig
from verl.utils.gradloc.fsdp.state import flat_handles
from verl.utils.gradloc.fsdp.torch_compat import param_groups
from verl.utils.gradloc.measure import local_norms, passes
from verl.utils.gradloc.measure.local_norms import LocalNorms

NEVER = 1e9


class Operations(TorchDispatchMode):
    """Counts the operations within it, by name, and lists the collective calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.collectives: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        if "c10d" in function.namespace:
            self.collectives.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def recorded_operations(case: Case, together: bool = True) -> tuple[int, list[Counter[str]]]:
    """How many groups FSDP reduces the gradients in, and the operations while each micro-batch is recorded.

    Args:
        case (Case): The actor.
        together (bool): Whether FSDP2 has the method in which it reduces the gradients of a group.
    """
    groups: list[Any] = []
    counts: list[Counter[str]] = []

    def prepare(actor: Any) -> None:
        module = actor.actor_module
        groups.extend(param_groups(module) or flat_handles(module))
        norms = actor.gradloc._model.meter
        start, stop = norms.start, norms.stop

        def counted_start() -> None:
            start()
            modes.append(Operations())
            modes[-1].__enter__()

        def counted_stop() -> Tensor:
            squares = stop()
            mode = modes.pop()
            mode.__exit__(None, None, None)
            counts.append(mode.counts)
            return squares

        norms.start, norms.stop = counted_start, counted_stop

    modes: list[Operations] = []
    names = local_norms.param_groups
    if not together:
        local_norms.param_groups = lambda module: []
    try:
        train(case, prepare=prepare, spike_detection=True, grad_norm_threshold=NEVER)
    finally:
        local_norms.param_groups = names
    return len(groups), counts


def operations_around_the_backward(case: Case, clip_tokens: bool) -> list[tuple[Counter[str], Counter[str]]]:
    """For each micro-batch, the operations between its loss and its backward, and those in `end_pass`."""
    found: list[tuple[Counter[str], Counter[str]]] = []
    # Since the last loss; None before there is one.
    gap: Operations | None = None
    in_gap: Counter[str] = Counter()

    def after_loss() -> None:
        nonlocal gap
        gap = Operations()
        gap.__enter__()

    def before_backward() -> None:
        nonlocal gap, in_gap
        assert gap is not None
        gap.__exit__(None, None, None)
        in_gap, gap = gap.counts, None

    def prepare(actor: Any) -> None:
        watch = actor.engine.watch if ENGINE else actor.watch
        end_pass = watch.end_pass

        def counted_end_pass() -> None:
            with Operations() as mode:
                end_pass()
            if mode.counts:  # else no pass was open
                found.append((in_gap, mode.counts))

        watch.end_pass = counted_end_pass
        holder = actor.engine if ENGINE else actor
        observed = holder._observed

        def observed_after_loss(loss_function: Any, *arguments: Any, **options: Any) -> Any:
            def counted_loss(**tensors: Any) -> Any:
                loss = loss_function(**tensors)
                after_loss()
                return loss

            return observed(counted_loss, *arguments, **options)

        holder._observed = observed_after_loss
        if not ENGINE:  # verl adds the terms of KL and entropy after what is observed
            observe = watch.observe

            def counted_observe(*arguments: Any, **options: Any) -> Any:
                read = observe(*arguments, **options)
                before_backward()
                return read

            watch.observe = counted_observe

    def counted_backward(*arguments: Any, **options: Any) -> None:
        if gap is not None:
            before_backward()
        backward(*arguments, **options)

    backward = Tensor.backward
    Tensor.backward = counted_backward
    clip = {"token_clip": TokenClipConfig(enable=True)} if clip_tokens else {}
    try:
        train(case, prepare=prepare, spike_detection=True, grad_norm_threshold=NEVER, **clip)
    finally:
        Tensor.backward = backward
    return found


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

    passes.clear_gradients = noted_clear
    try:
        train(case, prepare=prepare, **DETECTION)
    finally:
        passes.clear_gradients = clear
    return of_steps[0], of_probes


class Unusual(nn.Module):
    """A model that may use a layer twice, another one not always, and an embedding that is tied to the LM head."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.order = (0, 1, 1, 3) if twice else (0, 1, 3)
        self.embed_tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.layers[3][0].requires_grad_(False)

    def forward(self, ids: Tensor, whole: bool) -> Tensor:
        hidden = self.embed_tokens(ids)
        for i in self.order + (2,) * whole:
            hidden = hidden + self.layers[i](hidden)
        return self.lm_head(hidden)


def norms_of_an_unusual_model(
    wrap: str, dtype: str, deferred: bool, later_torch: bool
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each of some micro-batches, the layers' norms as measured, and those of the model without sharding."""
    torch.manual_seed(3)
    # In half precision, FSDP1 computes two gradients of a layer that is used twice.
    model = Unusual(twice=wrap == "fsdp2" or dtype == "float32").to(DEVICE)
    whole = copy.deepcopy(model).to(getattr(torch, dtype))
    sharded = _shard(model, wrap, getattr(torch, dtype))
    if later_torch:
        as_in_torch_2_15(sharded)
    norms = LocalNorms(sharded, DEVICE)
    found = []
    torch.manual_seed(dist.get_rank())
    for number in range(4):
        last = number == 3
        # The same on all ranks: FSDP2 would leave an unused layer out of its reduction on some of them. FSDP1 cannot
        # leave a layer unused while it defers the reduction.
        uses_all = number in (0, 2) or (wrap != "fsdp2" and deferred)
        ids = torch.randint(11, (2, 5)).to(DEVICE)
        context = sharded.no_sync() if wrap.startswith("fsdp1") and deferred and not last else nullcontext()
        if wrap == "fsdp2":
            sharded.set_requires_gradient_sync(last or not deferred)
        norms.start()
        with context:
            sharded(ids, uses_all).float().square().sum().backward()
        squares = norms.stop().tolist()
        whole.zero_grad(set_to_none=True)
        whole(ids, uses_all).float().square().sum().backward()
        expected = dict.fromkeys(norms.layers, 0.0)
        for name, parameter in whole.named_parameters():
            layer = name.removesuffix(".weight").removesuffix(".bias")
            layer = ".".join(layer.split(".")[:2]) if "layers" in name else layer
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
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    options = {
        "device_id": DEVICE,
        "device_mesh": mesh,
        "mixed_precision": MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        "use_orig_params": True,
    }
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


class FrozenBase(nn.Module):
    """A layer whose first parameter is frozen and in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden.bfloat16()).float() + self.adapter(hidden)


def norms_of_repeated_passes() -> list[float]:
    """The squared norms of three equal micro-batches, whose reduction is deferred to the last."""
    torch.manual_seed(3)
    model = nn.Sequential(FrozenBase())
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    norms, found = LocalNorms(model, DEVICE), []
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        norms.start()
        model(torch.ones(2, 8)).square().sum().backward()
        found.append(float(norms.stop().sum()))
    norms.close()
    return found


class Checkpointed(nn.Sequential):
    """A layer that is computed again in the backward, by a checkpoint around its call."""

    reentrant = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().__call__, hidden, use_reentrant=self.reentrant)


class OfCheckpoints(nn.Module):
    """An embedding, two such layers and a head."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Checkpointed(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        for layer in self.layers:
            layer.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def norms_with_checkpointing(wrapped: bool, reentrant: bool) -> tuple[list[list[float]], list[float]]:
    """The layers' squared norms as measured beside another meter, and once it is closed; those without sharding."""
    torch.manual_seed(3)
    model = OfCheckpoints(reentrant).to(DEVICE)
    whole, ids = copy.deepcopy(model), torch.arange(8, device=DEVICE).view(2, 4)
    if wrapped:
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    other, norms = LocalNorms(model, DEVICE), LocalNorms(model, DEVICE)
    found = []
    for _ in range(2):
        norms.start()
        model(ids).square().sum().backward()
        squares = dict(zip(norms.layers, norms.stop().tolist(), strict=True))
        found.append([squares[f"layers.{i}"] for i in range(2)])
        model.zero_grad()
        other.close()
    norms.close()
    assert not any("post_backward" in vars(group) for group in param_groups(model))
    whole(ids).square().sum().backward()
    return found, [sum(float(p.grad.double().square().sum()) for p in layer.parameters()) for layer in whole.layers]


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


def test_without_fsdp2s_method_each_parameter_is_measured_alone(launch: Launch) -> None:
    case = Case("fsdp2", mini_batch=4)
    for groups, of_passes in launch(2, recorded_operations, case, False):
        for counts in of_passes:
            assert sum(counts[name] for name in NORMS) > groups


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
    "wrap dtype deferred later_torch",
    ("fsdp1-orig", "float32", True, False),
    ("fsdp1-orig", "bfloat16", False, False),
    ("fsdp2", "float32", False, False),
    ("fsdp2", "float32", True, False),
    ("fsdp2", "bfloat16", True, False),
    # torch 2.15 itself keeps deferred gradients in float32, for which this one has no room beside bfloat16.
    ("fsdp2", "bfloat16", True, True),
)
def test_norms_of_an_unusual_model(launch: Launch, wrap: str, dtype: str, deferred: bool, later_torch: bool) -> None:
    """Layers that are used twice, not at all or frozen, and gradients that are added to those of earlier passes."""
    for of_rank in launch(2, norms_of_an_unusual_model, wrap, dtype, deferred, later_torch):
        for measured, expected in of_rank:
            # The sums of a layer that is used twice are rounded in another order.
            tolerance = 1e-5 if dtype == "float32" else 2e-2
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


def test_a_frozen_first_parameter_does_not_hide_gradients(launch: Launch) -> None:
    for first, *others in launch(2, norms_of_repeated_passes):
        assert first > 0 and others == [near(first, 1e-5)] * 2


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "fsdp2"])
def test_layers_that_are_computed_again_are_measured(launch: Launch, wrapped: bool, reentrant: bool) -> None:
    """Also beside another meter, and after it is removed."""
    for found, expected in launch(2, norms_with_checkpointing, wrapped, reentrant):
        for measured in found:
            assert measured == [near(square, 1e-5) for square in expected] and min(measured) > 0
