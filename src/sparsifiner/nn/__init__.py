"""Modules that own parameters: the connectivity predictor and the sparse attention layer."""
