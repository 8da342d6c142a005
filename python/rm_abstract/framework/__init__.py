"""The small framework: tensors that remember what made them, backends that only execute.

`programs` knows operators, `backends` run programs, `tensor` links results to what they came from,
`recording` puts a whole step together. Layers, losses and optimisers are in `rm_abstract.nn`,
`functional` and `optim`.
"""
