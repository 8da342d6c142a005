"""Ways to switch rm_abstract on besides ``init()``: the environment, torch.compile, IPython."""
