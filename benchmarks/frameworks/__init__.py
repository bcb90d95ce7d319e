"""What the bindings add: calls from a framework beside bare ones, a step of Keras beside one that trains alone."""
