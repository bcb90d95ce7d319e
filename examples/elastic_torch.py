"""A training with torch on ranks that come and go: `enginerun -np 2 --min-np 1 python examples/elastic_torch.py`.

torch_fixed.py is the same in a job whose ranks stay; five lines differ.
"""

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
state = hvd.elastic.TorchState(model, optimizer)


@hvd.elastic.run
def train(state):  # type: ignore[no-untyped-def]
    for inputs, targets in hvd.elastic.loop(state, loader, EPOCHS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


train(state)
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, loss {torch.nn.functional.mse_loss(model(x), data.tensors[1]):.4f}")
