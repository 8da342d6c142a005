"""A call of a module as flat tensors, completed where a program needs more than it has."""
