"""torch's own lists of modules and operators: how many run wholly on our kernels, what is missing.

    python benchmarks/torch_operators.py modules
    python benchmarks/torch_operators.py operators --samples 2 --only softmax,conv

Inputs are those torch tests itself with (`module_db`, `op_db` of torch.testing, which need the
package expecttest), in float32 on the CPU. A module or operator counts as native when each of its
samples is served by programs without a call of PyTorch; results are compared with eager's. Prints
the counts, and what stood in the way most often.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import rm_abstract as rm

SECONDS = 60  # a sample


class Applied(torch.nn.Module):
    """A function of tensors; everything else in its arguments is fixed."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))  # a module has something to be known by
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


Sample = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def of_operators(samples: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, list[Sample]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        if not wanted(name) or torch.float32 not in info.supported_dtypes("cpu"):
            continue
        found: list[Sample] = []
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), samples):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            found.append((Applied(info.op, args, kwargs).eval(), tuple(tensors), {}))
        yield name, found


def of_modules(samples: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, list[Sample]]]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        name = info.module_cls.__name__
        if not wanted(name):
            continue
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        )
        found: list[Sample] = []
        for given in itertools.islice(inputs, samples):
            made = given.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).eval()
            if given.forward_input is not None:
                call = given.forward_input
                found.append((module, tuple(call.args), dict(call.kwargs)))
        yield name, found


def serve(
    module: torch.nn.Module, args: Any, kwargs: Any, without_values: bool = False
) -> tuple[str, list[str]]:
    """ "native", "mixed", "eager", "wrong" or "error", and what stood in the way. What is made
    without values has shapes and types alone to compare."""
    if not list(module.parameters()):
        module = Applied(module, args, kwargs).eval()
        args = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        kwargs = {}
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), (tuple(args), kwargs))
    with torch.no_grad():
        try:
            torch.manual_seed(0)
            expected = module(*args, **kwargs)
        except Exception:  # not a sample for these arguments
            return "skipped", []
        rm.accelerate(module)
        for _ in range(2):
            torch.manual_seed(0)
            given = module(*args, **kwargs)
    if without_values:
        given, expected = pytree.tree_map_only(torch.Tensor, torch.zeros_like, (given, expected))
    try:
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    except AssertionError as error:
        return "wrong", [str(error).splitlines()[0]]
    report = rm.explain(module)
    if report.routed == 0:
        return "eager", [f"{r['code']} {r['detail']}"[:150] for r in report.models[0]["reasons"]]
    kept = [op for entry in report.models[0]["entries"] for op in entry["kept"]]
    return ("mixed" if kept else "native"), [str(op) for op in kept]


def too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["modules", "operators"])
    parser.add_argument("--samples", type=int, default=4, help="of each, at most")
    parser.add_argument("--only", default="", help="names that contain one of these")
    given = parser.parse_args()
    parts = [part for part in given.only.split(",") if part]

    def wanted(name: str) -> bool:
        return not parts or any(part in name for part in parts)

    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGALRM, too_long)
    torch.set_num_threads(1)
    os.environ["RM_CACHE_MODE"] = "off"
    rm.init("cpu", fallback="allow")
    source = of_modules if given.what == "modules" else of_operators
    counts: collections.Counter[str] = collections.Counter()
    missing: collections.Counter[str] = collections.Counter()
    for name, samples in source(given.samples, wanted):
        verdicts: list[str] = []
        causes: dict[str, None] = {}
        for module, args, kwargs in samples:
            signal.alarm(SECONDS)
            try:
                verdict, why = serve(module, args, kwargs, "empty" in name)
            except Exception as error:  # counted: nothing but an Error of ours may come out
                verdict, why = "error", [f"{type(error).__name__}: {error}"[:150]]
            finally:
                signal.alarm(0)
            verdicts.append(verdict)
            missing.update({f"{verdict}: {said}" for said in why})
            causes.update(dict.fromkeys(why))
            if verdict in ("wrong", "error"):
                print(f"{name}: {verdict}: {why}", flush=True)
        tried = [v for v in verdicts if v != "skipped"]
        if not tried:
            counts["no sample"] += 1
            continue
        worst = max(tried, key=["native", "mixed", "eager", "wrong", "error"].index)
        counts[worst] += 1
        if worst != "native":
            print(f"{name}: {worst}: {'; '.join(causes)}", file=sys.stderr, flush=True)
    total = sum(counts.values()) - counts["no sample"]
    for verdict, number in counts.most_common():
        print(f"{number:5} {verdict} ({number / max(total, 1):.0%})")
    for said, number in missing.most_common(60):
        print(f"{number:5} {said}")


if __name__ == "__main__":
    main()
