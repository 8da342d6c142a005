"""Train the byte-level Llama of examples/models/tiny_llama on Python's standard library.

Ordinary PyTorch and Transformers code, without rm_abstract. The model is small, but its greedy
choices have the margins of a trained one, which random weights do not have. The checkpoint in the
repository took 45 s of one H200 (--device cuda --minutes 0.75 --batch 64: 69 MB seen, 0.889 nats a
byte on files held out). The default arguments, 12 minutes of one CPU core, gave a weaker one
(1.88 MB seen, 1.43 nats).
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = 256, 257, 258  # ids 0-255 are the bytes themselves
CONTEXT = 256  # bytes a training window holds
# Tests, generated tables and data disguised as source teach nothing about ordinary code.
SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "turtledemo",
}


def byte_alphabet() -> list[str]:
    """The printable character that the ByteLevel pre-tokenizer writes for each byte, by byte value.

    Printable Latin-1 bytes stand for themselves, the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids are the UTF-8 bytes of the text, plus three special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<pad>", "<bos>", "<eos>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=2 * CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def read_corpus(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """All sources under `root` as two streams of ids; every 40th file is kept for validation."""
    streams: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    ends: tuple[list[int], list[int]] = ([], [])
    paths = [p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts)]
    for number, path in enumerate(paths):
        which = int(number % 40 == 39)
        streams[which].extend(path.read_bytes())
        ends[which].append(len(streams[which]))
        streams[which].extend(b"\0\0")  # room for <eos> <bos>
    result = []
    for stream, end in zip(streams, ends, strict=True):
        ids = torch.frombuffer(stream, dtype=torch.uint8).to(torch.int16)
        positions = torch.tensor(end)
        ids[positions], ids[positions + 1] = EOS, BOS
        result.append(ids)
    return result[0], result[1]


def sample_batch(stream: torch.Tensor, batch: int, random: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(stream) - CONTEXT, (batch,), generator=random)
    return stream[starts[:, None] + torch.arange(CONTEXT)].long()


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 3 %, then a cosine down to 2 % of the peak."""
    warmup = min(1.0, progress / 0.03)
    return peak * warmup * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def validation_loss(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Mean loss in nats a byte over the same 64 windows each time."""
    model.eval()
    windows = sample_batch(stream, 64, torch.Generator().manual_seed(1)).to(model.device)
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss.item() for part in windows.split(16)]
    model.train()
    return sum(losses) / len(losses)


def train(
    model: LlamaForCausalLM,
    training: torch.Tensor,
    validation: torch.Tensor,
    args: argparse.Namespace,
) -> None:
    """Train for `args.minutes` of wall time; the schedule follows the clock, not a step count."""
    random = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model)
    started, step = time.monotonic(), 0
    model.train()
    while (progress := (time.monotonic() - started) / (60.0 * args.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.learning_rate)
        ids = sample_batch(training, args.batch, random).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % args.report == 0:
            held_out = validation_loss(model, validation)
            print(f"{progress:4.0%} step {step}: validation {held_out:.3f}", flush=True)
    model.eval()
    print(
        f"{step} steps, {step * args.batch * CONTEXT / 1e6:.2f} M bytes, "
        f"validation {validation_loss(model, validation):.3f} nats a byte"
    )


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=here / "models" / "tiny_llama")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--report", type=int, default=200, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    training, validation = read_corpus(args.corpus)
    torch.set_float32_matmul_precision("high")
    model = make_model().to(args.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} M parameters, {len(training) / 1e6:.1f} M training bytes", flush=True)
    train(model, training, validation, args)

    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, do_sample=False, max_new_tokens=128
    )
    model.cpu().half().save_pretrained(args.output)
    make_tokenizer().save_pretrained(args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
