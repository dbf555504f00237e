"""Two-phase distillation. Not called `distill`, which is the function: a module of that name would stand in its way."""
