"""A training script as its users write them for Horovod. It runs unchanged; only a test of ours reads what it saves."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--save", default="model.{}.pt")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42 + hvd.rank())  # every rank starts with a different model
if torch.cuda.is_available() and hvd.nccl_built():
    torch.cuda.set_device(hvd.local_rank())
torch.set_num_threads(1)

x = torch.linspace(-1, 1, 256).reshape(64, 4)
dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)


def metric_average(value: torch.Tensor, name: str) -> float:
    return hvd.allreduce(value.detach(), name=name).item()


for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    average = metric_average(total / len(loader), "avg_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average:.6f}")

steps = hvd.broadcast_object({"steps": args.epochs * len(loader)}, root_rank=0)["steps"]
torch.save({"start": start, "end": model.state_dict(), "loss": average, "steps": steps}, args.save.format(hvd.rank()))
