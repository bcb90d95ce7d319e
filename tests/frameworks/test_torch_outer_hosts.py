"""`OuterOptimizer` over `DistributedOptimizer`: gradients are reduced within a host, parameters between hosts."""

from __future__ import annotations

from ..ranks import run_ranks

PROGRAM = """
import os
os.environ["PRETENDED_HOSTS"] = "2"
import tests.pretended_hosts
import engine
import engine.torch as hvd
from tests.frameworks import toy
from tests.frameworks.test_torch_outer import sgd, train

hvd.init()
host = hvd.host_process_set()
again = hvd.host_process_set()
model = toy.mlp()
inner = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=host)
optimizer = hvd.OuterOptimizer(inner, every=3, compression=hvd.Compression.fp8)
differed = False
for step in range(5):
    train(model, optimizer, [step])
    engine.check_consistency(toy.parameters_of(model), process_set=host)
    everybody = engine.allgather_object(model[0].bias.tolist())
    differed = differed or any(each != everybody[0] for each in everybody)
toy.check_same_everywhere(optimizer.shared_parameters())
assert again is host and engine.local_size() == 2, (host, engine.local_size())
assert host.ranks == [rank for rank in range(4) if rank % 2 == engine.rank() % 2], host
assert differed and list(optimizer.shared_parameters()) == sorted(toy.parameters_of(model))
print("shared", flush=True)
"""


def test_gradients_are_reduced_within_a_host_in_each_step() -> None:
    done = run_ranks(4, PROGRAM)
    assert done.out.count("shared") == 4, done.out
