"""What fits where: the fastest layout of some models on 8 to 1,024 GPUs, by closed forms, as a table in Markdown.

    python benchmarks/fits.py [drive=true]

It takes seconds. With ``drive=true`` the layouts of the torch trainer are driven on fake tensors, a minute each, and
marked. Nothing is measured on a GPU.
"""

import sys
from typing import Any

from nrl.ops.plan.gpus import GPUS
from nrl.ops.plan.search import Candidate, fsdp_candidates, make_candidate, megatron_candidates, rank
from nrl.ops.plan.simulate import Step, simulate_step

QWEN = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
MODELS: dict[str, dict[str, Any]] = {  # from the config.json of Qwen/Qwen3-* and meta-llama/Llama-3.1-70B
    "Qwen3-0.6B": QWEN | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": QWEN | {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25_600,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128,
        "num_key_value_heads": 8, "intermediate_size": 28_672, "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": QWEN | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip
SIZES = (8, 64, 1024)
ALLOWANCE = 6 * 2**30


def cell(best: Candidate, driven: bool) -> str:
    layout = best.layout
    axes = {name: getattr(layout, name) for name in ("dp", "shard", "tp", "pp", "vp", "cp", "ep")}
    said = " ".join(f"{name}{size}" for name, size in axes.items() if size is not None and size > 1)
    again = {False: "none", True: "full", "selective": "sel."}[best.step.checkpointing]
    speed = f"{best.tokens_per_second:,.0f}" if best.fits else f"**{best.over / 2**30:.0f} GiB too much**"
    return f"{said}, {again}: {best.peak / 2**30:.0f} GiB{' (driven)' if driven else ''}, {speed}"


def main(drives: bool) -> None:
    for name in ("h100", "b200"):
        gpu = GPUS[name]
        print(f"\n{name.upper()}, {gpu.memory / 2**30:.1f} GiB:\n")
        print("| model | GPUs | torch trainer | Megatron's trainer |\n|---|---|---|---|")
        for model, config in MODELS.items():
            for size in SIZES:
                step = Step(config, dp=size, rows=4, width=8192, capability=gpu.capability, memory=int(gpu.memory))
                best = rank(list(fsdp_candidates(step, gpu, ALLOWANCE, size)))[0]
                if drives:
                    best = make_candidate(best.step, gpu, ALLOWANCE, counted=simulate_step(best.step))
                other = rank(list(megatron_candidates(step, gpu, ALLOWANCE, size)))[0]
                print(f"| {model} | {size:,} | {cell(best, drives)} | {cell(other, False)} |")


if __name__ == "__main__":
    main("drive=true" in sys.argv[1:])
