"""Sessions of TensorFlow 1, with its behaviour: the broadcasting hook, and a training loop of that time."""

from __future__ import annotations

import pytest
import tensorflow as tf

import engine.tensorflow as hvd
from engine.errors import EngineError

from ..ranks import run_ranks
from . import tensorflow_toy as toy
from .tensorflow_ranks import ENV, on_op_ranks

# As scripts of 2019 begin. Every rank starts from weights of its own, and ends with those of one process and all data.
TRAINING = """
import numpy as np, tensorflow as tf
import engine.tensorflow as hvd
tf.compat.v1.disable_v2_behavior()
v1 = tf.compat.v1
hvd.init()
data = np.random.default_rng(1).normal(size=(6, 12, 4)).astype("float32")

def build(optimizer, seed):
    x = v1.placeholder(tf.float32, [None, 4])
    with v1.variable_scope("", reuse=False):
        start = np.random.default_rng(seed).normal(size=(4, 3)).astype("float32")
        w = v1.get_variable("w", initializer=start)
        b = v1.get_variable("b", initializer=np.zeros(3, "float32"))
    loss = tf.reduce_mean(tf.reduce_sum((tf.tanh(tf.matmul(x, w) + b) - x[:, :3]) ** 2, 1))
    count = v1.train.get_or_create_global_step()
    return x, optimizer.minimize(loss, count), [w, b], count

def train(optimizer, seed, hooks, start, step):
    with tf.Graph().as_default():
        x, op, variables, count = build(optimizer, seed)
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for batch in data:
                session.run(op, {x: batch[start::step]})
            return session.run(variables) + [session.run(count)]

alone = train(v1.train.MomentumOptimizer(0.05, 0.9), 0, [], 0, 1)
hook = hvd.BroadcastGlobalVariablesHook(0)
for passes in (1, 2):
    wrapped = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.05, 0.9), backward_passes_per_step=passes)
    found = train(wrapped, hvd.rank(), [hook], hvd.rank(), hvd.size())
    if passes == 1:
        for one, other in zip(found, alone):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    assert found[2] == len(data) // passes, found
    hvd.check_consistency({str(k): np.asarray(each) for k, each in enumerate(found)})
    again = train(wrapped, hvd.rank(), [hook], hvd.rank(), hvd.size())  # the same hook and optimizer, in another graph
    for one, other in zip(found, again):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)
"""


@pytest.mark.slow
def test_monitored_sessions_train_as_one_process_does() -> None:
    run_ranks(2, TRAINING, env=ENV)


@on_op_ranks(2)
def test_the_hook_needs_a_graph() -> None:
    hook = hvd.BroadcastGlobalVariablesHook(0, "/cpu:0")
    assert isinstance(hook, tf.compat.v1.train.SessionRunHook)
    assert "broadcast_variables" in toy.raises(EngineError, hook.begin)
