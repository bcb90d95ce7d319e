"""A training with torch on ranks that stay: `enginerun -np 2 python examples/torch_fixed.py`.

elastic_torch.py is the same in a job whose ranks may come and go; five lines differ.
"""

from itertools import chain, repeat

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import engine.torch as hvd

EPOCHS = 5

hvd.init()
torch.manual_seed(1)
x = torch.randn(1000, 10)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data, hvd.size(), hvd.rank()))

model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def train():  # type: ignore[no-untyped-def]
    for inputs, targets in chain.from_iterable(repeat(loader, EPOCHS)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


train()
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, loss {torch.nn.functional.mse_loss(model(x), data.tensors[1]):.4f}")
