"""Parts of elastic training: pure modules, tried with models of what is around them."""
