"""Tables from ATen overloads to IR operators, one module a family."""
