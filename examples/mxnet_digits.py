"""A dense network of gluon learns to read handwritten digits, on any number of ranks.

python examples/mxnet_digits.py
enginerun -np 2 python examples/mxnet_digits.py

Whatever the number of ranks, the model sees the same batches and its loss falls along the same curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mxnet
from common import TRAINING, Log, batch, digits, many, stop
from mxnet import autograd, gluon

import engine
import engine.mxnet as hvd


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small network of gluon on handwritten digits.")
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=100, help="pictures in a step, over all ranks (default 100)")
    add("--log", type=Path, help="write a line of JSON for each step to this file")
    return parser.parse_args()


def main() -> None:
    """Train, then examine."""
    args = options()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if args.batch % size or args.batch > TRAINING:
        stop(f"a batch of {args.batch} of {TRAINING} pictures cannot be shared equally by {many(size, 'rank')}")

    mxnet.random.seed(rank)  # Every rank invents a model of its own; that of rank 0 is the one to train.
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(128, activation="tanh"), gluon.nn.Dense(10))
    net.initialize(mxnet.init.Xavier())
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})

    pictures, labels = (mxnet.nd.array(each, dtype=each.dtype) for each in digits())
    entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    with Log("digits", args.steps, args.batch, args.log, active=rank == 0) as log:
        for step in range(args.steps):
            waited = engine.counters()["wait_ns"]
            mine = mxnet.nd.array(batch(step, args.batch)[rank::size], dtype="int32")
            with autograd.record():
                loss = entropy(net(pictures[mine]), labels[mine])
            loss.backward()
            trainer.step(len(mine))  # Averages the gradients over the ranks first.
            mean = hvd.allreduce(loss.mean(), name="loss").asscalar()
            log.step(float(mean), (engine.counters()["wait_ns"] - waited) / 1e9)
        answers = net(pictures[TRAINING + rank :: size]).argmax(axis=1).astype("int32")
        right = hvd.allreduce((answers == labels[TRAINING + rank :: size]).sum(), op=hvd.Sum, name="right").asscalar()
        share = right / (len(labels) - TRAINING)
        log.say(f"{share:.1%} of {len(labels) - TRAINING} unseen digits read correctly by {many(size, 'rank')}")
    hvd.check_consistency({name: each.data() for name, each in net.collect_params().items()})


if __name__ == "__main__":
    main()
