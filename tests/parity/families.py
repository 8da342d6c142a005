"""Tiny random causal language models of many families, for generate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

TOKENS = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    **TOKENS,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256, **TOKENS}


@dataclass
class Family:
    """`static`: transformers wrote the model for static caches, so it gets a device cache."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    static: bool = True
    native: bool = True  # no node on the torch bridge


NEO = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 128,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 256,
    **TOKENS,
}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 256,
    **TOKENS,
}
BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4, **TOKENS}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
MPT = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, **TOKENS}
MIXTRAL = {**GROUPED, "num_local_experts": 4}
EXPERTS = {
    **GROUPED,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
STATES = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, **TOKENS}
WINDOW = {"sliding_window": 8}
WIDE = {"head_dim": 16}

T5 = {
    "num_layers": 2,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    **TOKENS,
}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 256,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
    **TOKENS,
}
MARIAN = {**BART, "decoder_vocab_size": 100}

WHISPER = {
    **{
        k: v for k, v in BART.items() if k not in ("max_position_embeddings", "forced_eos_token_id")
    },
    "encoder_layers": 3,  # other than the decoder's: its configuration counts the encoder's
    "num_mel_bins": 8,
    "max_source_positions": 30,
    "max_target_positions": 256,
}

ENCODER_DECODERS = {
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART),
    "marian": Family("MarianMTModel", "MarianConfig", MARIAN),
    "mbart": Family("MBartForConditionalGeneration", "MBartConfig", BART),
    "pegasus": Family("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neo": Family("GPTNeoForCausalLM", "GPTNeoConfig", NEO, static=False),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 8}),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT),
    "bloom": Family("BloomForCausalLM", "BloomConfig", BLOOM),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**GROUPED, **WINDOW}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, **WIDE}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**GROUPED, **WIDE}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, **WIDE, **WINDOW}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **WIDE, **WINDOW}),
    "phi": Family("PhiForCausalLM", "PhiConfig", SMALL),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "olmo": Family("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "cohere": Family("CohereForCausalLM", "CohereConfig", GROUPED),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "codegen": Family("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 8}),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "falcon": Family("FalconForCausalLM", "FalconConfig", FALCON),
    "mpt": Family("MptForCausalLM", "MptConfig", MPT, static=False),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "mamba": Family("MambaForCausalLM", "MambaConfig", STATES, static=False, native=False),
    "glm": Family("GlmForCausalLM", "GlmConfig", {**GROUPED, **WIDE}),
}


def build(name: str, seed: int) -> Any:
    """A model of a family with random weights that never ends a row by itself."""
    family = FAMILIES.get(name) or ENCODER_DECODERS[name]
    torch.manual_seed(seed)
    model = getattr(hf, family.model)(getattr(hf, family.config)(**family.options)).eval()
    model.generation_config.eos_token_id = None
    return model
