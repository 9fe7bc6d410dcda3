"""Exports models to archives, loads archives as predictors, and verifies, reshards and patches them."""
