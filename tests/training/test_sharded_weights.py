"""Weights are read in the forward of the module that owns them, so that a hook that gathers a shard has run."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contract import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training.models import SharingModel, checkpointed

from dsa_dispatch.checkpointing import save_topk_policy
from dsa_dispatch.index_sharing import IndexShareSchedule
from dsa_dispatch.testing import isolated_registry

SCHEDULE = IndexShareSchedule.explicit(2, [0])
ROWS = 12


class Shard:
    """The own parameters of one module, present only while a hook of that module says so: NaN at any other time."""

    def __init__(self, module):
        self.values = {p: p.detach().clone() for p in module.parameters(recurse=False)}
        self.gathered = 0
        self.release()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.release())
        module.register_full_backward_pre_hook(lambda *_: self.gather())

    def gather(self):
        self.gathered += 1
        self.fill(lambda p: self.values[p])

    def release(self):
        self.fill(lambda p: torch.full_like(p, torch.nan))

    def fill(self, value):
        for parameter in self.values:
            # Past autograd's version counter, as a gather that refills a storage does.
            parameter.data.copy_(value(parameter))


@pytest.mark.usefixtures("registry")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the indexer's inputs need no gradient
@pytest.mark.parametrize("pool", [1, 2])
def test_every_parameter_is_read_after_the_gather_hook_of_its_own_module_and_once_per_pass(pool):
    plain, model = SharingModel(SCHEDULE, pool=pool), SharingModel(SCHEDULE, pool=pool)
    shards = {
        name: Shard(module)
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    }
    x = make.normal(ROWS, 2, 16, grad=True)
    value = model(x)
    assert {shard.gathered for shard in shards.values()} == {1}, (
        "one gather, whatever the number of row chunks"
    )
    torch.testing.assert_close(value, plain(x), rtol=0, atol=0)
    value.backward()
    plain(x).backward()
    for (name, got), wanted in zip(model.gradients().items(), plain.gradients().values(), strict=True):
        assert (got is None) == (wanted is None), name
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=name)


def sharded_step(rank, port, outcomes):
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        )  # fmt: skip
        with isolated_registry(installed=True):
            compare_with_unsharded(rank)
        # Neither rank may close its connections while the other still uses them.
        dist.barrier()
        outcomes.put((rank, "equal"))
    except BaseException as error:
        outcomes.put((rank, repr(error)))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def compare_with_unsharded(rank):
    batches = [make.normal(ROWS, 2, 16, seed=seed) for seed in (1, 2)]
    plain = SharingModel(SCHEDULE)
    sum(plain(x) / 2 for x in batches).backward()

    model = SharingModel(SCHEDULE, checkpointed(save_topk_policy()))
    mesh = init_device_mesh("cpu", (2,))
    for module in [m for m in model.modules() if list(m.parameters(recurse=False))]:
        fully_shard(module, mesh=mesh)  # leaf by leaf: no parent's gather hides a read at the wrong time
    fully_shard(model, mesh=mesh)
    model(batches[rank]).backward()
    for (name, parameter), wanted in zip(model.named_parameters(), plain.gradients().values(), strict=True):
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
def test_fully_sharded_modules_on_two_ranks_give_the_gradients_of_unsharded_ones():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    outcomes = context.SimpleQueue()
    processes = [context.Process(target=sharded_step, args=(rank, port, outcomes)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    found = []
    while not outcomes.empty():
        found.append(outcomes.get())
    # What the ranks found, not their exit status: gloo's threads abort a process now and then as it is torn down.
    assert sorted(found) == [(0, "equal"), (1, "equal")]
