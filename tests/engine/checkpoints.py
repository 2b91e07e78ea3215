"""Small Qwen3-MoE checkpoints with seeded random weights, in several safetensors shards.

``python checkpoints.py FOLDER`` writes A and B in every order of their tensors: ``FOLDER/A-layers`` and so on.
There is no tokenizer: engines that load them run with ``skip_tokenizer_init=True`` and take prompts as token ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import save_file

Order = Literal["layers", "scattered", "late", "leftover"]
"""How tensors are dealt to shards, which a streamer asks for in name order.

``layers``     a shard for each decoder layer, after one for the embeddings and the head
``scattered``  tensors are dealt to all shards in turn: hardly a layer is complete before the last shard
``late``       norm weights and one projection of every expert wait for the last shard
``leftover``   as ``layers``, and a file of an earlier save, with one projection of every expert, still stands beside
               the shards. vLLM's default loader skips it, as the index does not name it; the streamer's loader
               reads every safetensors file, so these tensors are loaded twice, with the same values
"""

ORDERS: tuple[Order, ...] = get_args(Order)
LEFTOVER = "earlier.safetensors"  # its name sorts before the shards'

SEEDS = {"A": 1, "B": 2}
SHARDS = 5
HIDDEN, EXPERT_SIZE, EXPERTS, LAYERS, VOCABULARY = 128, 64, 8, 3, 512
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 256,
    "mlp_only_layers": [],
    "moe_intermediate_size": EXPERT_SIZE,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}


def tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint with this seed: name and bfloat16 values, in the order of the layers."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        # Unit variance through every projection keeps the logits apart, so greedy tokens depend on all weights.
        return (torch.randn(*shape, generator=generator) * gain / shape[-1] ** 0.5).bfloat16()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    yield "model.embed_tokens.weight", normal(VOCABULARY, HIDDEN, gain=HIDDEN**0.5)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", norm(HIDDEN)
        for name, rows, columns in (
            ("q", HEADS * HEAD_SIZE, HIDDEN),
            ("k", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("v", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("o", HIDDEN, HEADS * HEAD_SIZE),
        ):
            yield f"{prefix}self_attn.{name}_proj.weight", normal(rows, columns, gain=2)
        yield prefix + "self_attn.q_norm.weight", norm(HEAD_SIZE)
        yield prefix + "self_attn.k_norm.weight", norm(HEAD_SIZE)
        yield prefix + "post_attention_layernorm.weight", norm(HIDDEN)
        yield prefix + "mlp.gate.weight", normal(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, rows, columns in (
                ("gate_proj", EXPERT_SIZE, HIDDEN),
                ("up_proj", EXPERT_SIZE, HIDDEN),
                ("down_proj", HIDDEN, EXPERT_SIZE),
            ):
                yield f"{prefix}mlp.experts.{expert}.{name}.weight", normal(rows, columns, gain=2)
    yield "model.norm.weight", norm(HIDDEN)
    yield "lm_head.weight", normal(VOCABULARY, HIDDEN)


def shard_of(name: str, position: int, order: Order) -> int:
    """Return the shard, 0 to ``SHARDS - 1``, that holds the tensor at this position of the checkpoint."""
    if order == "scattered":
        return position % SHARDS
    if order == "late" and ("norm" in name or "up_proj" in name):
        return SHARDS - 1
    parts = name.split(".")
    return 1 + int(parts[2]) % (SHARDS - 1) if parts[1] == "layers" else 0


def write(folder: Path | str, seed: int, order: Order = "layers") -> Path:
    """Write the checkpoint with this seed into a new folder and return its path.

    Two seeds differ in every tensor. Two orders of one seed hold the same tensors.
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for position, (name, tensor) in enumerate(tensors(seed)):
        file = f"model-{shard_of(name, position, order) + 1:05d}-of-{SHARDS:05d}.safetensors"
        shards.setdefault(file, {})[name] = tensor
    for file, content in sorted(shards.items()):
        save_file(content, folder / file, metadata={"format": "pt"})
    if order == "leftover":
        again = {name: t for content in shards.values() for name, t in content.items() if "gate_proj" in name}
        save_file(again, folder / LEFTOVER, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for content in shards.values() for t in content.values())},
        "weight_map": {name: file for file, content in sorted(shards.items()) for name in content},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return folder


def write_dense(folder: Path | str, seed: int) -> Path:
    """Write a Qwen3 checkpoint without experts into a new folder and return its path; its MLP is a first expert."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    kept = {
        name.replace("experts.0.", ""): tensor
        for name, tensor in tensors(seed)
        if "mlp" not in name or "experts.0." in name
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": EXPERT_SIZE}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **dense}, indent=1))
    return folder


def write_all(root: Path | str) -> dict[str, str]:
    """Write A and B in every order below a folder; return their folders by names such as ``A-layers``."""
    named = [(f"{name}-{order}", seed, order) for name, seed in SEEDS.items() for order in ORDERS]
    return {name: str(write(Path(root) / name, seed, order)) for name, seed, order in named}


if __name__ == "__main__":
    write_all(sys.argv[1])
