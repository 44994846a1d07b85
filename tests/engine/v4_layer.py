"""DeepSeek-V4's MoE layers inside vLLM's own classes, without the rest of the model.

Served whole, V4 needs kernels that vLLM's CPU build has for AMX only. Its MoE layers do not: they
are built as the model builds them, filled by moet, and judged by the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build(config: Any, checkpoint: Any) -> Any:
    """A torch module that holds the checkpoint's MoE layers as vLLM's V4 model makes them."""
    import torch
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    from moet.engine import experts, versions

    model, hf = checkpoint.geometry, checkpoint.config
    bias = torch.nn.Parameter(torch.zeros(model.experts), requires_grad=False)
    with versions.routed_experts_replaced(experts.moet_class):
        runners = [
            FusedMoEFactory(
                num_experts=model.experts,
                top_k=model.top_k,
                hidden_size=model.hidden,
                intermediate_size=model.intermediate,
                renormalize=hf["norm_topk_prob"],
                quant_config=config.quant_config,
                prefix=f"model.layers.{index}.ffn.experts",
                params_dtype=torch.bfloat16,
                scoring_func="sqrtsoftplus",
                routed_scaling_factor=hf["routed_scaling_factor"],
                apply_routed_scale_to_output=True,
                e_score_correction_bias=bias,
                swiglu_limit=hf["swiglu_limit"],
                router_logits_dtype=torch.float32,
            )
            for index in model.moe_layers
        ]
    return torch.nn.ModuleList(runners)


def compare(runner: Any, model: Any, seed: int) -> dict[str, int]:
    """One call of a layer, and the same call in the reference."""
    import numpy as np
    import torch

    from moet.hybrid.reference import ReferenceExperts
    from moet.kernels.spec import DType

    torch.manual_seed(seed)
    routed, tokens = runner.routed_experts, 11
    x = torch.randn(tokens, model.hidden).bfloat16()
    ids = torch.rand(tokens, model.experts).topk(model.top_k).indices.int()
    weights = torch.rand(tokens, model.top_k)
    out = routed.forward_modular(x=x, topk_weights=weights, topk_ids=ids)
    again, computer = torch.empty_like(out), routed.moet_layer.experts
    twin = ReferenceExperts(computer.spec)
    twin.bind(computer._leases.values())
    twin.run(
        x=x.data_ptr(),
        dtype=DType.BF16,
        tokens=tokens,
        weights=weights.data_ptr(),
        ids=ids.data_ptr(),
        out=again.data_ptr(),
    )
    bits = [tensor.view(torch.int16).numpy() for tensor in (out, again)]
    return {
        "outputs": out.numel(),
        "differ": int((bits[0] != bits[1]).sum()),
        "distinct": len(np.unique(bits[0])),
    }


def run(path: str, place: Path) -> dict[str, Any]:
    """Builds, fills and judges the MoE layers of a V4 checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    from moet.checkpoint import open_checkpoint
    from moet.engine import adapter, op

    config = EngineArgs(
        model=path, load_format="moet", skip_tokenizer_init=True, max_model_len=256,
        enforce_eager=True, kv_cache_memory_bytes=64 << 20,
    ).create_engine_config()  # fmt: skip
    checkpoint = open_checkpoint(path)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
        initialize_model_parallel(1, 1)
        layers = build(config, checkpoint)
        adapter.load_and_bind(layers, checkpoint, config, op.next_model())
        judged = [compare(runner, checkpoint.geometry, i) for i, runner in enumerate(layers)]
    spec = layers[0].routed_experts.moet_layer.experts.spec
    return {
        "judged": judged,
        "quantisation": type(config.quant_config).__name__,
        "act": spec.act.name,
        "limit": spec.limit,
        "scale": spec.output_scale,
        "left_to_runner": layers[0].routed_scaling_factor,
        "parameters": sorted(
            {name for r in layers for name, _ in r.routed_experts.named_parameters()}
        ),
    }
