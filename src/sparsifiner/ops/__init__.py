"""Pure functions on tensors: the method's equations and the backends that compute them."""
