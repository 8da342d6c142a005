"""Runs llama.cpp (PyPI: llama-cpp-python, gguf) for `bench decode`, in an interpreter that has it.

    python llama_cpp_child.py FOLDER f32|f16|bf16|q8_0|q4_0 THREADS [ROWS]

FOLDER holds what `decoders.dump` wrote; ROWS sequences are decoded together (1). One JSON line in,
one JSON line out. Imports nothing of
rm_abstract, so that any interpreter can run it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

CONTEXT = 4608  # of a sequence
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order of rotary pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    ordered: np.ndarray = halves.swapaxes(1, 2).reshape(rows, columns)
    return ordered


def write_words(writer: gguf.GGUFWriter, count: int) -> None:
    """A vocabulary of numbered words, for programs that turn tokens into text."""
    words = [b"<unk>", b"<s>", b"</s>", *(f"w{n}\u2581".encode() for n in range(3, count))]
    types = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    special = [types.UNKNOWN, types.CONTROL, types.CONTROL]
    writer.add_token_types([*special, *([types.NORMAL] * (count - len(special)))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def write_model(folder: Path, kind: str, words: bool = False) -> Path:
    """With `words` the file has a vocabulary, else none: token ids only."""
    description = json.loads((folder / "model.json").read_text())
    config, path = description["config"], folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    if words:
        write_words(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    types = gguf.GGMLQuantizationType
    weights = np.memmap(folder / "weights.bin", dtype=np.float32, mode="r")
    for name, entry in description["tensors"].items():
        count = int(np.prod(entry["shape"]))
        data = np.array(weights[entry["offset"] // 4 :][:count]).reshape(entry["shape"])
        if ".q_proj." in name:
            data = interleaved(data, config["num_attention_heads"])
        if ".k_proj." in name:
            data = interleaved(data, config["num_key_value_heads"])
        chosen = types.F32 if data.ndim == 1 else types[kind.upper()]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Model:
    def __init__(self, path: Path, threads: int, rows: int = 1) -> None:
        silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self.quiet = silent(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = CONTEXT * rows
        settings.n_ubatch = 512
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.rows = rows
        self.batch = llama_cpp.llama_batch_init(CONTEXT * rows, 0, 1)

    def decode(self, rows: list[list[int]], position: int) -> list[np.ndarray]:
        """Tokens of every row, from `position` on; the logits behind the last of each."""
        batch, count, last = self.batch, 0, []
        for row, tokens in enumerate(rows):
            for at, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = position + at
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = row
                batch.logits[count] = at + 1 == len(tokens)
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = [llama_cpp.llama_get_logits_ith(self.context, at) for at in last]
        return [np.ctypeslib.as_array(logits, shape=(self.size,)) for logits in found]

    def run(self, prompt: list[int], new_tokens: int, logits: bool = False) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        start = time.perf_counter()
        found = self.decode([prompt] * self.rows, 0)
        first_logits = found[0].tolist() if logits else []
        texts = [[int(row.argmax())] for row in found]
        first = time.perf_counter()
        while len(texts[0]) < new_tokens:
            position = len(prompt) + len(texts[0]) - 1
            found = self.decode([text[-1:] for text in texts], position)
            for text, row in zip(texts, found, strict=True):
                text.append(int(row.argmax()))
        end = time.perf_counter()
        answer = {"first_s": first - start, "rest_s": end - first, "tokens": texts[0]}
        return {**answer, "logits": first_logits} if logits else answer


def main() -> None:
    folder, kind, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rows = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    model = Model(write_model(folder, kind), threads, rows)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(model.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
