"""SGLang's own MoE layer, timed like `moe_layer.py` times ours: base only, and its LoRA engine `lora_triton`.

    python benchmarks/sglang_moe_layer.py OUT.json [--shapes Q,G] [--tokens 1,8,…]

Needs SGLang and our packages on the path. Kernel tiles are what SGLang picks; SGLANG_MOE_CONFIG_DIR gives it
others. `lora_triton` needs SGLang 0.5.23 or newer: `--base-only` for older ones.
"""

# SGLang is no dependency of ours, and its internals are not typed.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownLambdaType=false

import argparse
import json
import statistics
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from moe_layer import RING, SHAPES, TOKENS, Batch, Layer, draw_batches, draw_layer, slots_of
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo, fused_experts_none_to_triton
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.runtime_context import get_context, get_parallel
from torch import Tensor

from lanewise.kernels.moe_plan import MoeShape

Run = Callable[[Layer, Batch], Tensor]


@contextmanager
def alone() -> Generator[None]:
    """SGLang's process state for one GPU, without a server."""
    get_context().override_server_args().install()
    fused_moe.get_tp_group = lambda: None
    with get_parallel().override(tp_group=types.SimpleNamespace(world_size=1)):
        yield


def dispatch(batch: Batch) -> Any:
    return StandardDispatchOutput(batch.x, None, StandardTopKOutput(batch.weights, batch.experts, None))


def base(shape: MoeShape) -> Run:
    config = MoeRunnerConfig(
        num_experts=shape.experts, num_local_experts=shape.experts, hidden_size=shape.hidden,
        intermediate_size_per_partition=shape.inner, top_k=shape.top_k, activation="silu", is_gated=True,
        inplace=False, params_dtype=torch.bfloat16,
    )  # fmt: skip

    def run(layer: Layer, batch: Batch) -> Tensor:
        bank = layer.bank
        quant = TritonMoeQuantInfo(
            w13_weight=bank.w13, w2_weight=bank.w2, use_fp8_w8a8=True, w13_scale=bank.s13, w2_scale=bank.s2,
            block_shape=[128, 128],
        )  # fmt: skip
        return fused_experts_none_to_triton(dispatch(batch), quant, config).hidden_states

    return run


class LoraTriton:
    """The engine of 0.5.23, one runner per layer and one workspace, as a server shares it."""

    def __init__(self, shape: MoeShape, slots: Tensor, prefill: bool):
        from sglang.srt.lora.moe import runner
        from sglang.srt.lora.moe.plan import resolve_plans
        from sglang.srt.lora.workspace import LoraWorkspace

        self.module, self.shape, self.slots, self.prefill = runner, shape, slots, prefill
        self.workspace = LoraWorkspace()
        self.plans = resolve_plans(
            architecture="sm90", is_shared_outer=True, physical_rank=shape.rank,
            activation=runner.ActivationFn.SILU, hidden_size=shape.hidden, num_local_experts=shape.experts,
            quant_family="fp8",
        )  # fmt: skip
        runner.MoeLoraRunner._allocate_output = lambda self, *, num_tokens, dtype, device: torch.empty(
            (num_tokens, self.hidden_size), dtype=dtype, device=device
        )
        self.runners: dict[int, Any] = {}

    def _runner(self, layer: Layer) -> Any:
        from sglang.srt.lora.moe.quant_info import MoeLoraFp8QuantInfo

        if id(layer) not in self.runners:
            shape, bank, module = self.shape, layer.bank, self.module
            quant = MoeLoraFp8QuantInfo(
                w13_weight=bank.w13, w13_scale=bank.s13, w2_weight=bank.w2, w2_scale=bank.s2,
                block_shape=(128, 128), num_local_experts=shape.experts, intermediate_size=shape.inner,
                hidden_size=shape.hidden,
            )  # fmt: skip
            rows = dict.fromkeys(choice.base_gemm_rows for choice in self.plans.values())
            runner = module.MoeLoraRunner(
                providers={r: module.select_provider_cls(r, "fp8", "triton")(quant) for r in rows},
                top_k=shape.top_k, routed_scaling_factor=None, activation=module.ActivationFn.SILU,
                is_gated=True, workspace=self.workspace,
            )  # fmt: skip
            runner.plans = dict(self.plans)
            self.runners[id(layer)] = runner
        return self.runners[id(layer)]

    def __call__(self, layer: Layer, batch: Batch) -> Tensor:
        factors = layer.factors
        lora = self.module.MoeLoraBatch(
            gate_up_lora_a=factors.a13, gate_up_lora_b=factors.b13, down_lora_a=factors.a2,
            down_lora_b=factors.b2, token_lora_mapping=self.slots, use_cuda_graph=True,
            is_prefill=self.prefill,
        )  # fmt: skip
        return self._runner(layer).run(dispatch(batch), lora).hidden_states


def median_time(run: Run, layers: Sequence[Layer], batches: Sequence[Batch], rounds: int = 30) -> float:
    """µs per layer: replays of a graph over the ring."""
    workspace = getattr(run, "workspace", None)
    stream = torch.cuda.Stream()
    with model_capture_mode():
        with torch.cuda.stream(stream):
            for _ in range(2):
                for layer, batch in zip(layers, batches, strict=False):
                    run(layer, batch)
        torch.cuda.synchronize()
        if workspace is not None:  # the token route is built once per forward, so also inside the graph
            workspace.routes.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [run(layer, batch) for layer, batch in zip(cycle(layers), batches, strict=False)]
        if workspace is not None:
            workspace.routes.clear()
    times: list[float] = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(kept))
    return statistics.median(times[3:])


def paths(shape: MoeShape, tokens: int, base_only: bool) -> Iterator[tuple[str, int, Run]]:
    yield "base", 0, base(shape)
    if base_only:
        return
    for adapters in (1, 8) if tokens > 1 else (1,):
        slots = slots_of(tokens, adapters)
        if tokens <= 512:
            yield "lora_triton decode", adapters, LoraTriton(shape, slots, prefill=False)
        if tokens >= 128:
            yield "lora_triton prefill", adapters, LoraTriton(shape, slots, prefill=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="Q,G")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ring", type=int, default=RING)
    parser.add_argument("--base-only", action="store_true")
    parser.add_argument("--version", required=True, help="of SGLang, for the record")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes.split(","):
        shape = SHAPES[name]
        layers = [draw_layer(shape, 100 + i) for i in range(arguments.ring)]
        for tokens in map(int, arguments.tokens.split(",")):
            batches = draw_batches(shape, tokens, len(layers))
            for path, adapters, run in paths(shape, tokens, arguments.base_only):
                micros = median_time(run, layers, batches)
                row = {
                    "version": arguments.version, "shape": name, "tokens": tokens, "path": path,
                    "adapters": adapters, "us": micros, "n": 30,
                }  # fmt: skip
                print(row, flush=True)
                rows.append(row)
                arguments.out.write_text(json.dumps(rows))
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad(), alone():
        main()
