"""`rm-abstract serve`: models of folders behind an OpenAI-compatible server."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from rm_abstract.base.errors import Error

_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "torch", "transformers")


def _complete() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Error(
            f"[serve] expected the package {missing[0]}, which is not installed; "
            "try pip install rm_abstract[serve]"
        )


def _keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    lines = [] if file is None else file.read_text().splitlines()
    keys = (*given, *(line.strip() for line in lines if line.strip()))
    if file is not None and not keys:
        raise Error(f"[serve] expected a key in {file}, found none")
    return keys


def _named(given: str) -> tuple[str, Path]:
    """NAME=FOLDER, or a folder whose name is the model's."""
    name, found, folder = given.partition("=")
    if found and not Path(given).exists():
        return name, Path(folder)
    return Path(given).resolve().name, Path(given)


@click.command()
@click.argument("model", nargs=-1, required=True, metavar="[NAME=]MODEL_DIR...")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: a free one, which is printed")
@click.option("--engine", type=click.Choice(["native", "vllm", "onnxruntime"]), default="native")
@click.option("--device", default=None, help="as rm_abstract.init takes it")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16")
@click.option("--rows", default=16, show_default=True, help="requests computed together")
@click.option("--queue", default=64, show_default=True, help="requests that may wait beyond those")
@click.option("--context-length", type=int, default=None, help="at most what the model takes")
@click.option("--prefix-mib", default=256, show_default=True, help="memory for known prompts")
@click.option("--prompt-chunk", default=64, show_default=True, help="prompt tokens between steps")
@click.option("--timeout", default=600.0, show_default=True, help="seconds a request may take")
@click.option("--drain", default=30, show_default=True, help="seconds to finish after SIGTERM")
@click.option("--max-body", default=4 << 20, show_default=True, help="bytes of a request")
@click.option("--body-timeout", default=30.0, show_default=True, help="seconds between its parts")
@click.option("--header-timeout", default=10.0, show_default=True, help="seconds for all headers")
@click.option("--connections", default=512, show_default=True, help="at once; beyond them 503")
@click.option("--send-timeout", default=60.0, show_default=True, help="seconds to take an answer")
@click.option("--api-key", multiple=True, help="a key; others see it: prefer a file")
@click.option(
    "--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None
)
@click.option("--tls-certificate", type=click.Path(exists=True, dir_okay=False), default=None)
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), default=None)
def serve(
    model: tuple[str, ...],
    host: str,
    port: int,
    engine: str,
    device: str | None,
    dtype: str,
    rows: int,
    queue: int,
    context_length: int | None,
    prefix_mib: int,
    prompt_chunk: int,
    timeout: float,
    drain: int,
    max_body: int,
    body_timeout: float,
    header_timeout: float,
    connections: int,
    send_timeout: float,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    tls_certificate: str | None,
    tls_key: str | None,
) -> None:
    """Serve models at /v1 as OpenAI's API does; see docs/serving.md."""
    if min(rows, prompt_chunk, max_body, connections) < 1 or min(queue, prefix_mib) < 0:
        raise Error("[serve] expected limits above zero")
    if bool(tls_certificate) != bool(tls_key):
        raise Error("[serve] expected --tls-certificate and --tls-key together")
    _complete()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread a model asks it
    import rm_abstract
    from rm_abstract.generation.scheduler import Limits
    from rm_abstract.server.app import Server
    from rm_abstract.server.limits import Policy
    from rm_abstract.server.models import load
    from rm_abstract.server.run import Address, run

    keys = _keys(api_key, api_key_file)
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        click.echo(f"anybody who reaches {host} may ask: no API key is set", err=True)
    limits = Limits(
        rows=rows, waiting=queue, prompt_chunk=prompt_chunk, prefix_bytes=prefix_mib << 20
    )
    rm_abstract.init(device, inference_engine=engine)
    served = {}
    for given in model:
        name, folder = _named(given)
        if name in served:
            raise Error(f"[serve] expected different names, got {name} twice; try NAME=FOLDER")
        served[name] = load(folder, name, limits, dtype, context_length, engine)
    policy = Policy(keys, max_body, body_timeout, send_timeout, header_timeout, connections)
    server = Server(served, policy, timeout or None, queue, rm_abstract.current_device())
    run(server, Address(host, port, tls_certificate, tls_key), drain)
