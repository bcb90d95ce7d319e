"""What the bindings add: a call from TensorFlow, JAX or torch beside the bare collective, a step of Keras beside none."""
