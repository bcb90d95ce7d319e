"""The TensorFlow binding: `import engine.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`."""
