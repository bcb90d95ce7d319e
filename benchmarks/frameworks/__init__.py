"""Cost of the bindings: calls from a framework beside bare ones, Keras steps beside those of a model without engine."""
